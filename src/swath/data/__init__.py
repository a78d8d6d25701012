"""Datasets on disk: write batches, load them back as one TensorDict, export them to Minari."""

from swath.data.datasets import DatasetWriter, load_dataset
from swath.data.minari import MinariWriter, minari_id, to_minari

__all__ = ["DatasetWriter", "MinariWriter", "load_dataset", "minari_id", "to_minari"]
