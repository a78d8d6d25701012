"""The tool that users apply to a batch: `split_trajectories`."""

from __future__ import annotations

from swath.delivery.split import split_trajectories

__all__ = ["split_trajectories"]
