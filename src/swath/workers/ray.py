"""Workers in Ray actors.

```
 your process                          Ray                        an actor, on any node
   RayPlace -- resources, placement --> finds a node, starts it --> Host: RayPort, Worker in run()
   RayWeights -- one object per version, however many actors ----->
```

The place owns the actors' options and its stay in the cluster; the crew owns the links. Ray does
not restart actors: the supervisor does, since only it knows what a worker had. Shutdown: links
first, then the cluster, if we have started it or connected to it, and nobody else uses it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from swath.errors import UsageError
from swath.links import Link
from swath.links.ray import RayLink, leave, needed
from swath.memory import Layout, SharedMemory, Slab
from swath.memory.weights import WeightSpec
from swath.workers.host import Host
from swath.workers.messages import Collect, Detach
from swath.workers.place import Numbered, Publisher, Slabs
from swath.workers.remote import IN_FLIGHT, Part, RemoteSlabs, RemoteWeights

if TYPE_CHECKING:
    from swath.workers.crew import Crew

__all__ = ["RayPlace", "needs_of"]

_THREADS = 8
"""One runs the worker, one waits for each report that is owed, one takes orders; some to spare."""
_INLINE = 100 * 1024
"""Bytes up to which Ray sends an argument with the call."""
_MAPPED = 64
"""Slabs that actors may map at a time; each takes a descriptor."""
_UNITS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def needs_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options takes."""
    named = {unit: config.get(name) or 0 for name, unit in _UNITS.items()}
    return {name: one for name, one in {**named, **(config.get("resources") or {})}.items() if one}


class RayPlace:
    """Actors of a cluster that this process is connected to.

    Args:
        configs: Options of the actors, in turn.
        limit: Seconds for an actor to find a place and to make its envs.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], limit: float | None) -> None:
        self._configs, self.launch_limit = configs, limit
        self.probe = SharedMemory(1)
        """What actors on this machine can map."""
        self._links, self._closed, self._lock = 0, False, threading.Lock()
        try:
            kinds = [needed().remote(Host).options(**_options(one)) for one in configs]
        except (ValueError, TypeError) as error:
            raise UsageError(f"remote_configs: {error}") from error
        self._kinds = kinds

    def launch(self, payloads: Mapping[int, bytes]) -> dict[int, Link]:
        """Ask Ray for actors; none is waited for."""
        return {number: self._launched(number, payload) for number, payload in payloads.items()}

    def _launched(self, number: int, payload: bytes) -> RayLink:
        with self._lock:
            self._links += 1
        needs = needs_of(self._configs[number % len(self._configs)])
        actor = self._kinds[number % len(self._kinds)].remote(sys.path)
        probe = self.probe.handle
        return RayLink(actor, payload, lambda: self._unplaced(needs), self._let_go, probe)

    def _unplaced(self, needs: Mapping[str, float]) -> str:
        ray = needed()
        free, total = ray.available_resources(), ray.cluster_resources()
        offers = {name: f"{free.get(name, 0):g} of {total.get(name, 0):g}" for name in needs}
        return (
            f"has found no place within {self.launch_limit:g} s (launch_timeout): it needs "
            f"{dict(needs)}, and free in the cluster are {offers}. Ask for less in remote_configs, "
            "add a node, or wait longer."
        )

    def slabs(self, crew: Crew) -> Slabs:
        """Return slabs that actors fill on this machine, and that others' blocks are copied to."""
        return _RaySlabs(crew)

    def weights(self, crew: Crew, spec: WeightSpec) -> Publisher:
        """Return what puts each version into Ray's store, once."""
        return _RayWeights(crew, spec)

    def close(self) -> None:
        """Start no more actors; leave the cluster with the last of them."""
        with self._lock:
            closed, self._closed = self._closed, True
            last = not closed and not self._links
        if last:
            leave()

    def _let_go(self) -> None:
        with self._lock:
            self._links -= 1
            last = self._closed and not self._links
        if last:
            leave()


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "max_concurrency": _THREADS, "max_restarts": 0, "max_task_retries": 0}


class _RaySlabs(RemoteSlabs):
    """Slabs that actors on this machine map and fill; those of others travel, and are copied."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew)
        self._numbered = Numbered(IN_FLIGHT)

    def make(self, layout: Layout, spans: Mapping[int, tuple[int, int]]) -> Slab:
        if len(self._numbered) < _MAPPED and any(self._near(worker) for worker in spans):
            return self._numbered.make(layout)
        return super().make(layout, spans)

    def _near(self, worker: int) -> bool:
        link: Any = self._crew.links.get(worker)
        return link is not None and link.near

    def order(self, worker: int, slab: Slab, span: tuple[int, int], steps: int) -> None:
        memory = slab.memory
        if not (isinstance(memory, SharedMemory) and self._near(worker)):
            return super().order(worker, slab, span, steps)
        self._attach(worker, slab.number, slab.layout, span, memory.handle)
        self._crew.order(worker, Collect(slab.number, steps), (), Part(slab, span, slab))

    def tidy(self) -> None:
        for number in self._numbered.gone():
            links: Any = list(self._crew.links.items())
            for worker, link in links:
                if number in link.attached:
                    link.attached.discard(number)
                    self._crew.tell(worker, Detach(number))


class _RayWeights(RemoteWeights):
    def _block(self) -> np.ndarray:
        # Ray's store copies; memory that was written before need not come from the system.
        return self._newest if self._newest.nbytes > _INLINE else super()._block()

    def _parcel(self, block: np.ndarray) -> Any:
        return block if block.nbytes <= _INLINE else needed().put(block)
