"""Helpers for what collectors deliver."""

from swath.delivery.compact import restore_next
from swath.delivery.split import split_trajectories

__all__ = ["restore_next", "split_trajectories"]
