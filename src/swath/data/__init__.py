"""Replay buffers, and datasets on disk: write batches, load them back, also with Minari."""

from swath.data.datasets import DatasetWriter, load_dataset
from swath.data.minari import MinariWriter, read_minari
from swath.data.ray import RayReplayBuffer
from swath.data.recovery import recover_dataset
from swath.data.replay import ReplayBuffer
from swath.data.samplers import PrioritizedSampler, Sampler, SliceSampler, UniformSampler
from swath.data.summary import describe

__all__ = [
    "DatasetWriter",
    "MinariWriter",
    "PrioritizedSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "Sampler",
    "SliceSampler",
    "UniformSampler",
    "describe",
    "load_dataset",
    "read_minari",
    "recover_dataset",
]
