"""A replay buffer in a Ray actor: collectors write and trainers sample, from any process.

```
 collector's actor --arrays--> Keeper (an actor): ReplayBuffer --arrays--> trainer
```

A batch travels as one numpy array of bytes per key, which goes into Ray's store and out of it
as it is; no tensor is pickled. Writers and readers have threads of their own in the actor, so who
waits for the other side does not hinder it, and all other calls have theirs, so that they get in
however many wait.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from time import monotonic
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.pacing import Feeders
from swath.data.replay import ReplayBuffer
from swath.data.runs import Stream
from swath.errors import ClosedError, UsageError, WorkerError
from swath.links import pack
from swath.links.calls import writable
from swath.links.cluster import enter, leave, needed, needs_of, no_place, session
from swath.links.parcels import pack_error, unpack_error

__all__ = ["RayReplayBuffer"]

_THREADS = {"write": 16, "read": 16, "control": 4}
_LOOK_EVERY = 0.1
Flat = tuple[dict[Any, tuple[np.ndarray, tuple[Any, ...]]], tuple[int, ...]]


def flatten(batch: TensorDictBase) -> Flat:
    """Return the batch's tensors as bytes with their forms, and its batch size.

    A tensor that is all of its storage, as those of a delivered batch are, goes as it is; of any
    other the values are copied.
    """
    flat = {}
    for key, value in batch.items(True, True):
        whole = value.detach().cpu().resolve_conj().resolve_neg()
        length = whole.untyped_storage().nbytes()
        if whole.storage_offset() or length != whole.numel() * whole.itemsize:
            whole = whole.clone(memory_format=torch.contiguous_format)
        storage, form = whole.untyped_storage(), (whole.dtype, whole.shape, whole.stride())
        flat[key] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), form
    return flat, tuple(batch.batch_size)


def unflatten(flat: Mapping[Any, tuple[np.ndarray, tuple[Any, ...]]], size: Any) -> TensorDict:
    """Return the batch whose tensors these bytes are, as views on them."""
    batch = TensorDict({}, size)
    for key, (block, (dtype, shape, stride)) in flat.items():
        storage = torch.from_numpy(writable(block)).untyped_storage()
        batch.set(key, torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride))
    return batch


class Keeper:
    """What the actor is."""

    def __init__(self, capacity: int, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._buffer = ReplayBuffer(capacity, **options)
        self._buffer.fed = True  # others may write at any time: wait for them
        self._feeders, self._lock = set[str](), threading.Lock()
        self._unpaced = contextlib.ExitStack()

    def extend(self, names: tuple[str, str], *batch: Any) -> None:
        """Write a flat batch."""
        self._buffer.extend_after(unflatten(*batch), *names)

    def sample(self, size: int | None) -> Flat:
        """Return a batch, flat."""
        return flatten(self._buffer.sample(size))

    def pace(self, on: bool) -> None:
        """Hold writers back for `samples_per_insert`, or not."""
        if on:
            self._unpaced.close()
        else:
            self._unpaced.enter_context(self._buffer.unpaced())

    def note_feeder(self, who: str, on: bool) -> None:
        """Note that a collector writes in the background, or that it does not any more.

        When the last of them has ended, nobody waits for frames, until another one begins.
        """
        with self._lock:
            (self._feeders.add if on else self._feeders.discard)(who)
            self._buffer.fed = bool(self._feeders)

    def fail(self, parcel: bytes | None) -> None:
        """Let all calls raise an error, which comes packed."""
        self._buffer.fail(None if parcel is None else unpack_error(parcel))

    def save(self, directory: str, checksum: bool) -> None:
        """Write all to a directory."""
        self._buffer.save(directory, checksum=checksum)

    def load(self, directory: str, verify: bool) -> None:
        """Continue where `save` was called."""
        self._buffer.load(directory, verify=verify)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the buffer."""
        return getattr(self._buffer, name)(*arguments)


class RayReplayBuffer:
    """A `ReplayBuffer` that lives in a Ray actor of its own.

    The actors of a `RayCollector` write to it directly, so that frames do not pass through your
    process. You may send it to other actors and tasks, which can write and sample too. `sample`
    waits until there are frames. When all collectors that were started with it have ended, missing
    frames are an error, as in a `ReplayBuffer`.

    Args:
        capacity: Largest number of frames; new frames replace the oldest.
        remote_config: Ray options of the actor, such as `num_cpus` (0 by default, which leaves the
            CPUs to collectors), `memory`, `resources`.
        launch_timeout: Seconds for Ray to schedule and start the actor; None waits for ever.
        address: Address of the cluster, as for `RayCollector`.
        ray_init_config: More arguments of `ray.init`.
        **options: The options of `ReplayBuffer`, except devices: batches are delivered on the CPU.

    Example:
        ```python
        buffer = RayReplayBuffer(1_000_000, batch_size=256)
        with RayCollector("Pendulum-v1", policy, num_collectors=8, frames_per_batch=200,
                          replay_buffer=buffer) as collector:
            collector.start()
            for _ in range(updates):
                train(buffer.sample())
                collector.update_policy_weights_()
        buffer.close()
        ```
    """

    watch: Callable[[], object] | None = None
    """Called while a call waits; it raises to end that."""
    _actor: Any
    _name: str  # no other copy in another process has it

    def __init__(
        self,
        capacity: int,
        *,
        remote_config: Mapping[str, Any] | None = None,
        launch_timeout: float | None = 120.0,
        address: str | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check_arguments(capacity, options, launch_timeout)
        kind, needs = _kind(remote_config)
        self.capacity, self.batch_size = capacity, options.get("batch_size")
        self.samples_per_insert = options.get("samples_per_insert")
        self._owner, self._closed, self._actor, self._feeders = True, False, None, Feeders()
        # Two CPUs for collectors: how many there will be is not known yet.
        self._session = enter(address, ray_init_config, 2 + needs.get("CPU", 0), launch_timeout)
        self._ender: Any = weakref.finalize(self, _leave_aside, self._session)
        self._ender.atexit = False  # Ray itself sees to that
        self._name = uuid.uuid4().hex
        try:
            self._begin(kind, needs, launch_timeout, options)
        except BaseException:
            self.close()
            raise

    def _begin(
        self, kind: Any, needs: Mapping[str, float], limit: float | None, options: dict[str, Any]
    ) -> None:
        """Start the actor and wait for its first word."""
        begun = monotonic()

        def watch() -> None:
            if limit is not None and monotonic() - begun > limit:
                why = no_place(needs, limit, "remote_config")
                raise WorkerError(f"the actor with the replay buffer {why}")

        try:
            self._actor = kind.remote(self.capacity, options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"remote_config: {error}") from error
        self.watch = watch
        len(self)
        self.watch = None

    def _about(self) -> dict[str, Any]:
        """Return what a copy in another process has."""
        about = ("_actor", "capacity", "batch_size", "samples_per_insert")
        return {name: getattr(self, name) for name in about}

    def __reduce__(self) -> Any:
        if self._ender is not None:
            self._ender.detach()  # others may need the cluster after this process forgot the buffer
        return _attached, (self._about(),)

    prepared = True

    def handle(self) -> tuple[bytes]:
        """Return what a worker in an actor needs to write here."""
        self._check()
        return (pack(_attached(self._about()), "replay_buffer"),)

    def _check(self) -> None:
        """Raise if the actor cannot be called any more: Ray would start another cluster."""
        if self._closed:
            raise ClosedError("this replay buffer was closed; make a new one.")
        if session() != self._session:
            raise ClosedError("Ray was shut down under this replay buffer.")

    def _send(self, group: str, name: str, *arguments: Any) -> Any:
        """Call the actor and return a promise of what it answers."""
        self._check()
        return getattr(self._actor, name).options(concurrency_group=group).remote(*arguments)

    def _ask(self, group: str, name: str, *arguments: Any) -> Any:
        """Call the actor and wait; what it raises is raised here."""
        failures = needed().exceptions
        answer = self._send(group, name, *arguments).future()
        while not wait([answer], _LOOK_EVERY).done:  # outside of Ray, which may be shut down
            self._check()
            if (watch := self.watch) is not None:  # another thread may take it away
                watch()
            self._feeders.check()
        try:
            return answer.result()
        except failures.RayTaskError as error:
            raise error.cause from None
        except (
            failures.RayActorError,
            failures.ActorUnschedulableError,
            failures.RuntimeEnvSetupError,
        ) as error:
            self._check()  # that may be why
            lines = str(error).strip().splitlines()
            text = lines[-1 if "creation task" in lines[0] else 0]
            raise WorkerError(f"the actor with the replay buffer is gone: {text}") from error

    def _tell(self, name: str, *arguments: Any) -> Any:
        """Call a method of the buffer that waits for nobody."""
        return self._ask("control", "call", name, *arguments)

    def extend(self, batch: TensorDictBase, *, writer: str = "") -> None:
        """Write the frames of a batch; returns when they are there.

        Args:
            batch: The frames.
            writer: Who made them; as of `ReplayBuffer`, and that of another process is another.
        """
        names = Stream.names(f"{self._name} {writer}")
        self._ask("write", "extend", names, *flatten(batch))

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Return frames drawn by the sampler; waits until there are some."""
        flat, size = self._ask("read", "sample", batch_size)
        # Ray's memory is read-only.
        return unflatten({key: (block.copy(), form) for key, (block, form) in flat.items()}, size)

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[None]:
        """Let writers go on meanwhile, whatever `samples_per_insert` says."""
        self._ask("control", "pace", False)
        try:
            yield
        finally:
            self._ask("control", "pace", True)

    def note_version(self, version: int) -> None:
        """Let lags be counted from this version; nobody waits for that."""
        self._send("control", "call", "note_version", version)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give frames new priorities; see `ReplayBuffer`."""
        given = [x.detach().cpu().numpy() if hasattr(x, "detach") else x for x in (index, priority)]
        self._tell("update_priority", *given)

    def __len__(self) -> int:
        return int(self._tell("__len__"))

    def stats(self) -> dict[str, Any]:
        """Return counts, their ratio and lags; see `ReplayBuffer`."""
        return self._tell("stats")

    def empty(self) -> None:
        """Forget all frames."""
        self._tell("empty")

    def save(self, directory: str, *, checksum: bool = False) -> None:
        """Write all to a directory, on the host of the actor; see `ReplayBuffer`."""
        self._ask("control", "save", directory, checksum)

    def load(self, directory: str, *, verify: bool = False) -> None:
        """Continue where `save` was called; see `ReplayBuffer`."""
        self._ask("control", "load", directory, verify)

    def note_feeder(self, who: str, on: bool, watch: Callable[[], object] = lambda: None) -> None:
        """Note that a collector writes here in the background, or does not any more.

        Who samples, in whatever process, waits for frames until the last of them has ended.

        Args:
            who: A name that no other collector has.
            on: Whether it begins or ends.
            watch: Called while a call waits here; it raises to end that.
        """
        self._feeders.note(who, watch if on else None)
        self._ask("control", "note_feeder", who, on)

    def fail(self, error: BaseException | None) -> None:
        """Let all waiting and all later calls raise an error, everywhere; None ends that."""
        self._ask("control", "fail", None if error is None else pack_error(error))

    def close(self) -> None:
        """End the actor, and the cluster if this buffer has started it."""
        if not self._owner or self._closed:
            return
        self._closed = True
        self._ender.detach()
        if self._actor is not None and session() == self._session:
            needed().kill(self._actor)
        leave(self._session)

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _attached(about: dict[str, Any]) -> RayReplayBuffer:
    buffer = object.__new__(RayReplayBuffer)
    vars(buffer).update(about, _owner=False, _closed=False, _ender=None, _session=session())
    buffer._feeders, buffer._name = Feeders(), uuid.uuid4().hex
    return buffer


def _leave_aside(entered: Any) -> None:
    """Leave the cluster of a buffer that nobody has any more, in a thread of its own.

    The garbage may be collected in a thread of Ray's, which cannot end itself, or in the middle of
    `enter`. The actor ends when nobody has its handle. Who exits waits for the thread.
    """
    threading.Thread(target=leave, args=(entered,), name="swath leaves Ray").start()


def _check_arguments(capacity: int, options: Mapping[str, Any], limit: Any) -> None:
    """Raise here what would be raised in the actor, or on the way to it."""
    refused = [name for name in ("device", "pin_memory") if options.get(name)]
    if refused:
        raise UsageError(
            f"{refused} cannot be used in an actor; move what sample() returns to a device instead."
        )
    if not (limit is None or (isinstance(limit, (int, float)) and limit > 0)):
        raise UsageError(f"launch_timeout must be above 0, or None; got {limit!r}.")
    ReplayBuffer(capacity, **options).close()
    pack(options, "options")


def _kind(config: Any) -> tuple[Any, dict[str, float]]:
    """Return a class of actors with these options, and the resources that one of them takes."""
    if not (config is None or isinstance(config, Mapping)):
        raise UsageError(f"remote_config: give a dict of options of an actor; got {config!r}.")
    try:
        options = {"num_cpus": 0, **(config or {})}
        kind = needed().remote(concurrency_groups=_THREADS)
        return kind(Keeper).options(**options), needs_of(options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"remote_config: {error}") from error
