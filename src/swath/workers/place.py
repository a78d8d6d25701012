"""Where workers run, and how slabs and weights get there and back.

```
            LocalPlace                               RemotePlace (workers/remote.py)
  slabs     shared memory, written by the worker     memory here; the worker has its own, and sends
  weights   one block that all workers read          one block per version, sent to each
```
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from swath.links import Link, ProcessLink, end_all, in_words
from swath.memory import Layout, SharedMemory, Slab
from swath.memory.weights import WeightBlock, WeightSpec
from swath.shield import Shield
from swath.workers.body import main
from swath.workers.messages import Attach, Collect, Detach, Weights

if TYPE_CHECKING:
    from swath.workers.crew import Crew

__all__ = ["LocalPlace", "Place", "Publisher", "SharedSlabs", "Slabs"]

_OPEN_DESCRIPTORS = 64


class Place(Protocol):
    """Starts workers and says how memory reaches them."""

    @property
    def launch_limit(self) -> float | None:
        """Seconds that a worker has for its first word; None: as for any other answer."""
        ...

    def check(self) -> float | None:
        """Raise if no worker can be heard any more; return the seconds until the next look."""
        ...

    def launch(self, payloads: Mapping[int, bytes], shield: Shield) -> dict[int, Link]:
        """Start these workers, all or none; each will answer `Built`.

        Ctrl-C is held back by a shield, which is lifted where something is waited for.
        """
        ...

    def slabs(self, crew: Crew) -> Slabs:
        """Return what makes slabs for the workers of a crew."""
        ...

    def weights(self, crew: Crew, spec: WeightSpec) -> Publisher:
        """Return what publishes weights to the workers of a crew."""
        ...

    def close(self) -> None:
        """Start no more workers."""
        ...


class Slabs(Protocol):
    """Slabs that workers fill."""

    def make(self, layout: Layout, spans: Mapping[int, tuple[int, int]]) -> Slab:
        """Return a slab of which each of these workers fills some envs."""
        ...

    def share(self, slab: Slab, worker: int, span: tuple[int, int]) -> None:
        """Let a worker that was started again fill its part of a slab."""
        ...

    def can_share(self, slab: Slab) -> bool:
        """Tell whether a worker that is started again could fill this slab."""
        ...

    def order(self, worker: int, slab: Slab, span: tuple[int, int], steps: int) -> None:
        """Order a rollout into a part of a slab; it is there when `Rolled` or `Failed` comes."""
        ...

    def forget(self, worker: int) -> None:
        """Keep nothing for a worker that does not come again."""
        ...

    def tidy(self) -> None:
        """Tell workers which slabs are gone."""
        ...

    def close(self) -> None:
        """Let go of what is shared; slabs that somebody holds stay as they are."""
        ...


class Publisher(Protocol):
    """Weights on their way to workers."""

    def begin(self, worker: int) -> None:
        """Let a worker that was started have what is published for it."""
        ...

    def publish(
        self, source: Any, version: int, workers: Sequence[int], later: bool = False
    ) -> None:
        """Copy weights, once, and let these workers have them, or `later`."""
        ...

    def follow(self, worker: int, other: int) -> None:
        """Let a worker that will be started have what is published for another one."""
        ...

    def forget(self, worker: int) -> None:
        """Keep nothing for a worker that does not come again."""
        ...

    def direct(self) -> None:
        """Let workers have what was published for later."""
        ...

    def close(self) -> None:
        """Let go of what is shared."""
        ...


class LocalPlace:
    """Processes of this machine, from the fork server."""

    launch_limit = None

    def check(self) -> None:
        """Nothing: links notice the end of their processes."""

    def launch(self, payloads: Mapping[int, bytes], shield: Shield) -> dict[int, Link]:
        """Start workers; see `Place`."""
        links: dict[int, Link] = {}
        try:
            for number, payload in payloads.items():
                links[number] = ProcessLink(main, payload, shield)
        except BaseException:
            end_all(links.values())
            raise
        return links

    def slabs(self, crew: Crew) -> Slabs:
        """Return slabs in shared memory."""
        return SharedSlabs(crew)

    def weights(self, crew: Crew, spec: WeightSpec) -> Publisher:
        """Return a block in shared memory."""
        return _SharedWeights(crew, spec)

    def close(self) -> None:
        """Nothing: the fork server serves others, too."""


class SharedSlabs:
    """Slabs in shared memory, each with a number from `first` on, while somebody has them."""

    def __init__(self, crew: Crew, first: int = 0) -> None:
        self._crew, self._numbers = crew, itertools.count(first)
        self._alive: dict[int, tuple[Any, int]] = {}
        self._unused: deque[Any] = deque()
        self._described: list[weakref.ref[Any]] = []

    def make(self, layout: Layout, spans: Mapping[int, tuple[int, int]]) -> Slab:
        """Return a slab; see `Slabs`."""
        with in_words("no memory for a batch can be made"):
            slab = Slab(layout, SharedMemory(layout.nbytes))
        slab.number = next(self._numbers)
        alive = weakref.ref(slab, self._unused.append)  # no Python code: Ctrl-C would be lost there
        self._alive[id(alive)] = (alive, slab.number)
        for worker, span in spans.items():
            self.share(slab, worker, span)
        self._described = [one for one in self._described if one() is not None]
        self._described.append(weakref.ref(slab.memory))
        if len(self._described) > _OPEN_DESCRIPTORS:
            self._close_descriptor(self._described.pop(0))
        return slab

    @staticmethod
    def _close_descriptor(of: weakref.ref[Any]) -> None:
        memory = of()
        if memory is not None:
            memory.close_descriptor()

    def _sees(self, worker: int) -> bool:
        """Tell whether a worker maps slabs."""
        return True

    def share(self, slab: Slab, worker: int, span: tuple[int, int]) -> None:
        """Let a worker map a slab."""
        if self._sees(worker):
            self._crew.tell(worker, Attach(slab.number, slab.layout, *span), [slab.memory])

    def can_share(self, slab: Slab) -> bool:
        """Tell whether a further worker could map it."""
        return slab.memory.descriptor is not None  # type: ignore[attr-defined]

    def order(self, worker: int, slab: Slab, span: tuple[int, int], steps: int) -> None:
        """Order a rollout into a slab that the worker maps."""
        self._crew.order(worker, Collect(slab.number, steps))

    def forget(self, worker: int) -> None:
        """Nothing: slabs are kept for nobody."""

    def tidy(self) -> None:
        """Tell workers which slabs are gone."""
        while self._unused:
            _, number = self._alive.pop(id(self._unused.popleft()))
            for worker in list(self._crew.links):
                if self._sees(worker):
                    self._crew.tell(worker, Detach(number))

    def close(self) -> None:
        """Let go of what is shared; slabs that somebody holds stay as they are."""
        for one in self._described:
            self._close_descriptor(one)


class _SharedWeights(WeightBlock):
    def __init__(self, crew: Crew, spec: WeightSpec) -> None:
        with in_words("no memory for weights can be made"):
            self._own = SharedMemory(self.nbytes(spec, len(crew)))
        self._shared: torch.Tensor | None = None
        if spec.gpu is not None:  # weights go from GPU to GPU, by CUDA IPC
            size = (2 * len(crew) + 2) * spec.nbytes
            self._shared = torch.empty(size, dtype=torch.uint8, device=spec.gpu)
        super().__init__(spec, len(crew), self._own, self._shared)
        self._crew = crew

    def begin(self, worker: int) -> None:
        share: Any = reduce_tensor
        handle = None if self._shared is None else share(self._shared)
        message = Weights(self.spec, len(self._crew), worker, handle)
        self._crew.tell(worker, message, [self._own])

    def forget(self, worker: int) -> None:
        pass

    def close(self) -> None:
        self._own.close_descriptor()
        if self._shared is not None:
            self._shared = None
            self._buffers.clear()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
