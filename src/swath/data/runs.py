"""Which frame of a trajectory comes before which, for slices.

```
 frames, by number   0 1 2 | 3 4 5 | 6 7      two envs, batches of three steps, then two of env A
 env                 A A A   B B B   A A
 begins              0 0 0   3 3 3   6 6      the first frame of the stretch that it stands in
 before              -1      -1      2        of the first: the one that may come before it
```

A stretch is what one writer wrote in the order of time, side by side: a row of a batch, or less of
it. There may be several trajectories in it, each of which but the last ends there. A sampler looks
for their ends itself, among the few frames that it considers, so that a write costs little.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swath.data.storage import Ring, Word
from swath.rollout import keys

__all__ = ["Runs", "consecutive", "depth"]

_MANY = 10_000


class Runs:
    """Keeps for each frame where its stretch begins, and what comes before; one per writer.

    A trajectory goes on where this writer last wrote a frame of it, however many batches ago; but
    not across a state that was loaded, by whomever: numbers mean other frames since.
    """

    def __init__(self, ring: Ring) -> None:
        self._last: dict[int, int] = {}  # by trajectory that is open: its last frame
        self.loaded = ring.words[Word.LOADED]

    @staticmethod
    def begin(ring: Ring) -> None:
        """Let all writers keep this from now on, since somebody wants to draw slices."""
        with ring:
            if ring.words[Word.RUNS]:
                return
            # Who is writing just now may not know of it, so that each frame stands for itself.
            rows = np.flatnonzero(ring.stamps < 0)
            ring.begins[rows], ring.before[rows] = -1 - ring.stamps[rows], -1
            Runs(ring).follow(ring, ring.numbers())
            ring.words[Word.RUNS] = 1

    def follow(self, ring: Ring, numbers: np.ndarray, length: int | None = None) -> None:
        """Note frames that stand in their rows, in the order of time, before they are whole.

        Args:
            ring: Where they are.
            numbers: Of the frames.
            length: After so many frames time begins anew, and only there a trajectory that was
                begun earlier goes on after the end of another; anywhere, if None.
        """
        if not len(numbers):
            return
        rows = ring.rows(numbers)
        for key in (keys.TRAJ_IDS, keys.NEXT_DONE):
            ring.copy_to_host(key, rows)
        ids, ended = ring.on_host(keys.TRAJ_IDS)[rows], ring.on_host(keys.NEXT_DONE)[rows]
        begins = np.ones(len(ids) + 1, np.bool_)
        inner = begins[1:-1]
        np.not_equal(ids[1:], ids[:-1], out=inner)
        if length is None:
            inner |= ended[:-1] != 0
            if numbers[-1] - numbers[0] >= len(numbers):  # some are missing
                inner |= numbers[1:] - numbers[:-1] != 1
        else:
            np.greater(inner, ended[:-1], out=inner)
            begins[length::length] = True
        bounds = begins.nonzero()[0]
        starts, last = bounds[:-1], bounds[1:] - 1
        firsts = numbers[starts]
        ring.begins[rows] = firsts.repeat(last - starts + 1)
        edges = (x.tolist() for x in (ids[starts], ids[last], ended[last], numbers[last]))
        before = self._before(ring, *edges)
        ring.before[firsts % ring.capacity] = before

    def follow_rows(self, ring: Ring, first: int, ids: np.ndarray, ended: np.ndarray) -> bool:
        """Note a batch `[N, T]` from frame `first` on, as `follow` does, in less time.

        False, if it is none of which each row is a stretch in one piece, as they nearly always are.
        """
        envs, steps = ids.shape
        start = first % ring.capacity
        stop = start + envs * steps
        by_step, ends = ids.T, ended.T  # in one piece, if they come from a collector
        broken = (by_step[1:] != by_step[:-1]) > ends[:-1]
        if stop > ring.capacity or np.count_nonzero(broken):
            return False
        firsts = np.arange(first, first + envs * steps, steps)
        ring.begins[start:stop].reshape(envs, steps)[...] = firsts[:, None]
        edges = (x.tolist() for x in (by_step[0], by_step[-1], ends[-1]))
        before = self._before(ring, *edges, range(first + steps - 1, first + envs * steps, steps))
        ring.before[start:stop:steps] = before
        return True

    def _before(self, ring: Ring, *stretches: Iterable[int]) -> list[int]:
        """Return what comes before stretches, and keep what follows may go on from.

        Args:
            ring: Where they are.
            stretches: The trajectory at the beginning of each, the one at its end, whether that has
                ended, and the number of the last frame.
        """
        before, known = [], self._last
        for first, final, ends, number in zip(*stretches, strict=True):
            before.append(known.pop(first, -1))
            if not ends:
                known[final] = number
        if len(known) > _MANY:  # trajectories that nobody ended
            low = ring.window()[0]
            self._last = {one: last for one, last in known.items() if last >= low}
        return before


def consecutive(ring: Ring, index: np.ndarray) -> np.ndarray:
    """Tell which rows of `[slices, frames]` do not go beyond the end of a trajectory."""
    return ~ring.on_host(keys.NEXT_DONE)[index[:, :-1] % ring.capacity].any(1)


def depth(ring: Ring, numbers: np.ndarray) -> np.ndarray:
    """Return for frames, in order, how many of their trajectory they surely are the last of.

    A large number, if they stand so near to the beginning of a stretch that there may be more.
    """
    rows = numbers % ring.capacity
    begins, ended = ring.begins[rows], ring.on_host(keys.NEXT_DONE)[rows[:-1]]
    new = np.ones(len(numbers), np.bool_)
    new[1:] = (ended != 0) | (numbers[1:] - numbers[:-1] != 1) | (begins[1:] != begins[:-1])
    first = np.maximum.accumulate(np.where(new, np.arange(len(numbers)), 0))
    goes_back = (begins[first] == numbers[first]) & (ring.before[rows[first]] >= 0)
    return np.where(goes_back, 1 << 62, np.arange(1, len(numbers) + 1) - first)
