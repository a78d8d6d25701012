"""Which frame of a trajectory comes before which, for slices."""

from __future__ import annotations

from typing import Any

import numpy as np

from swath.data.storage import Ring
from swath.rollout import keys

__all__ = ["Runs"]

_MANY = 10_000


class Runs:
    """Keeps for each frame the one before it and how many there are up to it; one per writer.

    A trajectory goes on where this writer last wrote a frame of it, however many batches ago.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def follow(self, ring: Ring, numbers: np.ndarray) -> None:
        """Note frames that have just been copied into their rows, in the order of time."""
        if not len(numbers):
            return
        first = int(numbers[0])
        spans = ring.spans(first, int(numbers[-1]) - first + 1)
        if len(spans) == 1 and spans[0][1] - spans[0][0] == len(numbers):
            rows: Any = slice(*spans[0][:2])  # in one piece, which is faster
        else:
            rows = numbers % ring.capacity
        ids = ring.columns[keys.TRAJ_IDS].tensor[rows].cpu().numpy().reshape(-1)
        new = np.ones(len(ids), np.bool_)
        new[1:] = ids[1:] != ids[:-1]
        ended = np.zeros(len(ids), np.bool_)
        if keys.NEXT_DONE in ring.columns:
            ended = ring.columns[keys.NEXT_DONE].tensor[rows].cpu().numpy().reshape(-1)
            new[1:] |= ended[:-1]
        starts = np.flatnonzero(new)
        stops = np.append(starts[1:], len(ids))
        depth = np.arange(1, len(ids) + 1) - np.repeat(starts, stops - starts)
        before = np.concatenate([numbers[:1], numbers[:-1]])
        before[starts] = -1
        goes_on = (~ended[stops - 1]).tolist()
        parts = zip(ids[starts].tolist(), starts.tolist(), stops.tolist(), goes_on, strict=True)
        for trajectory, start, stop, open_still in parts:
            if not open_still and trajectory not in self._last:
                continue  # all of it is here, as of most
            last = self._last.pop(trajectory, None)
            if last is not None and (so_far := self._depth(ring, numbers, depth, last)):
                before[start] = last
                depth[start:stop] += so_far
            if open_still:
                self._last[trajectory] = int(numbers[stop - 1])
        ring.depth[rows], ring.before[rows] = depth, before
        if len(self._last) > _MANY:  # trajectories that nobody ended
            low = ring.window()[0]
            self._last = {one: last for one, last in self._last.items() if last >= low}

    @staticmethod
    def _depth(ring: Ring, numbers: np.ndarray, depth: np.ndarray, last: int) -> int:
        """Return how many frames there are up to `last`; 0 if it is gone."""
        if last >= numbers[0]:
            return int(depth[np.searchsorted(numbers, last)])
        row = last % ring.capacity
        return int(ring.depth[row]) if ring.stamps[row] == last + 1 else 0
