"""A replay buffer in a Ray actor: collectors write and trainers sample, from any process.

```
 collector's actor --one block--> Keeper (an actor): ReplayBuffer --one block--> trainer
```

A batch travels as one numpy array, with where each key is in it; no tensor is pickled. Writers and
readers have threads of their own in the actor, so who waits for the other side does not hinder it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.replay import ReplayBuffer
from swath.errors import UsageError, WorkerError
from swath.links import pack
from swath.links.calls import writable
from swath.links.cluster import enter, leave, needed

__all__ = ["RayReplayBuffer"]

_THREADS = 16
_LOOK_EVERY = 0.1
_ALIGNMENT = 64
Flat = tuple[np.ndarray, dict[Any, tuple[Any, ...]], tuple[int, ...]]


def flatten(batch: TensorDictBase) -> Flat:
    """Return a batch as one block, where its keys are in it, and its batch size.

    A batch of views on a slab goes as it is; of any other the values are copied.
    """
    leaves = {key: value.detach().cpu() for key, value in batch.items(True, True)}
    storages = {value.untyped_storage().data_ptr(): value for value in leaves.values()}
    if len(storages) == 1:
        storage = next(iter(storages.values())).untyped_storage()
        block = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        placed = leaves
    else:
        sizes = [-(-v.numel() * v.itemsize // _ALIGNMENT) * _ALIGNMENT for v in leaves.values()]
        block, start, placed = np.empty(sum(sizes), np.uint8), 0, {}
        for (key, value), size in zip(leaves.items(), sizes, strict=True):
            room = torch.from_numpy(block)[start : start + value.numel() * value.itemsize]
            placed[key] = room.view(value.dtype).view(value.shape).copy_(value)
            start += size
    about = {
        key: (value.dtype, value.shape, value.stride(), value.storage_offset())
        for key, value in placed.items()
    }
    return block, about, tuple(batch.batch_size)


def unflatten(block: np.ndarray, about: Mapping[Any, tuple[Any, ...]], size: Any) -> TensorDict:
    """Return the batch in a block, as views on it."""
    storage = torch.from_numpy(writable(block)).untyped_storage()
    batch = TensorDict({}, size)
    for key, (dtype, shape, stride, offset) in about.items():
        batch.set(key, torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride))
    return batch


class Keeper:
    """What the actor is."""

    def __init__(self, capacity: int, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._buffer = ReplayBuffer(capacity, **options)
        self._buffer.watch = lambda: None  # others may write at any time: wait for them
        self._unpaced = contextlib.ExitStack()

    def extend(self, *batch: Any) -> None:
        """Write a flat batch."""
        self._buffer.extend(unflatten(*batch))

    def sample(self, size: int | None) -> Flat:
        """Return a batch, flat."""
        return flatten(self._buffer.sample(size))

    def pace(self, on: bool) -> None:
        """Hold writers back for `samples_per_insert`, or not."""
        if on:
            self._unpaced.close()
        else:
            self._unpaced.enter_context(self._buffer.unpaced())

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the buffer."""
        return getattr(self._buffer, name)(*arguments)


class RayReplayBuffer:
    """A `ReplayBuffer` that lives in a Ray actor of its own.

    Give it to a `RayCollector`, and the actors write into it without passing through your process.
    It can be sent to other actors and tasks, which may write and sample, too. `sample` waits until
    there are frames.

    Args:
        capacity: How many frames it holds.
        remote_config: Options of the actor, such as `num_cpus` (1 by default), `memory`,
            `resources`.
        address: Of the cluster; as for `RayCollector`.
        ray_init_config: Further arguments of `ray.init`.
        **options: Those of `ReplayBuffer`, except devices: batches come to your CPU.

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

    def __init__(
        self,
        capacity: int,
        *,
        remote_config: Mapping[str, Any] | None = None,
        address: str | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refused = [name for name in ("device", "pin_memory") if options.get(name)]
        if refused:
            raise UsageError(f"{refused} make no sense in an actor; move what sample() returns.")
        ReplayBuffer(capacity, **options).close()  # wrong arguments are told here
        self.capacity, self.batch_size = capacity, options.get("batch_size")
        self.samples_per_insert = options.get("samples_per_insert")
        self._entered = enter(address, ray_init_config, 2, 120.0)
        self._owner = True
        try:
            kind = needed().remote(
                num_cpus=1, concurrency_groups={"write": _THREADS, "read": _THREADS}
            )
            self._actor = kind(Keeper).options(**(remote_config or {})).remote(capacity, options)
        except BaseException:
            leave(self._entered)
            raise

    def __reduce__(self) -> Any:
        about = ("_actor", "capacity", "batch_size", "samples_per_insert")
        return _attached, ({name: getattr(self, name) for name in about},)

    prepared = True

    def handle(self) -> tuple[bytes]:
        """Return what a worker in an actor needs to write here."""
        return (pack(self, "replay_buffer"),)

    def _ask(self, group: str, name: str, *arguments: Any) -> Any:
        """Call the actor and wait; what it raises is raised here."""
        ray = needed()
        call = getattr(self._actor, name).options(concurrency_group=group).remote(*arguments)
        try:
            while (watch := self.watch) is not None:  # another thread may take it away
                if ray.wait([call], timeout=_LOOK_EVERY)[0]:
                    break
                watch()
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            text = str(error).splitlines()[0]
            raise WorkerError(f"the actor with the replay buffer is gone: {text}") from error

    def extend(self, batch: TensorDictBase) -> None:
        """Write the frames of a batch; returns when they are there."""
        self._ask("write", "extend", *flatten(batch))

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Return frames drawn by the sampler; waits until there are some."""
        block, about, size = self._ask("read", "sample", batch_size)
        return unflatten(block.copy(), about, size)  # Ray's memory is read-only

    @contextlib.contextmanager
    def unpaced(self) -> Iterator[None]:
        """Let writers go on meanwhile, whatever `samples_per_insert` says."""
        self._ask("read", "pace", False)
        try:
            yield
        finally:
            self._ask("read", "pace", True)

    def note_version(self, version: int) -> None:
        """Let lags be counted from this version; nobody waits for that."""
        self._actor.call.options(concurrency_group="read").remote("note_version", version)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give frames new priorities; see `ReplayBuffer`."""
        given = [x.detach().cpu().numpy() if hasattr(x, "detach") else x for x in (index, priority)]
        self._ask("read", "call", "update_priority", *given)

    def __len__(self) -> int:
        return int(self._ask("read", "call", "__len__"))

    def stats(self) -> dict[str, Any]:
        """Return counts, their ratio and lags; see `ReplayBuffer`."""
        return self._ask("read", "call", "stats")

    def empty(self) -> None:
        """Forget all frames."""
        self._ask("read", "call", "empty")

    def save(self, directory: str) -> None:
        """Write all to a directory, on the host of the actor."""
        self._ask("read", "call", "save", directory)

    def load(self, directory: str) -> None:
        """Continue where `save` was called."""
        self._ask("read", "call", "load", directory)

    def fail(self, error: BaseException | None) -> None:
        """Let all waiting and all later calls raise an error, everywhere; None ends that."""
        self._ask("read", "call", "fail", error)

    def close(self) -> None:
        """End the actor, and the cluster if this buffer has started it; again is nothing."""
        if self._owner and needed().is_initialized():
            self._owner = False
            needed().kill(self._actor)
            leave(self._entered)

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _attached(about: dict[str, Any]) -> RayReplayBuffer:
    buffer = object.__new__(RayReplayBuffer)
    vars(buffer).update(about, _owner=False)
    return buffer
