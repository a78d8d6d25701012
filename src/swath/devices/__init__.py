"""CUDA streams and graphs; knows nothing of reinforcement learning."""

from swath.devices.graph import Recorder, fingerprint, refusal
from swath.devices.streams import OwnStream

__all__ = ["OwnStream", "Recorder", "fingerprint", "refusal"]
