"""Which frame of a trajectory comes before which, for slices.

```
 frames, by number   0 1 2 | 3 4 5 | 6 7      two envs, batches of three steps, then two of env A
 env                 A A A   B B B   A A
 run                 1 2 3   1 2 3   1 2      frames of it up to this one that stand side by side
 links               -1,0    -1,0    2,3      of the first: the one before it, how many there are
```
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swath.data.storage import Ring

__all__ = ["Runs"]

_MANY = 10_000


class Runs:
    """Keeps for each frame how many come before it, and where; one per writer.

    A trajectory goes on where this writer last wrote a frame of it, however many batches ago.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # by trajectory: its last frame and depth

    def follow(self, ring: Ring, numbers: np.ndarray, ids: np.ndarray, ended: np.ndarray) -> None:
        """Note frames in the order of time, before they are whole.

        Args:
            ring: Where they are.
            numbers: Of the frames.
            ids: Their trajectories.
            ended: Whether it ends with them.
        """
        new = np.ones(len(ids) + 1, np.bool_)
        inner = new[1:-1]
        np.not_equal(ids[1:], ids[:-1], out=inner)
        inner |= ended[:-1]
        if numbers[-1] - numbers[0] >= len(numbers):  # some are missing
            inner |= numbers[1:] - numbers[:-1] != 1
        edges = new.nonzero()[0]
        starts, last = edges[:-1], edges[1:] - 1
        ring.run[ring.rows(numbers)] = np.arange(1, len(ids) + 1) - starts.repeat(last - starts + 1)
        firsts = numbers[starts]
        rows = firsts % ring.capacity
        ring.links[rows] = -1, 0
        runs = (ids[starts], ended[last], firsts, numbers[last])
        places, found = self._link(zip(*(each.tolist() for each in runs), strict=True))
        if places:
            ring.links[rows[places]] = found
        if len(self._last) > _MANY:  # trajectories that nobody ended
            low = ring.window()[0]
            self._last = {one: last for one, last in self._last.items() if last[0] >= low}

    def _link(
        self, runs: Iterable[tuple[int, bool, int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return which runs continue one, with the frame before them and how many come before.

        Args:
            runs: For each its trajectory, whether that ends with it, its first and last frame.
        """
        places, found, known = [], [], self._last
        for place, (trajectory, ends, first, last) in enumerate(runs):
            if ends and trajectory not in known:
                continue  # all of it is here, as of most
            before = known.pop(trajectory, None)
            if before is not None:
                places.append(place)
                found.append(before)
            if not ends:
                known[trajectory] = last, last - first + 1 + (before[1] if before else 0)
        return places, found
