"""Which frames of a replay buffer make a batch.

A sampler names frames by number. It may look at the ring at any time without a lock: what it names
is checked when it has been copied, and asked for again if it was overwritten meanwhile.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swath.data.runs import consecutive, depth
from swath.data.storage import Ring, Word
from swath.errors import UsageError

__all__ = ["PrioritizedSampler", "Sampler", "SliceSampler", "UniformSampler"]


_NOWHERE = -(1 << 62)
"""So far below that no frame has such a number, nor those that follow it."""
_AT_ONCE = 1 << 16
"""How many frames of slices are looked at together."""


class Sampler(abc.ABC):
    """Base class of the samplers, which choose the frames of a batch; one object serves one buffer.

    Examples:
        >>> from swath.data import PrioritizedSampler
        >>> isinstance(PrioritizedSampler(alpha=0.6, beta=0.4), Sampler)
        True
    """

    runs = False
    """Whether the ring is to know the frame before each frame of a trajectory."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())  # for a buffer in another process

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the batch size of what `batch_size` frames come as."""
        return (batch_size,)

    def needs(self, shape: tuple[int, ...]) -> int:
        """Return how many frames there must be at least to draw that shape."""
        return 1

    @abc.abstractmethod
    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        """Return the numbers of frames of that shape, or None if there are not enough now.

        Asked again when frames were written or priorities updated, not before. Meanwhile writers
        are not held back, whatever the reason.
        """

    def redraw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator, kept: np.ndarray
    ) -> np.ndarray | None:
        """Draw others for frames that were overwritten meanwhile; `kept` is the rest of a batch."""
        return self.draw(ring, shape, rng)

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
        return


def _random(ring: Ring, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the numbers of up to `count` frames that are whole, each as likely as any other."""
    low, high = ring.window()
    rows = (rng.random(count) * (high - low)).astype(np.int64)
    if high - low < ring.capacity:
        rows += low
        rows %= ring.capacity
    numbers = ring.stamps.take(rows)
    numbers -= 1
    return numbers if np.minimum.reduce(numbers) >= 0 else numbers[numbers >= 0]


def _enough(
    ring: Ring,
    count: int,
    rng: np.random.Generator,
    fit: Callable[[np.ndarray], np.ndarray],
    fit_all: Callable[[], np.ndarray],
) -> np.ndarray | None:
    """Return `count` of what `fit` makes of random frames, or None if none of them fits.

    Args:
        ring: Where they are.
        count: How many.
        rng: Random numbers.
        fit: Takes numbers of frames and returns something for each of those that can be used.
        fit_all: Returns the same of all frames, or at least `count` of them in random order.
    """
    found: list[np.ndarray] = []
    for tries in (8, 64):
        found.append(fit(_random(ring, tries * count, rng))[:count])
        count -= len(found[-1])
        if not count:
            return np.concatenate(found)
    fitting = fit_all()
    if not len(fitting):
        return None
    return np.concatenate([*found, fitting[rng.integers(len(fitting), size=count)]])


class UniformSampler(Sampler):
    """Draw all frames with equal probability.

    Args:
        replacement: If False, every frame is drawn once, in random order, before any is drawn
            again; frames written meanwhile are drawn in the next round.
    """

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement
        self._left, self._loaded = np.empty(0, np.int64), 0
        self._lock = threading.Lock()

    def needs(self, shape: tuple[int, ...]) -> int:
        return 1 if self.replacement else shape[0]

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        if self.replacement:
            numbers = _random(ring, shape[0], rng)
            if len(numbers) == shape[0]:
                return numbers
            return _enough(ring, shape[0], rng, lambda numbers: numbers, ring.numbers)
        return self.redraw(ring, shape, rng, self._left[:0])

    def redraw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator, kept: np.ndarray
    ) -> np.ndarray | None:
        if self.replacement:
            return self.draw(ring, shape, rng)
        with self._lock:
            return self._next(ring, shape[0], rng, kept)

    def _next(
        self, ring: Ring, count: int, rng: np.random.Generator, kept: np.ndarray
    ) -> np.ndarray | None:
        """Return the next frames of the round, and of another one if need be, but none of `kept`.

        What is in the batch already may be of the next round, too; it comes later in that one.
        """
        found = self._left[:0]
        if self._loaded != ring.words[Word.LOADED]:  # by another process: these are no frames now
            self._loaded, self._left = ring.words[Word.LOADED], found
        later = found
        if len(kept):
            here = np.isin(self._left, kept)
            later, self._left = self._left[here], self._left[~here]
        while len(self._left) and (missing := count - len(found)):
            some, self._left = self._left[:missing], self._left[missing:]
            found = np.concatenate([found, some[ring.whole(some)]])
        if missing := count - len(found):
            beside = np.concatenate([found, kept])
            others = rng.permutation(np.setdiff1d(ring.numbers(), beside))
            if len(others) < missing:
                self._left = np.concatenate([found, later])
                return None
            self._left, later = others[missing:], beside
            found = np.concatenate([found, others[:missing]])
        if len(later):
            self._left = rng.permutation(np.concatenate([self._left, later]))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"left": torch.from_numpy(self._left.copy())}

    def load_state_dict(self, ring: Ring, state: dict[str, Any]) -> None:
        self._left, self._loaded = state["left"].numpy().copy(), ring.words[Word.LOADED]


class SliceSampler(Sampler):
    """Draw runs of consecutive frames of one trajectory, in the order of time.

    A batch has batch size `[slices, frames of each]` and its last dimension is called `time`, as a
    collector's has. Frames of an env count as consecutive across the batches of one writer. Slices
    are drawn by their last frames, which are all equally likely.

    Args:
        num_slices: Number of slices; each has `batch_size / num_slices` frames.
        slice_len: Frames in each slice; a batch has `batch_size / slice_len` slices.
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
                f"batch_size={batch_size} is not a multiple of {name}={given}; it is the number of "
                f"frames of all slices, for example {max(other, 1) * given}."
            )
        return (given, other) if self.num_slices is not None else (other, given)

    def needs(self, shape: tuple[int, ...]) -> int:
        return shape[1]

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        count, length = shape
        steps = np.arange(length)

        def slices(last: np.ndarray) -> np.ndarray:
            index = last[:, None] - steps[::-1]  # right, if they all stand side by side
            # What was overwritten just now has any beginning; it is not whole in the end.
            here = np.maximum(last - ring.begins[last % ring.capacity], 0)
            missing = length - 1 - here
            while (some := np.flatnonzero(missing > 0)).size:  # of these, before the stretch
                first = index[some, missing[some]]
                before = ring.before[first % ring.capacity]
                before[before < 0] = _NOWHERE
                earlier = steps < missing[some, None]
                index[some] += earlier * (before - first + 1)[:, None]
                found = before - ring.begins[before % ring.capacity] + 1
                missing[some] -= np.where(before < 0, length, np.maximum(found, 1))
            index = index[consecutive(ring, index)]
            return index[ring.whole(index).all(1)]  # so what was read before was whole as well

        def all_slices() -> np.ndarray:
            numbers = ring.numbers()
            last = rng.permutation(numbers[depth(ring, numbers) >= length])
            found, missing = [slices(last[:0])], count
            for some in np.array_split(last, len(last) * length // _AT_ONCE + 1):
                found.append(slices(some))
                missing -= len(found[-1])
                if missing <= 0:
                    break
            return np.concatenate(found)

        return _enough(ring, count, rng, slices, all_slices)


class PrioritizedSampler(Sampler):
    """Draw frames with a higher priority more often (Schaul et al., 2016).

    A frame of priority p is drawn in proportion to `(p + eps) ** alpha`; a new one has the highest
    priority so far. Batches have `"priority_weight"`: `probability ** -beta`, divided by the
    largest value in the batch. The attribute `beta` may be changed at any time.

    Args:
        alpha: Exponent of the priorities; 0 draws all frames with equal probability.
        beta: Exponent of the importance weights; 1 corrects for the priorities in full, 0 not.
        eps: This number is added to all priorities.
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-8) -> None:
        if alpha < 0 or beta < 0 or eps < 0:
            raise UsageError(
                f"alpha, beta and eps must not be negative; got {alpha}, {beta}, {eps}."
            )
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self._highest = 1.0
        self._tree = _SumTree(1)
        self._seen = self._floor = self._loaded = -1
        self._waiting = np.empty(0, np.int64)
        self._lock = threading.Lock()

    def draw(
        self, ring: Ring, shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray | None:
        index = np.full(shape, -1)
        with self._lock:
            while (missing := np.flatnonzero(index < 0)).size:
                self._follow(ring)
                if not self._tree.total() > 0:
                    return None
                rows = self._tree.find(rng.random(len(missing)))
                index[missing] = ring.stamps.take(rows) - 1  # negative if not whole: once more
        return index

    def extras(self, ring: Ring, index: np.ndarray) -> dict[str, np.ndarray]:
        with self._lock:
            share = self._tree.flat.take(index % ring.capacity)
        share = np.maximum(share, np.finfo(np.float64).tiny) ** -self.beta
        return {"priority_weight": (share / share.max()).astype(np.float32)}

    def update(self, ring: Ring, index: np.ndarray, priority: np.ndarray) -> None:
        priority = np.broadcast_to(priority, index.shape).reshape(-1).astype(np.float64)
        index = index.reshape(-1)
        if not (np.isfinite(priority).all() and (priority >= 0).all()):
            raise UsageError("priorities must be finite and not negative.")
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
        floor, loaded = ring.words[Word.FLOOR], ring.words[Word.LOADED]
        if self._tree.size != ring.capacity or (self._floor, self._loaded) != (floor, loaded):
            self._tree, self._floor, self._loaded = _SumTree(ring.capacity), floor, loaded
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
            values = self._tree.flat[: self._tree.size].copy()
            state = {"highest": self._highest, "seen": self._seen, "floor": self._floor}
            return {**state, "values": torch.from_numpy(values)}

    def load_state_dict(self, ring: Ring, state: dict[str, Any]) -> None:
        with self._lock:
            self._highest, self._seen, self._floor = (
                state[name] for name in ("highest", "seen", "floor")
            )
            self._loaded = ring.words[Word.LOADED]
            self._tree = _SumTree(len(state["values"]))
            if self._tree.size == ring.capacity:  # else nothing was drawn yet: all are new
                values = np.where(ring.stamps > 0, state["values"].numpy(), 0.0)
                self._tree.set(np.arange(self._tree.size), values)
            self._waiting = np.empty(0, np.int64)


class _SumTree:
    """Numbers, and the sum of each 64 of them.

    Two levels rather than many: each is a few calls of numpy for all that is asked at once.
    """

    block = 64

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks = np.zeros((-(-size // self.block), self.block))
        self.flat = self._blocks.reshape(-1)
        self._sums = np.zeros(len(self._blocks))

    def total(self) -> float:
        return float(self._sums.sum())

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        self.flat[rows] = values
        blocks = rows // self.block
        blocks = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]  # neighbours share one
        self._sums[blocks] = self._blocks[blocks].sum(1)

    def find(self, shares: np.ndarray) -> np.ndarray:
        """Return the rows at which the sum of all up to there exceeds these shares of the total."""
        upto = self._sums.cumsum()
        mass = shares * upto[-1]
        block = np.minimum(np.searchsorted(upto, mass, side="right"), len(upto) - 1)
        sums = self._blocks[block].cumsum(1)
        mass -= upto[block] - self._sums[block]
        inside = sums > np.minimum(mass, sums[:, -1] * (1 - 1e-12))[:, None]  # despite rounding
        return np.minimum(block * self.block + inside.argmax(1), self.size - 1)
