"""A slab: the memory of one rollout; a pool that lends slabs and gets them back.

```
 pool --take--> slab (being written) --lend--> lease (the user's tensors view it)
   ^                                                        |
   +------------ the last tensor that views it is gone -----+
```

The pool owns free slabs, the rollout loop owns the one it writes, and a lease belongs to whoever
holds a tensor on it: a batch, a slice, a numpy view or an autograd graph. Nothing is copied and
nothing that somebody can still see is ever overwritten; who keeps every batch gets new memory.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from swath.compat.tensordict import unchecked
from swath.memory.layout import ALIGNMENT, Layout, View, tensors_on
from swath.system import anonymous_file, path_of_descriptor
from swath.tree import Key

__all__ = [
    "DeviceMemory",
    "HeapMemory",
    "Memory",
    "PinnedMemory",
    "SharedMemory",
    "Slab",
    "SlabPool",
    "memory_on",
]

_ROWS_KEPT = 4096
"""Row views are made once per slab up to this many rows; more would cost too much memory."""


class Memory(Protocol):
    """A block of bytes that can be lent. Where it lives is its own business."""

    @property
    def array(self) -> np.ndarray | None:
        """The block as numpy sees it, uint8; None if it is out of the host's sight."""
        ...

    @property
    def block(self) -> torch.Tensor:
        """The block as torch sees it, flat uint8."""
        ...

    lease: weakref.ref[Any]
    """What is dead once no tensor views the block any more that was lent last."""

    def lend(
        self, views: Sequence[View], on_return: Callable[[Any], object]
    ) -> dict[Key, torch.Tensor]:
        """Return tensors on the block by key; call `on_return` with the lease when all are gone.

        Each tensor has a storage of its own, as tensors that were made apart have: whoever saves
        one, pickles it or sends it to a process writes that one and not the block, and torch
        saves no two dtypes on one storage. `on_return` should be no Python code: Ctrl-C in there
        would be lost.
        """
        ...


class _ArrayMemory:
    """Memory that numpy can see."""

    array: np.ndarray
    lease: weakref.ref[Any]

    @property
    def block(self) -> torch.Tensor:
        """The block as torch sees it."""
        return torch.from_numpy(self.array)

    def lend(
        self, views: Sequence[View], on_return: Callable[[Any], object]
    ) -> dict[Key, torch.Tensor]:
        """Return tensors on the block; see `Memory.lend`."""
        # A tensor made from a numpy array keeps that very array object alive until its storage is
        # freed, and the array keeps this window. So the death of the window is the death of the
        # last tensor. The window stands on a memoryview, since arrays that are made on an array
        # of an array would keep the latter and not the window.
        window = np.frombuffer(self.array.data, np.uint8)
        self.lease = weakref.ref(window, on_return)
        return tensors_on(window, views)


class HeapMemory(_ArrayMemory):
    """Ordinary memory of this process."""

    def __init__(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)  # calloc: large ones are free
        start = -raw.ctypes.data % ALIGNMENT
        self.array = raw[start : start + nbytes]


class PinnedMemory(_ArrayMemory):
    """Memory of this process that a GPU reads and writes by itself, while the host goes on."""

    def __init__(self, nbytes: int) -> None:
        self.array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


class DeviceMemory:
    """Memory of a device, all zero; the host does not see it."""

    array = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.block = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def lend(
        self, views: Sequence[View], on_return: Callable[[Any], object]
    ) -> dict[Key, torch.Tensor]:
        """Return tensors on the block; see `Memory.lend`."""
        # DLPack makes a second storage on the same memory, which keeps the first. The Python
        # object of this window stays for as long as any of the tensors, so its death is that of
        # the last one.
        window = from_dlpack(to_dlpack(self.block))
        self.lease = weakref.ref(window.untyped_storage(), on_return)
        return {view.key: from_dlpack(to_dlpack(view.of_tensor(window))) for view in views}


def memory_on(device: torch.device, nbytes: int) -> Memory:
    """Return memory of a device; on the host, memory that GPUs reach, where there are any."""
    if device.type != "cpu":
        return DeviceMemory(nbytes, device)
    return PinnedMemory(nbytes) if torch.cuda.is_available() else HeapMemory(nbytes)


class SharedMemory(_ArrayMemory):
    """Memory without a name that other processes can map too.

    It lives as long as somebody maps it, so nothing is left anywhere, whoever is killed. The
    descriptor is needed only until the others have it: `close_descriptor` then, or slabs that a
    user keeps would use them all up.

    Args:
        nbytes: How much.
        descriptor: Of memory that another process made; None makes new memory, all zero.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor: int | None = anonymous_file(nbytes) if descriptor is None else descriptor
        # Not by `mmap`, which keeps a descriptor of its own for as long as the memory lives.
        path = path_of_descriptor(self.descriptor)
        block = torch.from_file(path, shared=True, size=max(nbytes, 1), dtype=torch.uint8)
        self.array = block.numpy()[:nbytes]

    def close_descriptor(self) -> None:
        """Give the descriptor back; the memory stays mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if getattr(self, "descriptor", None) is not None:
            self.close_descriptor()

    def __reduce__(self) -> Any:
        # A copy would have the number of our descriptor, and close it, or what comes to have it.
        raise TypeError("cannot copy or pickle memory that is shared by a descriptor")


class Slab:
    """One block with the views that the loop writes through and the batches it is lent as."""

    number = 0
    """What messages call it."""
    span: tuple[int, int]
    """The envs of the layout that it holds."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.layout, self.memory = layout, memory
        self.span = (0, layout.envs)
        array, places = memory.array, layout.places.items()
        self.arrays: dict[Key, np.ndarray] = (
            {} if array is None else {key: layout.array(array, place) for key, place in places}
        )
        """Nothing, if the memory is out of the host's sight."""
        self.tensors = layout.tensors(memory.block)
        self._rows: dict[Any, tuple[torch.Tensor, ...] | torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.memory.block.device

    def rows(self, key: Key, lead: tuple[int, ...]) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Return something whose item t is row t as a tensor `[*lead, *shape]`."""
        found = self._rows.get((key, lead))
        if found is None:
            tensor = self.tensors[key]
            rows = tensor[:, 0] if not lead else tensor
            if len(lead) > 1:
                rows = tensor.view(len(tensor), *lead, *tensor.shape[2:])
            found = rows.unbind(0) if rows.shape[0] <= _ROWS_KEPT else rows
            self._rows[key, lead] = found
        return found

    def part(self, start: int, stop: int) -> Slab:
        """Return the envs from `start` to `stop` as a slab of views on the same memory."""
        part = object.__new__(Slab)
        part.layout, part.memory, part._rows = self.layout, self.memory, {}
        part.span = (self.span[0] + start, self.span[0] + stop)
        part.arrays = {key: array[:, start:stop] for key, array in self.arrays.items()}
        part.tensors = {key: tensor[:, start:stop] for key, tensor in self.tensors.items()}
        return part

    def lend(
        self, steps: int, lead: tuple[int, ...], on_return: Callable[[Any], object]
    ) -> TensorDict:
        """Return the first `steps` steps as a batch of views `[*lead, steps]`; see `Layout`.

        Each of its tensors has a storage of its own.
        """
        tensors = self.memory.lend(self.layout.batch(steps, lead), on_return)
        return self._arranged(tensors, lead, steps)

    def view(self, steps: int, lead: tuple[int, ...]) -> TensorDict:
        """Return the same of this part, to be used before it is written again; nothing is lent."""
        views = {
            key: rows[:steps].transpose(0, 1).view(*lead, steps, *rows.shape[2:])
            if lead
            else rows[:steps, 0]
            for key, rows in self.tensors.items()
            if self.layout.places[key].field.delivered
        }
        return self._arranged(views, lead, steps)

    def _arranged(
        self, views: dict[Key, torch.Tensor], lead: tuple[int, ...], steps: int
    ) -> TensorDict:
        names = (*[None] * len(lead), "time")
        batch = unchecked(self.layout.tree, views, torch.Size((*lead, steps)), names)
        for key, shape in self.layout.nested.items():
            batch.get(key).batch_size = [*lead, steps, *shape]
        return batch


class SlabPool:
    """Makes slabs, lends them, and uses those again that came back, with the next rollout."""

    def __init__(self, make: Callable[[], Slab], keep: int = 4) -> None:
        self.make = make
        # What does not fit falls out at the other end and is freed.
        self._free: deque[Slab] = deque(maxlen=keep)
        # Only we know these: without us a lent slab would be garbage, and never come back.
        self._lent: dict[int, tuple[Any, Slab]] = {}
        # Leases end in whatever thread drops the last tensor, and there no Python code may run:
        # a Ctrl-C that came just then would be raised in it, and be lost.
        self._ended: deque[Any] = deque()
        self.made = 0

    def _collect_ended(self) -> None:
        while self._ended:
            self.give_back(self._lent.pop(id(self._ended.popleft()))[1])

    def take(self) -> Slab:
        """Return a slab that nobody can see."""
        self._collect_ended()
        try:
            return self._free.pop()
        except IndexError:
            self.made += 1
            return self.make()

    def give_back(self, slab: Slab) -> None:
        """Take back a slab that was never lent, or that nobody views any more."""
        self._free.append(slab)

    def lend(self, slab: Slab, steps: int, lead: tuple[int, ...]) -> TensorDict:
        """Return the slab as a batch; it comes back by itself."""
        self._collect_ended()
        batch = slab.lend(steps, lead, self._ended.append)
        self._lent[id(slab.memory.lease)] = (slab.memory.lease, slab)
        return batch
