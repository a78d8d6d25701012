"""Workers in Ray actors.

```
 your process                          Ray                        an actor, on any node
   RayPlace -- resources, placement --> finds a node, starts it --> Host: a port, Worker in run()
   RayWeights -- one object per version, however many actors -----> elsewhere
              ---- one block that all of them read ---------------> on this machine
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

from swath.errors import ClosedError, UsageError
from swath.links import Link, end_all
from swath.links.cluster import leave, needed, needs_of, no_place, session
from swath.links.door import Door
from swath.links.ray import RayLink
from swath.memory import Slab
from swath.memory.weights import WeightBlock, WeightSpec
from swath.shield import Shield
from swath.workers.host import Host
from swath.workers.messages import Publish, Weights
from swath.workers.place import Publisher, SharedSlabs, Slabs
from swath.workers.remote import IN_FLIGHT, RemoteSlabs, RemoteWeights

if TYPE_CHECKING:
    from swath.workers.crew import Crew

__all__ = ["RayPlace", "actor_of"]

_THREADS = 8
"""Threads of the actor: one runs the worker, one per pending report, one takes orders, the rest
are spare."""
_INLINE = 100 * 1024
"""Bytes up to which Ray sends an argument with the call."""
_READERS = 16
"""Actors that take weights from one block."""


class RayPlace:
    """Actors of a cluster that this process is connected to.

    Args:
        configs: Options of the actors, in turn.
        limit: Seconds for an actor to find a place and to make its envs.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], limit: float | None) -> None:
        self._configs, self.launch_limit = configs, limit
        self._links, self._closed, self._lock = 0, False, threading.Lock()
        self._session = session()
        self._kinds = [actor_of(one) for one in configs]

    def launch(self, payloads: Mapping[int, bytes], shield: Shield) -> dict[int, Link]:
        """Ask Ray for actors; none is waited for."""
        self.check()
        links: dict[int, Link] = {}
        try:
            for number, payload in payloads.items():
                links[number] = self._launched(number, payload)
        except BaseException:
            end_all(links.values())
            raise
        return links

    def check(self) -> float:
        """Raise if Ray was shut down since: a call would start another one, or never end."""
        if session() != self._session:
            raise ClosedError("Ray was shut down under this collector.")
        return 1.0

    def _launched(self, number: int, payload: bytes) -> RayLink:
        with self._lock:
            self._links += 1
        needs, door = needs_of(self._configs[number % len(self._configs)]), None
        try:
            door = Door()
            actor = self._kinds[number % len(self._kinds)].remote(sys.path, door.name)
        except BaseException:
            if door is not None:
                door.close()
            self._let_go()
            raise
        return RayLink(
            actor,
            payload,
            lambda: no_place(needs, self.launch_limit, "remote_configs"),
            self._let_go,
            door,
        )

    def slabs(self, crew: Crew) -> Slabs:
        """Return slabs that actors fill on this machine, and that others' blocks are copied to."""
        return _RaySlabs(crew)

    def weights(self, crew: Crew, spec: WeightSpec) -> Publisher:
        """Return what brings each version to all actors."""
        return _RayWeights(crew, spec)

    def close(self) -> None:
        """Start no more actors; leave the cluster with the last of them."""
        with self._lock:
            closed, self._closed = self._closed, True
            last = not closed and not self._links
        if last:
            leave(self._session)

    def _let_go(self) -> None:
        with self._lock:
            self._links -= 1
            last = self._closed and not self._links
        if last:
            leave(self._session)


def actor_of(config: Mapping[str, Any]) -> Any:
    """Return what starts actors with these options; needs no cluster yet."""
    ours = {"max_concurrency": _THREADS, "max_restarts": 0, "max_task_retries": 0}
    try:
        return needed().remote(Host).options(**{**config, **ours})
    except (ValueError, TypeError) as error:
        raise UsageError(f"remote_configs has {dict(config)}: {error}") from error


class _RaySlabs(SharedSlabs, RemoteSlabs):
    """Slabs that actors on this machine map and fill; what others fill travels, and is copied."""

    def __init__(self, crew: Crew) -> None:
        SharedSlabs.__init__(self, crew, IN_FLIGHT)  # smaller numbers are of actors' own memory
        RemoteSlabs.__init__(self, crew)

    def _sees(self, worker: int) -> bool:
        link: Any = self._crew.links.get(worker)
        return link is not None and link.near

    def order(self, worker: int, slab: Slab, span: tuple[int, int], steps: int) -> None:
        kind = SharedSlabs if self._sees(worker) else RemoteSlabs
        kind.order(self, worker, slab, span, steps)


class _RayWeights(RemoteWeights):
    """Weights in Ray's store for actors elsewhere, in memory that all see for those here.

    An actor that is started again may be elsewhere; what each is to have is kept until then.
    """

    def __init__(self, crew: Crew, spec: WeightSpec) -> None:
        super().__init__(crew, spec)
        self._blocks: dict[int, WeightBlock] = {}
        self._written: dict[int, tuple[Publish, int]] = {}  # what a block has, and who was first
        self._stored: tuple[Any, Any] = None, None  # a version, and the same in Ray's store

    def begin(self, worker: int) -> None:
        link: Any = self._crew.links.get(worker)
        if link is not None and link.near:
            group, reader = divmod(worker, _READERS)
            if group not in self._blocks:
                self._blocks[group] = WeightBlock(self._spec, _READERS)
            memory = self._blocks[group].memory
            self._crew.tell(worker, Weights(self._spec, _READERS, reader), [memory])
        super().begin(worker)

    def _send(self, link: Any, worker: int, message: Publish, block: np.ndarray) -> None:
        if link.near:
            self._write(*divmod(worker, _READERS), message, block)
        elif block.nbytes <= _INLINE:
            link.push(message, block)
        else:
            if self._stored[0] is not block:
                self._stored = block, needed().put(block)
            link.push(message, self._stored[1])

    def _write(self, group: int, reader: int, message: Publish, block: np.ndarray) -> None:
        shared, (written, first) = self._blocks[group], self._written.get(group, (None, 0))
        if written is message:
            shared.follow(reader, first)
        else:
            shared.publish_flat(block, message.missing, message.version, reader)
            self._written[group] = message, reader

    def forget(self, worker: int) -> None:
        super().forget(worker)
        group = worker // _READERS
        if not any(one // _READERS == group for one in self._begun):
            self._written.pop(group, None)
            block: Any = self._blocks.pop(group, None)
            if block is not None:
                block.memory.close_descriptor()

    def close(self) -> None:
        for block in self._blocks.values():
            block.memory.close_descriptor()  # type: ignore[attr-defined]
