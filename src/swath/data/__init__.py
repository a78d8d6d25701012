"""Datasets on disk: write batches, load them back as one TensorDict or with Minari."""

from swath.data.datasets import DatasetWriter, load_dataset
from swath.data.minari import MinariWriter

__all__ = ["DatasetWriter", "MinariWriter", "load_dataset"]
