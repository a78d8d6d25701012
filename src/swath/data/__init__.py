"""Replay buffers, and datasets on disk: write batches, load them back, also with Minari."""

from swath.data.datasets import DatasetWriter, load_dataset
from swath.data.minari import MinariWriter
from swath.data.ray import RayReplayBuffer
from swath.data.replay import ReplayBuffer
from swath.data.samplers import PrioritizedSampler, Sampler, SliceSampler, UniformSampler

__all__ = [
    "DatasetWriter",
    "MinariWriter",
    "PrioritizedSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "Sampler",
    "SliceSampler",
    "UniformSampler",
    "load_dataset",
]
