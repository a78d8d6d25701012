"""All weights of a policy in one block, published by one process and taken by many.

```
 words:   target of reader 0, 1, ... | stamp of buffer 0, 1, ... | what was never given, of each
 buffers: | all tensors | all tensors | ...        two for each reader, and two
```

The publisher writes into a buffer that no reader is directed to, then directs readers there by
storing one word each: version and buffer in one. A buffer's stamp tells the version that it holds,
and none while it is written, so a reader that was so slow that its buffer was written again sees
that, and takes the newer one. No reader ever waits, and none can hold the publisher up, dead or
alive. Buffers that were never used take no memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.errors import UsageError
from swath.memory.fence import fence
from swath.memory.layout import ALIGNMENT
from swath.memory.slab import Memory, SharedMemory

__all__ = ["WeightBlock", "WeightSpec", "copy_weights", "named_weights"]

_WRITING = -1


@dataclass(frozen=True)
class WeightSpec:
    """The tensors of a policy, by name: what may be published to it."""

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    optional: frozenset[str]
    """Buffers that are no part of a state dict."""
    others: frozenset[str]
    """Further names of the same tensors (tied weights)."""
    gpu: torch.device | None = field(default=None, compare=False)
    """Where all of them live, if that is a GPU."""

    @classmethod
    def of(cls, module: torch.nn.Module | None) -> WeightSpec:
        """Return the spec of a module; that of None is empty."""
        if module is None:
            return cls({}, frozenset(), frozenset())
        own, saved = named_weights(module), set(module.state_dict())
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in own.items()}
        devices = {value.device for value in own.values()}
        gpu = next(iter(devices)) if [one.type for one in devices] == ["cuda"] else None
        return cls(shapes, frozenset(set(own) - saved), frozenset(saved - set(own)), gpu)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in one block."""
        return sum(_aligned(math.prod(s) * d.itemsize) for s, d in self.shapes.values())

    def unflatten(self, block: np.ndarray | torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a block, as views."""
        whole = block if isinstance(block, torch.Tensor) else torch.from_numpy(block)
        start, views = 0, {}
        for name, (shape, dtype) in self.shapes.items():
            stop = start + math.prod(shape) * dtype.itemsize
            views[name] = whole[start:stop].view(dtype).view(shape)
            start = start + _aligned(stop - start)
        return views

    def fit(self, source: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a module, a state dict or a TensorDict, or say what is wrong."""
        given = named_weights(source)
        unknown = [name for name in given if name not in self.shapes and name not in self.others]
        missing = [name for name in self.shapes if name not in given and name not in self.optional]
        if unknown or missing:
            raise UsageError(
                f"these weights do not fit the policy: missing {missing}, unknown {unknown}."
            )
        fitting = {name: given[name] for name in self.shapes if name in given}
        for name, value in fitting.items():
            if tuple(value.shape) != self.shapes[name][0]:
                raise UsageError(
                    f"these weights do not fit the policy: {name} has shape "
                    f"{tuple(value.shape)}, {self.shapes[name][0]} was expected."
                )
        return fitting


def named_weights(source: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; tied ones once."""
    if isinstance(source, torch.nn.Module):
        return {**dict(source.named_parameters()), **dict(source.named_buffers())}
    if isinstance(source, TensorDictBase):
        return dict(source.flatten_keys(".").items())
    if isinstance(source, Mapping):
        return {str(name): torch.as_tensor(value) for name, value in source.items()}
    raise UsageError(
        f"weights must be a module, a state dict or a TensorDict; got {type(source).__name__}."
    )


@torch.no_grad()
def copy_weights(source: Any, module: torch.nn.Module) -> None:
    """Copy weights into a module in this process; the source is only read."""
    own = named_weights(module)
    for name, value in WeightSpec.of(module).fit(source).items():
        own[name].copy_(value)


class WeightBlock:
    """Memory that a publisher and its readers share.

    Args:
        spec: What is published.
        readers: How many take it.
        memory: That the publisher made; None in the publisher.
        on_gpu: Memory of a GPU for the buffers; None to have them in `memory`, too.
    """

    def __init__(
        self,
        spec: WeightSpec,
        readers: int,
        memory: Memory | None = None,
        on_gpu: torch.Tensor | None = None,
    ) -> None:
        self._gpu = None if on_gpu is None else on_gpu.device
        self.spec, self._readers, self._count = spec, readers, 2 * readers + 2
        words = readers + self._count
        start, size = self._start(spec, readers), spec.nbytes
        self.memory = memory or SharedMemory(self.nbytes(spec, readers))
        array = self.memory.array
        assert array is not None
        self._words = array[: 8 * words].view(np.int64)
        self._stamps = self._words[readers:]
        self._optional = sorted(spec.optional)
        marks = array[8 * words : 8 * words + self._count * len(self._optional)]
        self._present = marks.reshape(self._count, len(self._optional))
        block = torch.from_numpy(array)[start:] if on_gpu is None else on_gpu
        self._flat = [block[n * size : (n + 1) * size] for n in range(self._count)]
        self._buffers = [spec.unflatten(one) for one in self._flat]
        # Those in use, the least recently used first. With a third one, a reader is overtaken only
        # by two publications; more are taken when readers are directed to different versions.
        self._order = list(range(min(3, self._count)))
        self._later: dict[int, int] = {}
        self._publishing = threading.RLock()

    @staticmethod
    def nbytes(spec: WeightSpec, readers: int) -> int:
        """Return how much memory it needs; what is never used takes none."""
        return WeightBlock._start(spec, readers) + (2 * readers + 2) * spec.nbytes

    @staticmethod
    def _start(spec: WeightSpec, readers: int) -> int:
        count = 2 * readers + 2
        return _aligned(8 * (readers + count) + count * len(spec.optional))

    @torch.no_grad()
    def publish(
        self, source: Any, version: int, readers: Sequence[int], later: bool = False
    ) -> None:
        """Copy weights into the block, once, and direct these readers to them, or `later`.

        What is not given is as before.
        """
        fitting = self.spec.fit(source)
        with self._publishing:
            number, newest = self._begin(), self._order[-1]
            for name, view in self._buffers[number].items():
                view.copy_(fitting[name] if name in fitting else self._buffers[newest][name])
            given = np.array([name in fitting for name in self._optional], np.uint8)
            self._end(number, version, self._present[newest] | given)
            self._later.update(dict.fromkeys(readers, version * self._count + number))
            if not later:
                self.direct()

    def publish_flat(
        self, flat: np.ndarray, missing: Container[str], version: int, reader: int
    ) -> None:
        """Copy a whole version, all tensors as one, and direct a reader to it."""
        with self._publishing:
            number = self._begin()
            self._flat[number].copy_(torch.from_numpy(flat))
            given = np.array([name not in missing for name in self._optional], np.uint8)
            self._end(number, version, given)
            self._words[reader] = version * self._count + number

    def _free(self) -> int:
        """Return a buffer that nobody is directed to."""
        words = [*self._words[: self._readers].tolist(), *self._later.values()]
        taken = {word % self._count for word in words}
        newest = self._order[-1]
        free = (one for one in self._order if one not in taken and one != newest)
        return next(free, len(self._order))

    def _begin(self) -> int:
        """Return the number of a buffer to write; nobody takes what is in there any more."""
        number = self._free()
        self._stamps[number] = _WRITING
        fence()
        return number

    def _end(self, number: int, version: int, present: np.ndarray) -> None:
        """Let readers take what was written."""
        self._copied()
        self._present[number] = present
        fence()
        self._stamps[number] = version
        fence()
        self._order = [*(one for one in self._order if one != number), number]

    def direct(self) -> None:
        """Direct readers to what was published for them by now."""
        with self._publishing:
            for reader, word in self._later.items():
                self._words[reader] = word
            self._later.clear()

    def follow(self, reader: int, other: int) -> None:
        """Direct a reader to where another one is directed to."""
        with self._publishing:
            self._words[reader] = self._words[other]

    def newest(self, reader: int) -> int:
        """Return the version that a reader is directed to."""
        return int(self._words[reader]) // self._count

    @torch.no_grad()
    def take(self, reader: int, into: Mapping[str, torch.Tensor]) -> int:
        """Copy a whole version, the newest, into tensors and return its number."""
        while True:
            word = int(self._words[reader])
            version, number = divmod(word, self._count)
            if self._holds(number, version):
                missing = {
                    name
                    for name, one in zip(self._optional, self._present[number], strict=True)
                    if not one
                }
                for name, view in self._buffers[number].items():
                    if name not in missing:
                        into[name].copy_(view)
                self._copied()
                if self._holds(number, version):
                    return version

    def _holds(self, number: int, version: int) -> bool:
        fence()
        stamp = int(self._stamps[number])
        fence()
        return stamp == version

    def _copied(self) -> None:
        """Wait until the copies are made, where the GPU makes them: words are the host's."""
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
