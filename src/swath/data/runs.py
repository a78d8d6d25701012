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

Ids tell trajectories of one writer apart, not those of two: each collector counts from 0. So a
batch of a collector says which batch it follows (`Stream`), by a name that no other has, and its
trajectories go on from there and nowhere else. A collector that goes back to an earlier state, or
whose frames went elsewhere meanwhile, follows what is not there any more: then nothing goes on.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from swath.data.storage import Ring, Word
from swath.rollout import keys

__all__ = ["Runs", "Stream", "Streams", "consecutive", "depth"]

_MANY = 10_000
_STREAMS = 1_000


class Stream:
    """What one source writes to a buffer, batch after batch.

    Args:
        last: The name of the batch that the next one follows.
    """

    _writing: ContextVar[Stream | None] = ContextVar("swath stream", default=None)

    def __init__(self, last: str | None = None) -> None:
        self.last = uuid.uuid4().hex if last is None else last

    def write(self, buffer: Any, batch: Any) -> None:
        """Call `buffer.extend(batch)`, which may be anybody's, so that ours knows whose it is."""
        token = self._writing.set(self)
        try:
            buffer.extend(batch)
        finally:
            self._writing.reset(token)

    def cut(self) -> None:
        """Let the next batch follow none: frames in between are not in the buffer."""
        self.last = uuid.uuid4().hex

    @classmethod
    def names(cls, writer: str) -> tuple[str, str]:
        """Return the name of the batch that the one being written now follows, and its own.

        All batches of a writer who is no stream have the same one.
        """
        stream = cls._writing.get()
        if stream is None:
            return writer, writer
        after = stream.last
        stream.cut()  # before it is written: whoever is interrupted just behind that goes on there
        return after, stream.last


class Runs:
    """Keeps for each frame where its stretch begins, and what comes before; one per writer.

    A trajectory goes on where this writer last wrote a frame of it, however many batches ago; but
    not across a state that was loaded, by whomever: numbers mean other frames since.
    """

    def __init__(self, ring: Ring) -> None:
        self.last: dict[int, int] = {}  # by trajectory that is open: its last frame
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
        before, known = [], self.last
        for first, final, ends, number in zip(*stretches, strict=True):
            before.append(known.pop(first, -1))
            if not ends:
                known[final] = number
        if len(known) > _MANY:  # trajectories that nobody ended
            low = ring.window()[0]
            self.last = {one: last for one, last in known.items() if last >= low}
        return before


class Streams:
    """What trajectories go on from, by the name of the batch that the next is to follow."""

    def __init__(self) -> None:
        self._runs: dict[str, Runs] = {}

    def take(self, after: str, ring: Ring) -> Runs | None:
        """Return what notes a batch that follows another, if slices are wanted in any process."""
        runs = self._runs.pop(after, None)
        if not ring.words[Word.RUNS]:
            return None
        return Runs(ring) if runs is None or runs.loaded != ring.words[Word.LOADED] else runs

    def put(self, name: str, runs: Runs | None) -> None:
        """Let batches follow one that is written."""
        if runs is not None:
            self._runs[name] = runs
            if len(self._runs) > _STREAMS:  # those of sources that went back, or are gone
                self._runs.pop(next(iter(self._runs)), None)

    def forget(self, after: str) -> None:
        """Let nothing follow a batch any more."""
        self._runs.pop(after, None)

    def state(self, ring: Ring) -> dict[str, torch.Tensor]:
        """Return for each name the open trajectories, `[trajectories, (id, last frame)]`."""
        loaded = ring.words[Word.LOADED]
        return {
            name: torch.tensor(list(runs.last.items()), dtype=torch.int64).reshape(-1, 2)
            for name, runs in list(self._runs.items())
            if runs.loaded == loaded
        }

    def load(self, ring: Ring, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`; the frames are in the ring already."""
        self._runs = {}
        for name, known in state.items():
            self._runs[name] = runs = Runs(ring)
            runs.last = dict(known.tolist())


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
