"""How a batch of a replay buffer is drawn.

```
 may it? --> numbers --> copy --> still whole? or again --> transform --> pinned --> device
```
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.compat.tensordict import unchecked
from swath.data.pacing import Pace
from swath.data.samplers import Sampler
from swath.data.storage import Ring, Word
from swath.rollout import keys
from swath.tree import Key

__all__ = ["Draws", "Wanted"]

_PATIENCE = 8
_MANY, _LARGE = 128, 4096


class Lags:
    """By how many versions frames lagged; added up many batches at a time, for speed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames = self._sum = self._most = 0
        self._waiting: deque[np.ndarray] = deque()

    def note(self, newest: int, versions: torch.Tensor) -> None:
        """Take the versions that acted, and the newest one."""
        lags = newest - (versions.numpy(force=True) if versions.is_cuda else versions.numpy())
        self._waiting.append(lags)  # in one go, whoever else does
        if len(self._waiting) >= _MANY or lags.size > _LARGE:
            self.as_dict()

    def as_dict(self) -> dict[str, float]:
        """Return their mean and the largest."""
        with self._lock:
            if waiting := [self._waiting.popleft() for _ in range(len(self._waiting))]:
                lags = np.concatenate([some.reshape(-1) for some in waiting])
                self._frames, self._sum = self._frames + lags.size, self._sum + int(lags.sum())
                self._most = max(self._most, int(lags.max(initial=0)))
            mean = self._sum / self._frames if self._frames else 0.0
            return {"lag_mean": mean, "lag_max": self._most}


@dataclass(slots=True)
class Wanted:
    """A batch that somebody wants, and may wait for."""

    shape: tuple[int, ...]
    size: int
    tried: Any = None
    """Of what it could not be drawn: it is not tried again before there is something new. So the
    random numbers that a wait takes do not depend on how long it is."""


@dataclass
class Draws:
    """Draws batches from a ring, for one buffer; any thread may."""

    sampler: Sampler
    pace: Pace
    rng: np.random.Generator
    transform: Callable[[Any], Any] | None
    device: torch.device | None
    pin: bool

    def __post_init__(self) -> None:
        self.lags = Lags()
        self._under_way = 0  # samples that threads of this process draw, under the ring's lock
        self.news = object()
        """Another one when a draw may succeed that has failed, though nothing was written."""

    def attempt(self, ring: Ring | None, wanted: Wanted) -> TensorDict | None:
        """Return a batch, or None if there are not frames enough now, or not yet.

        Samples count when they are drawn, not before: until then writers may be held back, so that
        without tolerance nothing is written while frames are drawn.
        """
        if ring is None:
            return None
        words = ring.words
        written = words[Word.WRITTEN]
        state = written, words[Word.LOADED], self.news
        # Where no ratio is kept, nothing is reserved, and nobody needs the lock to begin.
        reserved = 0 if self.pace.samples_per_insert is None else wanted.size
        if state == wanted.tried:
            return None
        if (reserved or not self.pace.may_draw(words)) and not self._begin(ring, reserved):
            return None
        batch = None
        try:
            index = self.sampler.draw(ring, wanted.shape, self.rng)
            batch = None if index is None else self.copy(ring, index, self.sampler)
        finally:
            with ring:
                self._under_way -= reserved
                if batch is not None:
                    words[Word.DRAWN] += wanted.size
                elif self.sampler.needs(wanted.shape) <= ring.capacity:  # else refused
                    self.pace.starve(words, written)
        if batch is None:
            wanted.tried = state
        return batch

    def _begin(self, ring: Ring, reserved: int) -> bool:
        """Tell whether samples may be drawn now, and reserve as many."""
        with ring:
            allowed = self.pace.may_draw(ring.words, self._under_way)
            if allowed:
                self._under_way += reserved
            elif not self._under_way:  # or those who draw now may find enough
                self.pace.starve(ring.words, ring.words[Word.WRITTEN])
            return allowed

    @staticmethod
    def count(ring: Ring, size: int) -> None:
        """Count frames as drawn."""
        with ring:
            ring.words[Word.DRAWN] += size

    def copy(self, ring: Ring, index: np.ndarray, sampler: Sampler | None) -> TensorDict | None:
        """Return frames that are whole; others than asked for, if the sampler has to draw again."""
        values = _copy_whole(ring, index, sampler, self.rng)
        if values is None:
            return None
        if (versions := values.get(keys.POLICY_VERSION)) is not None:
            self.lags.note(ring.words[Word.NEWEST], versions)
        names = None if index.ndim == 1 else (None, "time")
        size, numbers = torch.Size(index.shape), torch.from_numpy(index)
        batch = unchecked(ring.tree, values, size, names, index=numbers)
        if sampler is not None:
            for name, extra in sampler.extras(ring, index).items():
                batch.set(name, torch.from_numpy(extra))
        return batch

    def finish(self, batch: Any) -> Any:
        """Return what the user gets of a batch."""
        if self.transform is not None:
            batch = self.transform(batch)
        if self.pin:
            batch = batch.pin_memory()
        return batch if self.device is None else batch.to(self.device, non_blocking=self.pin)


def _copy_whole(
    ring: Ring, index: np.ndarray, sampler: Sampler | None, rng: np.random.Generator
) -> dict[Key, torch.Tensor] | None:
    """Return frames by key, or None if some of them are gone and no others can be had.

    Args:
        ring: Where they are.
        index: Their numbers; changed where others were drawn.
        sampler: Draws others for those that were overwritten while they were copied; None: nobody.
        rng: For that.
    """
    rows = index % ring.capacity
    values = ring.take(rows)
    ring.fence()
    torn, tries = _torn(ring, index, rows), 0
    while torn.size:
        tries += 1
        patient = tries <= _PATIENCE  # after that, writers wait for once
        with contextlib.nullcontext() if patient else ring:
            again = None
            if sampler is not None:
                shape, kept = (len(torn), *index.shape[1:]), np.delete(index, torn, 0)
                again = sampler.redraw(ring, shape, rng, kept)
            if again is None:
                return None
            rows, where = again % ring.capacity, torch.from_numpy(torn)
            for key, value in ring.take(rows).items():
                values[key][where] = value
            index[torn] = again
            if patient:
                ring.fence()
            torn = torn[_torn(ring, again, rows)]
    return values


_NONE = np.empty(0, np.int64)


def _torn(ring: Ring, index: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return where frames, or slices with frames, are not whole any more."""
    now = ring.stamps.take(rows)
    now -= 1
    if now.tobytes() == index.tobytes():  # as they nearly always are
        return _NONE
    whole = now == index
    return np.flatnonzero(~(whole if whole.ndim == 1 else whole.all(1)))
