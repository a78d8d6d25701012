"""Which frames of a replay buffer make a batch.

A sampler names frames by number. It may look at the ring at any time without a lock: what it names
is checked when it has been copied, and asked for again if it was overwritten meanwhile.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from swath.data.storage import Ring, Word
from swath.errors import UsageError

__all__ = ["PrioritizedSampler", "Sampler", "SliceSampler", "UniformSampler"]


class Sampler(abc.ABC):
    """How frames are chosen; one object serves one buffer."""

    runs = False
    """Whether the ring is to know the frame before each frame of a trajectory."""

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the batch size of what `batch_size` frames come as."""
        return (batch_size,)

    @abc.abstractmethod
    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        """Return the numbers of frames of that shape, or None if there are not enough now."""

    def extras(self, ring: Ring, index: np.ndarray) -> dict[str, np.ndarray]:
        """Return what stands beside the frames, by key."""
        return {}

    def update(self, ring: Ring, index: np.ndarray, priority: np.ndarray) -> None:
        """Take new priorities of frames."""
        raise UsageError(
            f"{type(self).__name__} has no priorities; give the buffer a PrioritizedSampler."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draw depends on, beside the frames."""
        return {}

    def load_state_dict(self, ring: Ring, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


def _random(
    ring: Ring, count: int, rng: np.random.Generator, fit: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray | None:
    """Return `count` of what `fit` makes of frames, each as likely as any other.

    Args:
        ring: Where they are.
        count: How many.
        rng: Random numbers.
        fit: Takes numbers and returns something for those that can be used, in the same order.
    """
    found: list[np.ndarray] = []
    low, high = ring.window()
    missing = count
    for tries in (1, 4, 16):
        if low == high:
            return None
        numbers = low + (rng.random(missing * tries) * (high - low)).astype(np.int64)
        found.append(fit(numbers)[:missing])
        missing -= len(found[-1])
        if not missing:
            return np.concatenate(found) if len(found) > 1 else found[0]
    fitting = fit(ring.numbers())
    if not len(fitting):
        return None
    return np.concatenate([*found, fitting[rng.integers(len(fitting), size=missing)]])


class UniformSampler(Sampler):
    """Every frame is as likely as any other.

    Args:
        replacement: If False, frames come in random order, and none again before all have come;
            those written meanwhile come in the next round.
    """

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement
        self._left = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        if self.replacement:
            return _random(ring, shape[0], rng, ring.those_whole)
        with self._lock:
            left = self._left[ring.whole(self._left)]
            if len(left) < shape[0]:
                others = np.setdiff1d(ring.numbers(), left)
                left = np.concatenate([left, rng.permutation(others)])
            if len(left) < shape[0]:
                return None
            self._left = left[shape[0] :]
            return left[: shape[0]].copy()

    def state_dict(self) -> dict[str, Any]:
        return {"left": torch.from_numpy(self._left.copy())}

    def load_state_dict(self, ring: Ring, state: dict[str, Any]) -> None:
        self._left = state["left"].numpy().copy()


class SliceSampler(Sampler):
    """Runs of consecutive frames of one trajectory, in the order of time.

    A batch has batch size `[slices, frames of each]` and its last dimension is called `time`, as a
    collector's has. Frames of an env count as consecutive across batches that were written one after
    the other. A slice is chosen by its last frame, all of which are equally likely.

    Args:
        num_slices: How many; each is `batch_size / num_slices` long.
        slice_len: How long each is; there are `batch_size / slice_len`.
    """

    runs = True

    def __init__(self, *, num_slices: int | None = None, slice_len: int | None = None) -> None:
        if (num_slices is None) == (slice_len is None) or (num_slices or slice_len or 0) < 1:
            raise UsageError(
                f"SliceSampler needs one of num_slices and slice_len, at least 1; got "
                f"num_slices={num_slices}, slice_len={slice_len}."
            )
        self.num_slices, self.slice_len = num_slices, slice_len

    def shape(self, batch_size: int) -> tuple[int, ...]:
        given = self.num_slices or self.slice_len or 1
        other, rest = divmod(batch_size, given)
        if rest or not other:
            name = "slice_len" if self.num_slices is None else "num_slices"
            raise UsageError(
                f"batch_size={batch_size} is no multiple of {name}={given}; it is the number of "
                f"frames of all slices, for example {max(other, 1) * given}."
            )
        return (given, other) if self.num_slices is not None else (other, given)

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        count, length = shape

        def slices(last: np.ndarray) -> np.ndarray:
            last = last[ring.depth.take(last % ring.capacity) >= length]
            index = np.empty((length, len(last)), np.int64)
            for step in range(length - 1, -1, -1):
                index[step] = last
                last = ring.before.take(last % ring.capacity)
            index = index.T
            return index[ring.whole(index).all(1)]

        return _random(ring, count, rng, slices)


class PrioritizedSampler(Sampler):
    """Frames with a higher priority come more often (Schaul et al., 2016).

    A frame of priority p is drawn in proportion to `(p + eps) ** alpha`; a new one has the highest
    priority so far. Batches have `"priority_weight"`: `(1 / (frames * probability)) ** beta`, divided
    by the largest of the batch. The attribute `beta` may be changed at any time.

    Args:
        alpha: 0 draws all frames alike.
        beta: 1 makes up for the priorities in full, 0 not at all.
        eps: Added to priorities.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-8) -> None:
        if alpha < 0 or beta < 0 or eps < 0:
            raise UsageError(
                f"alpha, beta and eps must not be negative; got {alpha}, {beta}, {eps}."
            )
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self._highest = 1.0
        self._tree = _SumTree(1)
        self._seen = self._floor = -1
        self._waiting = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        index = np.full(shape, -1)
        with self._lock:
            while (missing := np.flatnonzero(index < 0)).size:
                self._follow(ring)
                if not (total := self._tree.total()) > 0:
                    return None
                rows = self._tree.find(rng.random(len(missing)) * total)
                rows = np.minimum(rows, ring.capacity - 1)  # beyond by rounding
                index[missing] = ring.stamps.take(rows) - 1  # negative if not whole: once more
        return index

    def extras(self, ring: Ring, index: np.ndarray) -> dict[str, np.ndarray]:
        with self._lock:
            share = self._tree.values(index % ring.capacity)
        share = np.maximum(share, np.finfo(np.float64).tiny) ** -self.beta
        return {"priority_weight": (share / share.max()).astype(np.float32)}

    def update(self, ring: Ring, index: np.ndarray, priority: np.ndarray) -> None:
        priority = np.broadcast_to(priority, index.shape).reshape(-1).astype(np.float64)
        index = index.reshape(-1)
        if not (np.isfinite(priority).all() and (priority >= 0).all()):
            raise UsageError("priorities must be finite and not negative; got others.")
        with self._lock:
            self._follow(ring)
            here = ring.whole(index)
            index, priority = index[here], priority[here]
            if len(index):
                self._highest = max(self._highest, float(priority.max()))
                self._tree.set(index % ring.capacity, (priority + self.eps) ** self.alpha)

    def _follow(self, ring: Ring) -> None:
        """Give frames that were written since the last look the highest priority."""
        low, high = ring.window()
        if self._tree.size != ring.capacity or self._floor != ring.words[Word.FLOOR]:
            self._tree, self._floor = _SumTree(ring.capacity), int(ring.words[Word.FLOOR])
            self._seen, self._waiting = low, self._waiting[:0]
        fresh = np.arange(max(self._seen, low), high)
        if len(self._waiting):
            fresh = np.concatenate([self._waiting[self._waiting >= low], fresh])
        self._seen = high
        if len(fresh):
            whole = ring.whole(fresh)
            highest = (self._highest + self.eps) ** self.alpha
            self._tree.set(fresh % ring.capacity, np.where(whole, highest, 0.0))
            self._waiting = fresh[~whole]

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            values = self._tree.values(np.arange(self._tree.size))
            state = {"highest": self._highest, "seen": self._seen, "floor": self._floor}
            return {**state, "values": torch.from_numpy(values)}

    def load_state_dict(self, ring: Ring, state: dict[str, Any]) -> None:
        with self._lock:
            self._highest, self._seen, self._floor = (
                state[name] for name in ("highest", "seen", "floor")
            )
            self._tree = _SumTree(len(state["values"]))
            values = np.where(ring.stamps > 0, state["values"].numpy(), 0.0)
            self._tree.set(np.arange(self._tree.size), values)
            self._waiting = np.empty(0, np.int64)


class _SumTree:
    """Numbers, and the sums of each 16 of them, and the sums of each 16 of those.

    With few levels, each a few calls of numpy for all that is asked, it needs no other language.
    """

    fan = 16

    def __init__(self, size: int) -> None:
        self.size = size
        self._levels: list[np.ndarray] = []
        while not self._levels or len(self._levels[-1]) > 1:
            groups = -(-size // self.fan)
            self._levels.append(np.zeros((groups, self.fan)))
            size = groups

    def total(self) -> float:
        return float(self._levels[-1].sum())

    def values(self, rows: np.ndarray) -> np.ndarray:
        return self._levels[0].reshape(-1)[rows]

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        self._levels[0].reshape(-1)[rows] = values
        for below, level in pairwise(self._levels):
            rows = rows // self.fan
            rows = rows[np.flatnonzero(np.diff(rows, prepend=-1))]  # neighbours share a sum
            level.reshape(-1)[rows] = below[rows].sum(1)

    def find(self, mass: np.ndarray) -> np.ndarray:
        """Return for each mass the row at which the sum of all before it and its own exceeds it."""
        node = np.zeros(len(mass), np.int64)
        each = np.arange(len(mass))
        for level in reversed(self._levels):
            sums = level[node].cumsum(1)
            child = np.minimum((sums <= mass[:, None]).sum(1), self.fan - 1)
            mass = mass - np.where(child > 0, sums[each, child - 1], 0.0)
            node = node * self.fan + child
        return node
