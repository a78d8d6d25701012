"""CUDA streams and graphs; knows nothing of reinforcement learning."""

from swath.devices.graph import Recorder, fingerprint, refusal
from swath.devices.streams import OwnStream, side_by_side

__all__ = ["OwnStream", "Recorder", "fingerprint", "refusal", "side_by_side"]
