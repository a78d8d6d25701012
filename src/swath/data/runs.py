"""Which frame of a trajectory comes before which, for slices.

```
 frames, by number   0 1 2 | 3 4 5 | 6 7      two envs, batches of three steps, then two of env A
 env                 A A A   B B B   A A
 run                 1 2 3   1 2 3   1 2      frames of it up to this one that stand side by side
 depth               1 2 3   1 2 3   4 5      frames of it up to this one
 before              -1      -1      2        of the first of a run: the one before it
```
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from swath.data.storage import Ring
from swath.rollout import keys
from swath.tree import Key

__all__ = ["Runs"]

_MANY = 10_000


class Runs:
    """Keeps for each frame how many come before it, and where; one per writer.

    A trajectory goes on where this writer last wrote a frame of it, however many batches ago.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # by trajectory: its last frame and depth

    def follow(self, ring: Ring, first: int, values: Mapping[Key, torch.Tensor]) -> None:
        """Note frames that are written now, `[frames, *shape]` by key, before they are whole."""
        ids = values[keys.TRAJ_IDS].cpu().numpy().reshape(-1)
        done = values.get(keys.NEXT_DONE)
        ended = np.zeros(len(ids), np.bool_) if done is None else done.cpu().numpy().reshape(-1)
        self._follow(ring, np.arange(first, first + len(ids)), ids, ended)

    def restore(self, ring: Ring, numbers: np.ndarray) -> None:
        """Note frames that stand in their rows already."""
        if len(numbers):
            rows = numbers % ring.capacity
            ids, ended = (
                ring.columns[key].take(rows).cpu().numpy().reshape(-1)
                if key in ring.columns
                else np.zeros(len(rows), np.bool_)
                for key in (keys.TRAJ_IDS, keys.NEXT_DONE)
            )
            self._follow(ring, numbers, ids, ended)

    def _follow(self, ring: Ring, numbers: np.ndarray, ids: np.ndarray, ended: np.ndarray) -> None:
        new = np.empty(len(ids), np.bool_)
        new[0] = True
        np.not_equal(ids[1:], ids[:-1], out=new[1:])
        new[1:] |= ended[:-1]
        if numbers[-1] - numbers[0] >= len(numbers):  # some are missing
            new[1:] |= np.diff(numbers) != 1
        starts = np.flatnonzero(new)
        lengths = np.diff(starts, append=len(ids))
        run = np.arange(1, len(ids) + 1, dtype=np.int32)
        run -= np.repeat(starts.astype(np.int32), lengths)
        before, earlier = self._link(numbers, starts, lengths, ids, ended)
        rows = ring.rows(numbers)
        ring.run[rows] = run
        if earlier.any():
            run += np.repeat(earlier, lengths)
        ring.depth[rows] = run
        ring.before[numbers[starts] % ring.capacity] = before
        if len(self._last) > _MANY:  # trajectories that nobody ended
            low = ring.window()[0]
            self._last = {one: last for one, last in self._last.items() if last[0] >= low}

    def _link(
        self,
        numbers: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        ids: np.ndarray,
        ended: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the frame before each run, and how many of its trajectory come before it."""
        before, earlier = np.full(len(starts), -1), np.zeros(len(starts), np.int32)
        last = starts + lengths - 1
        trajectories, goes_on = ids[starts], ~ended[last]
        known = self._last
        live = known.keys() | trajectories[goes_on].tolist()  # others are here from end to end
        for place, one in enumerate(trajectories.tolist()):
            if one in live:
                before[place], earlier[place] = known.pop(one, (-1, 0))
                if goes_on[place]:
                    known[one] = int(numbers[last[place]]), int(earlier[place] + lengths[place])
        return before, earlier
