"""A replay buffer that threads and processes fill while others sample from it.

```
 extend --> check --> claim rows --> copy --> make whole        (storage.py: who may do what, when)
 sample --> numbers --> copy --> still whole? or again --> transform --> device      (drawing.py)
```
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data import saving
from swath.data.arguments import as_frame, check_capacity, refusing_unknown_names
from swath.data.drawing import Draws, Wanted
from swath.data.frames import check_fit, frames_of, leaves
from swath.data.pacing import Feeders, Pace, Prefetcher, Stopped
from swath.data.runs import Runs, Stream, Streams
from swath.data.samplers import PrioritizedSampler, Sampler, UniformSampler
from swath.data.storage import (
    CLOSED,
    ERROR_BYTES,
    FAILED,
    OPEN,
    Handle,
    Ring,
    Word,
    attach,
    holds_ring,
    make_ring,
    open_ring,
)
from swath.errors import ClosedError, UsageError, WorkerError
from swath.links.parcels import pack_error, unpack_error
from swath.memory import SharedMemory
from swath.rollout import keys
from swath.system import check_can_share_files
from swath.tree import Key, key_name

__all__ = ["ReplayBuffer"]

_Tensors = Mapping[Key, torch.Tensor]
_SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": UniformSampler,
    "prioritized": PrioritizedSampler,
}


class ReplayBuffer:
    """Keep the newest frames and draw batches of them, from any thread and any process.

    Args:
        capacity: Largest number of frames; new frames replace the oldest.
        storage: `"memory"`, `"shared"` (other processes may attach), `"memmap"` (files in
            `directory`, which may be larger than memory and are opened again as they were left), or
            a CUDA device such as `"cuda:0"`.
        directory: Directory of the files of `"memmap"`.
        sampler: `"uniform"`, `"prioritized"` or a `Sampler`.
        batch_size: Frames in a batch, unless `sample` is called with another number.
        prefetch: Number of batches that threads draw in advance; needs `batch_size`.
        transform: Called with each batch; `sample` returns what it returns.
        device: Device that batches are copied to.
        pin_memory: Copy batches to pinned memory, so that copies to a GPU are asynchronous.
        min_size: Frames that must have been written before the first sample.
        samples_per_insert: How often each frame is drawn on average. If given, `sample` waits for
            frames and `extend` for samples.
        tolerance: Number of samples by which either side may be ahead, apart from one batch.
        timeout: Raise an error after waiting for this many seconds; None waits without a limit.
        seed: Seed of the draws.

    Examples:
        >>> from swath.collectors import Collector
        >>> buffer = ReplayBuffer(10_000, batch_size=32, seed=0)
        >>> with Collector("CartPole-v1", frames_per_batch=100, replay_buffer=buffer) as collector:
        ...     collector.next()
        >>> len(buffer), buffer.sample()["next", "reward"].shape
        (100, torch.Size([32, 1]))
    """

    watch: Callable[[], object] | None = None
    """Called while something is waited for; it raises if nobody will write any more. While there is
    one, `sample` waits for frames instead of refusing."""
    fed: bool
    """Whether writers outside this object may exist. If so, `sample()` waits for frames instead of
    raising. The last collector sets it to False when it ends."""

    @refusing_unknown_names
    def __init__(  # noqa: PLR0913 - each is one independent choice
        self,
        capacity: int,
        *,
        storage: str = "memory",
        directory: str | Path | None = None,
        sampler: str | Sampler = "uniform",
        batch_size: int | None = None,
        prefetch: int = 0,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        min_size: int = 1,
        samples_per_insert: float | None = None,
        tolerance: float = 1024.0,
        timeout: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity, self.storage = check_capacity(capacity), storage
        self.batch_size = batch_size
        self.samples_per_insert = samples_per_insert
        self._pace = Pace(min_size, samples_per_insert, tolerance, timeout)
        self._directory = None if directory is None else Path(directory).expanduser().absolute()
        self._check_arguments(prefetch, pin_memory)
        self.sampler = _sampler(sampler)
        if batch_size is not None:
            self.sampler.shape(batch_size)
        self._prefetch = prefetch
        self._draws = Draws(
            self.sampler,
            self._pace,
            np.random.default_rng(seed),
            transform,
            None if device is None else torch.device(device),
            pin_memory,
        )
        self.writes = 0
        """How often `extend` has written something; it counts even if Ctrl-C comes at its end."""
        self._ring: Ring | None = None
        self._like: Any = None
        self._streams = Streams()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._closed = self._attached = False
        self._newest = 0
        self.fed = storage == "shared" or samples_per_insert is not None
        self._feeders = Feeders()
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.Lock()
        if self._directory is not None and holds_ring(self._directory):
            self._use(open_ring(self.capacity, self._directory))

    def _check_arguments(self, prefetch: int, pin_memory: bool) -> None:
        kind = self.storage.partition(":")[0]
        if kind not in ("memory", "shared", "memmap", "cuda"):
            raise UsageError(
                f"storage={self.storage!r} is unknown; give 'memory', 'shared', 'memmap' or a CUDA "
                "device such as 'cuda:0'."
            )
        if (kind == "memmap") != (self._directory is not None):
            raise UsageError(
                f"storage={self.storage!r} with directory={self._directory}: storage='memmap' "
                "needs a directory, and only it takes one."
            )
        if kind in ("shared", "memmap"):
            check_can_share_files()
        if self.capacity < 1 or self._pace.min_size > self.capacity:
            raise UsageError(
                f"capacity={self.capacity} must be at least 1, and min_size="
                f"{self._pace.min_size} not above it."
            )
        if prefetch < 0 or (prefetch and self.batch_size is None):
            raise UsageError(f"prefetch={prefetch} needs a batch_size, and must not be negative.")
        if pin_memory and not torch.cuda.is_available():
            raise UsageError("pin_memory=True needs a GPU, and torch finds none; leave it out.")

    # -- writing --------------------------------------------------------------------------------

    def extend(self, batch: TensorDictBase, *, writer: str = "") -> None:
        """Write the frames of a batch `[*, T]`, env by env and in order of time.

        Rows that `("collector", "mask")` excludes are left out, and so is the mask. If this
        raises an error, no frame was written. After Ctrl-C all of them may have been written; see
        `writes`.

        Args:
            batch: The frames.
            writer: Name of the collector that made them, if you write batches of several
                collectors, whose trajectories have the same ids. A trajectory only continues after
                frames of the same writer.
        """
        self.extend_after(batch, *Stream.names(writer))

    def extend_after(self, batch: TensorDictBase, after: str, name: str) -> None:
        """Write a batch whose trajectories go on where those of another end.

        Args:
            batch: The frames.
            after: The name of that batch.
            name: Its own; see `runs.py`.
        """
        try:
            self._write(batch, after, name)
        except BaseException:
            self._streams.forget(after)  # what follows does not continue what was before
            raise

    def _write(self, batch: TensorDictBase, after: str, name: str) -> None:
        self._check()
        values, lead, mask = frames_of(batch)
        frames = math.prod(lead) if mask is None else int(np.count_nonzero(mask))
        ring = self._ring or self._allocate(values, len(lead))
        # Most are like the one before, which is seen sooner than that they fit.
        like = lead, [(key, value.dtype, value.shape) for key, value in values.items()]
        if like != self._like:
            check_fit(ring.columns, values, len(lead))
            self._like = like
        if not frames:
            return
        allowed = partial(self._pace.may_write, ring.words)
        with ring.writing, ring.shield:
            first = ring.claim(frames, allowed)
            if first is None:
                first = self._pace.until(
                    lambda: ring.claim(frames, allowed),
                    lambda: self._check_lifted(ring),
                    lambda: (
                        "to write: too few samples were drawn for "
                        f"samples_per_insert={self._pace.samples_per_insert}"
                    ),
                )
            kept = min(frames, self.capacity)
            try:
                runs = self._streams.take(after, ring)
                spans, skip = ring.spans(first, kept), frames - kept
                seen = ring.put(spans, values, lead, mask, skip)
                if runs is not None and not _follow_rows(runs, ring, first, seen, lead):
                    length = lead[-1] if mask is None and not skip and len(lead) > 1 else None
                    runs.follow(ring, np.arange(first, first + kept), length)
                version = _newest(values, seen)
            except BaseException:
                ring.abandon(first, kept)
                raise
            ring.commit(first, kept, frames, version)
            self._streams.put(name, runs)
            self.writes += 1

    def _check_lifted(self, ring: Ring) -> None:
        with ring.shield.lifted():  # while a write waits, Ctrl-C may come
            self._check()

    def add(self, frame: TensorDictBase | Mapping[str, Any]) -> None:
        """Write one frame, a TensorDict without batch size or a dict of values."""
        self.extend(as_frame(frame).unsqueeze(0))

    def prepare(self, batch: TensorDictBase) -> None:
        """Allocate memory for frames like those of a batch, without writing them."""
        values, lead, _ = frames_of(batch)
        if self._ring is None:
            self._allocate(values, len(lead))

    def _allocate(self, values: _Tensors, dims: int) -> Ring:
        with self._lock:
            if self._ring is None:
                taken = [key for key in values if key in (("index",), ("priority_weight",))]
                if taken or not values:
                    raise UsageError(
                        f"a batch with the keys {[key_name(key) for key in values]} cannot be "
                        "stored: it needs at least one, and 'index' and 'priority_weight' are "
                        "added by sample(). Rename them."
                    )
                flat = {key: value.flatten(0, dims - 1) for key, value in values.items()}
                self._use(make_ring(flat, self.capacity, self.storage, self._directory))
            assert self._ring is not None
            return self._ring

    def _use(self, ring: Ring) -> None:
        if self.sampler.runs:
            if keys.TRAJ_IDS not in ring.columns:
                raise UsageError(
                    f"{type(self.sampler).__name__} needs {keys.TRAJ_IDS} in the batches; got "
                    f"{[key_name(key) for key in ring.columns]}."
                )
            Runs.begin(ring)
        self._ring = ring
        self.note_version(self._newest)
        if self._feeders:
            ring.feed(True)
        if self._error is not None:
            self.fail(self._error)

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[None]:
        """Hold no writer back meanwhile: what is under way is written, whatever the ratio."""
        ring = self._ring
        if ring is None:
            yield
            return
        ring.free(True)
        try:
            yield
        finally:
            ring.free(False)

    def note_version(self, version: int) -> None:
        """Take the newest policy version, from which the lag of samples is counted."""
        self._newest = max(self._newest, version)
        if self._ring is not None:
            with self._ring as ring:
                ring.words[Word.NEWEST] = max(ring.words[Word.NEWEST], version)

    # -- reading --------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None) -> Any:
        """Return frames drawn by the sampler, with their numbers as `"index"`.

        Frame i is the i-th that was ever written. If there are too few frames, this waits for a
        writer, or raises an error if no writer is registered: if no collector was started with the
        buffer, the buffer is not shared, and neither `samples_per_insert` nor `timeout` was given.
        """
        self._check()
        size = self.batch_size if batch_size is None else batch_size
        if size is None or size < 1:
            raise UsageError(
                f"batch_size={size}: give sample() or the buffer a batch size of at least 1."
            )
        if not self._prefetch or size != self.batch_size:
            return self._drawn(size, self._check)
        return self._prefetched()

    def _prefetched(self) -> Any:
        while True:
            with self._lock:
                if self._prefetcher is None:
                    self._prefetcher = Prefetcher(self, ReplayBuffer._drawn_ahead, self._prefetch)
                prefetcher = self._prefetcher
            prefetcher.process.check_process()  # a fork has no threads, but locks that they hold
            try:
                return prefetcher.next(self._check)
            except Stopped:  # another thread has heard of an error: this one is to hear it, too
                continue
            except BaseException:
                self._stop_prefetch()  # the next call starts anew
                raise

    def _drawn_ahead(self, stop: threading.Event) -> Any:
        assert self.batch_size is not None

        def check() -> None:
            if stop.is_set():
                raise ClosedError("this batch is no longer needed.")
            self._check()

        return self._drawn(self.batch_size, check)

    def _drawn(self, size: int, check: Callable[[], None]) -> Any:
        """Wait until frames may be drawn, and return a batch of them."""
        wanted = Wanted(self.sampler.shape(size), size)

        def attempt() -> Any:
            return self._draws.attempt(self._ring, wanted)

        batch = attempt()
        if batch is not None:
            return self._draws.finish(batch)
        self._check_possible(wanted.shape)
        more = self._may_get_more()

        def check_twice() -> None:
            nonlocal more
            check()  # a failure may be why
            if not more:
                self._refuse_to_wait(wanted.shape)
            more = self._may_get_more()

        # It is asked before each attempt, not after: the last writer may end between the two, and
        # what it wrote is to be tried.
        if not more and (batch := attempt()) is None:
            check_twice()
        if batch is None:
            batch = self._pace.until(
                attempt, check_twice, lambda: f"for frames to draw: {self.stats()}"
            )
        return self._draws.finish(batch)

    def _check_possible(self, shape: tuple[int, ...]) -> None:
        if (needs := self.sampler.needs(shape)) > self.capacity:
            raise UsageError(
                f"{type(self.sampler).__name__} cannot draw {shape} from a buffer with capacity="
                f"{self.capacity}: that takes {needs} frames at once. Give a larger capacity, or "
                "ask for less."
            )

    def _is_fed(self) -> bool:
        """Tell whether more frames may come, for all that is known."""
        known = self.watch is not None or self.fed or self._pace.timeout is not None
        return known or bool(self._feeders) or (self._ring is not None and self._ring.is_fed())

    def _may_get_more(self) -> bool:
        """Tell whether somebody may write more, or writes just now."""
        ring = self._ring
        return self._is_fed() or (ring is not None and ring.is_being_written())

    def _refuse_to_wait(self, shape: tuple[int, ...]) -> NoReturn:
        raise UsageError(
            f"{type(self.sampler).__name__} cannot draw {shape} from the {len(self)} frames of "
            f"this buffer (min_size={self._pace.min_size}, "
            f"samples_per_insert={self._pace.samples_per_insert}), and no writer is registered "
            "that would add more. Call extend() or collector.start() first, or give timeout= to "
            "wait for another thread."
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield all frames that are here now once, in random order; the last batch is smaller."""
        self._check()
        size, ring = self.batch_size, self._ring
        if size is None:
            raise UsageError(
                "this buffer has no batch_size, which iterating over it needs; give it one."
            )
        order = self._draws.rng.permutation([] if ring is None else ring.numbers())
        for start in range(0, len(order), size):
            assert ring is not None
            batch, index = None, order[start : start + size]
            while batch is None and len(index := index[ring.whole(index)]):
                batch = self._draws.copy(ring, index, None)
            if batch is not None:
                self._draws.count(ring, len(index))
                yield self._draws.finish(batch)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of frames; frames that have been overwritten since are ignored.

        Args:
            index: The `"index"` of batches.
            priority: One for each frame, or one for all; for example the absolute TD errors.
        """
        self._check()
        if self._ring is not None:
            numbers, values = (
                np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x)
                for x in (index, priority)
            )
            if values.size == numbers.size:
                values = values.reshape(numbers.shape)
            self.sampler.update(self._ring, numbers, values)
            self._draws.news = object()

    # -- what is inside -------------------------------------------------------------------------

    def __len__(self) -> int:
        return 0 if self._ring is None else self._ring.words[Word.HELD]

    def __getitem__(self, index: Any) -> TensorDict:
        """Return a copy of frames by their place among those that are here, the oldest first.

        Args:
            index: An int for one frame; a slice, a list or an array for several.
        """
        self._check()
        ring = self._ring
        numbers = np.empty(0, np.int64) if ring is None else ring.numbers()
        chosen = numbers[index.cpu().numpy() if isinstance(index, torch.Tensor) else index]
        found = None if ring is None else self._draws.copy(ring, np.atleast_1d(chosen).copy(), None)
        if found is None:
            raise IndexError(f"the frames {index} of this replay buffer were overwritten just now")
        return found if np.ndim(chosen) else found[0]

    def __repr__(self) -> str:
        about = vars(self)
        if "sampler" not in about:  # it could not be made
            return "<ReplayBuffer, not made yet>"
        parts = [f"capacity={self.capacity}", f"frames={len(self)}", f"storage={self.storage!r}"]
        parts += [] if self._directory is None else [f"directory={str(self._directory)!r}"]
        parts += [f"sampler={type(self.sampler).__name__}", f"batch_size={self.batch_size}"]
        return f"{type(self).__name__}({', '.join([*parts, *['closed=True'] * self._closed])})"

    def empty(self) -> None:
        """Remove all frames, including those that are being written."""
        self._check()
        self._stop_prefetch()
        if self._ring is not None:
            self._ring.clear()

    def stats(self) -> dict[str, Any]:
        """Return counts, their ratio, and the lag of the sampled frames in versions.

        Frames and samples are counted over all processes. The lag is that of samples drawn in this
        process: the newest version that was published or is in the buffer, minus the version that
        acted.
        """
        written, drawn = (
            0 if self._ring is None else self._ring.words[word]
            for word in (Word.WRITTEN, Word.DRAWN)
        )
        return {
            "size": len(self),
            "frames": written,
            "samples": drawn,
            "sample_ratio": drawn / written if written else 0.0,
            **self._draws.lags.as_dict(),
        }

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all frames and all that the next draws depend on, as tensors and numbers."""
        self._check()
        return saving.state_of(self._ring, self._draws, self._streams, self.capacity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; no other process or thread may write meanwhile."""
        self._check()
        saving.check_state(state, self.capacity, self.sampler)
        self._stop_prefetch()
        self._draws.rng.bit_generator.state = state["rng"]
        if "frames" not in state:
            return self.empty()
        values = leaves(TensorDict(state["frames"], [len(state["numbers"])]))
        ring = self._ring or self._allocate(values, 1)
        check_fit(ring.columns, values, 1)
        with ring.writing:
            saving.restore(ring, self._streams, values, state)
        self.sampler.load_state_dict(ring, state["sampler"])
        self._draws.news = object()

    def save(self, directory: str | Path, *, checksum: bool = False) -> None:
        """Save everything to a directory and replace what was saved there before.

        `load_dataset` reads it too. If it crashes, the previous save stays complete. Writers wait
        until it is done.

        Args:
            directory: Where to.
            checksum: Store a checksum of each file, for `verify=True`.
        """
        self._check()
        if self._ring is None or not len(self):
            raise UsageError("this replay buffer is empty; there is nothing to save.")
        saving.save(self._ring, self._draws, self._streams, directory, checksum)

    def load(self, directory: str | Path, *, verify: bool = False) -> None:
        """Continue where `save` was called; nothing is unpickled.

        Args:
            directory: Directory of the saved buffer.
            verify: Compare all files with their checksums first.
        """
        frames, state = saving.load(directory, verify)
        self.load_state_dict({**state, "frames": frames})

    # -- other processes, failures, the end -----------------------------------------------------

    @property
    def prepared(self) -> bool:
        """Whether there is memory for frames."""
        return self._ring is not None

    def handle(self) -> tuple[Handle, SharedMemory]:
        """Return a handle and the memory, which another process passes to `attached`."""
        self._check()
        ring = self._ring
        if ring is None or ring.memory is None:
            raise UsageError(
                f"a buffer with storage={self.storage!r} has nothing to attach to"
                + (" yet: extend() or prepare() it first." if ring is None else "; use 'shared'.")
            )
        return Handle(ring.fields, self.capacity, ring.directory, asdict(self._pace)), ring.memory

    @classmethod
    def attached(cls, handle: Handle, memory: SharedMemory, **options: Any) -> ReplayBuffer:
        """Attach to the buffer of another process, to write or sample; takes the same options."""
        for name in ("capacity", "storage", "directory"):
            options.pop(name, None)
        buffer = cls(handle.capacity, storage="shared", **{**handle.pace, **options})
        buffer._attached = True
        buffer._use(attach(handle.fields, handle.capacity, memory, handle.directory))
        return buffer

    def note_feeder(self, who: str, on: bool, watch: Callable[[], object] = lambda: None) -> None:
        """Note that a collector writes here in the background, or does not any more.

        Who samples waits for frames until the last of them has ended, in whatever process.

        Args:
            who: A name that no other collector has.
            on: Whether it begins or ends.
            watch: Called while something is waited for; it raises to end that.
        """
        self._feeders.note(who, watch if on else None)
        if self._ring is not None:
            self._ring.feed(bool(self._feeders))
        if not self._feeders:
            self.fed = False

    def fail(self, error: BaseException | None) -> None:
        """Make waiting and later calls raise this error, in all processes; None removes it."""
        self._error, self._trace = error, getattr(error, "__traceback__", None)
        if self._ring is not None:
            parcel = b"" if error is None else pack_error(error)
            if len(parcel) > ERROR_BYTES:
                parcel = pack_error(WorkerError(f"{type(error).__name__}: {error}"[:1000]))
            self._ring.tell(OPEN if error is None else FAILED, parcel)

    def close(self) -> None:
        """End the buffer's threads and all waiting calls, here and in attached processes."""
        if self._closed:
            return
        self._closed = True
        self._stop_prefetch()
        ring = self._ring
        if ring is None or self._attached:
            return
        ring.tell(CLOSED)
        ring.let_go()

    def _check(self) -> None:
        """Raise if nothing can be written or drawn any more."""
        ring = self._ring
        if ring is not None:
            state = ring.words[Word.STATE]
            if state == OPEN:
                self._error = None
            elif state == FAILED and self._error is None:
                self._error = unpack_error(ring.told())
            self._closed |= state == CLOSED
        if self._closed:
            raise ClosedError("this replay buffer was closed; make a new one.")
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        watch = self.watch  # another thread may take it away
        if watch is not None:
            watch()
        if self._feeders:
            self._feeders.check()

    def _stop_prefetch(self) -> None:
        with self._lock:
            prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()

    def __enter__(self) -> ReplayBuffer:
        self._check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _follow_rows(
    runs: Runs, ring: Ring, first: int, seen: Mapping[Key, np.ndarray], lead: torch.Size
) -> bool:
    ids, ended = seen.get(keys.TRAJ_IDS), seen.get(keys.NEXT_DONE)
    if ids is None or ended is None or len(lead) != 2:
        return False
    return runs.follow_rows(ring, first, ids.reshape(lead), ended.reshape(lead))


def _newest(values: _Tensors, seen: Mapping[Key, np.ndarray]) -> int:
    """Return the newest policy version of a batch."""
    versions = seen.get(keys.POLICY_VERSION)
    if versions is None and keys.POLICY_VERSION in values:
        versions = values[keys.POLICY_VERSION].numpy(force=True)
    return 0 if versions is None else int(np.maximum.reduce(versions, None))


def _sampler(given: str | Sampler) -> Sampler:
    if isinstance(given, Sampler):
        return given
    if given not in _SAMPLERS:
        raise UsageError(
            f"sampler={given!r} is unknown; give one of {sorted(_SAMPLERS)} or a Sampler such as "
            "SliceSampler(slice_len=16)."
        )
    return _SAMPLERS[given]()
