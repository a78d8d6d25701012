"""Workers that share no memory with your process, on this machine or on others.

```
 your process                                        another one, started by a launcher
   gate  <------------ dials, proves the secret ------- join(invitation, number)
     | ----- job, and how to reach the medium -------->   |
   RemoteLink  <========== messages, blocks =========>  RemotePort -- Worker, as anywhere
```

The place owns the gate and the medium; the crew owns the links; the launcher owns what it started.
Shutdown: links first (see `links/remote.py`), then the gate, so that nobody comes in any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from swath.errors import ClosedError, WorkerError
from swath.links import Channel, Launched, Link, end_all, unpack
from swath.links.gate import Arrival, Gate, Note, dial
from swath.links.remote import Bulk, RemoteLink, RemotePort
from swath.memory import HeapMemory, Layout, Slab
from swath.memory.weights import WeightSpec
from swath.shield import Shield
from swath.workers.body import serve
from swath.workers.messages import Attach, Collect, Publish
from swath.workers.place import Publisher, Slabs

if TYPE_CHECKING:
    from swath.workers.crew import Crew

__all__ = [
    "IN_FLIGHT",
    "Invitation",
    "Launcher",
    "RemotePlace",
    "Started",
    "join",
    "main",
]

IN_FLIGHT = 2
"""Rollouts of one worker that may be under way; it has memory for so many."""


# -- the worker's side --------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """What a worker needs to come in."""

    host: str
    port: int
    secret: bytes
    patience: float


@dataclass(frozen=True)
class _Welcome:
    job: bytes
    ticket: Any


def join(
    invitation: Invitation,
    number: int,
    is_open: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> bool:
    """Be a worker until your process ends it, or is gone; return False if it did not want it.

    Args:
        invitation: Where to.
        number: Which worker to be.
        is_open: As of `dial`.
        tell: Hears in words how the coming in goes.
    """
    where, name = invitation, f"{invitation.host} port {invitation.port}"
    channel, own_host = dial(
        where.host, where.port, where.secret, number, where.patience, is_open, tell
    )
    try:
        while isinstance(welcome := channel.receive()[0], Note):
            tell(f"{name}: {welcome.text}")
            if welcome.refused:
                channel.close()
                return False
        tell(f"{name}: worker {number} is connected.")
        port = RemotePort(channel, welcome.ticket.connect(own_host))
    except EOFError:
        channel.close()
        tell(f"{name} has ended, or has taken another worker {number}.")
        return False
    try:
        serve(port, welcome.job)
    except EOFError:
        pass
    finally:
        port.close()
    return True


def main(channel: Channel, payload: bytes) -> None:
    """Join from a process that was launched on this machine."""
    join(*unpack(payload))


# -- your process's side ------------------------------------------------------------------------


class Started(Protocol):
    """What a launcher has started for one worker."""

    @property
    def process(self) -> Launched | None:
        """The process, if it is one of this machine."""
        ...

    def check(self) -> None:
        """Raise if the worker will never come."""
        ...

    def cancel(self) -> None:
        """End it, as far as that is possible from here."""
        ...


class Launcher(Protocol):
    """Starts workers, somewhere."""

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Start these workers, all or none; each is to call `join`.

        A shield holds Ctrl-C back until it is noted what was started.
        """
        ...

    def close(self) -> None:
        """Start no more."""
        ...


class Medium(Protocol):
    """Makes the two ends that blocks travel between."""

    def ticket(self, number: int) -> Any:
        """Return what a worker needs for its end, which `ticket.connect(own_host)` gives."""
        ...

    def connect(self, ticket: Any, own_host: str) -> Bulk:
        """Return this end."""
        ...

    def close(self) -> None:
        """Make no more."""
        ...


class RemotePlace:
    """Workers that come through a gate.

    Args:
        gate: Where they come in.
        medium: What slabs and weights travel over.
        launcher: What starts them.
        invitation: What they need to come in.
        limit: Seconds to wait for a worker to come in; None for any time.
    """

    def __init__(
        self,
        gate: Gate,
        medium: Medium,
        launcher: Launcher,
        invitation: Invitation,
        limit: float | None,
    ) -> None:
        self._gate, self._medium, self._launcher = gate, medium, launcher
        self._invitation, self._limit = invitation, limit

    launch_limit = None

    def check(self) -> None:
        """Nothing: links notice the end of their connections."""

    def launch(self, payloads: Mapping[int, bytes], shield: Shield) -> dict[int, Link]:
        """Start workers and wait until each has come in."""
        started = self._launcher.start(self._invitation, list(payloads), shield)
        until = float("inf") if self._limit is None else monotonic() + self._limit
        links: dict[int, Link] = {}
        try:
            with shield.lifted():
                for number, payload in payloads.items():
                    arrival = self._arrived(number, until, started[number].check)
                    links[number] = self._connected(arrival, payload, started[number])
        except BaseException:
            for one in started.values():
                one.cancel()
            end_all(links.values())
            raise
        return links

    def _arrived(self, number: int, until: float, check: Callable[[], None]) -> Arrival:
        arrival = self._gate.fetch(number, until, check)
        if arrival is None:
            if monotonic() < until:
                raise ClosedError("this collector was shut down while a call was waiting for it.")
            raise WorkerError(
                f"worker {number} has not connected within {self._limit:g} s (launch_timeout). Is "
                f"it still queued, or can it not reach {self._invitation.host} port "
                f"{self._invitation.port}?",
                worker=number,
            )
        return arrival

    def _connected(self, arrival: Arrival, payload: bytes, started: Started) -> RemoteLink:
        hello, channel = arrival.hello, arrival.channel
        ticket = self._medium.ticket(hello.number)
        try:
            channel.send(_Welcome(payload, ticket))
            bulk = self._medium.connect(ticket, arrival.own_host)
        except (EOFError, RuntimeError) as error:
            channel.close()
            if isinstance(error, WorkerError):  # it says already what is wrong
                raise
            raise WorkerError(
                f"worker {hello.number} on {hello.host} connected and was lost again: {error}",
                worker=hello.number,
            ) from error
        except BaseException:
            channel.close()
            raise
        name = f"rank {hello.number + 1} on {hello.host}, process {hello.pid}"
        return RemoteLink(
            channel, bulk, name, hello.pid, hello.host, started.process, started.cancel
        )

    def slabs(self, crew: Crew) -> Slabs:
        """Return slabs that blocks are received into."""
        return RemoteSlabs(crew)

    def weights(self, crew: Crew, spec: WeightSpec) -> Publisher:
        """Return what sends each version to each worker."""
        return RemoteWeights(crew, spec)

    def close(self) -> None:
        """Let nobody in any more."""
        self._gate.close()
        self._launcher.close()
        self._medium.close()


@dataclass
class _Part:
    """Where a rollout goes that comes as one block: a slab, or some envs of one."""

    slab: Slab
    span: tuple[int, int]
    own: Slab
    """In the worker's own layout; the slab itself if it is all of it."""

    @property
    def block(self) -> np.ndarray:
        array = self.own.memory.array
        assert array is not None
        return array

    def arrived(self) -> None:
        if self.own is not self.slab:
            for key, array in self.slab.arrays.items():
                array[:, slice(*self.span)] = self.own.arrays[key]

    def came(self, block: np.ndarray) -> None:
        if self.own is self.slab:
            self.block[:] = block
        else:
            for key, place in self.own.layout.places.items():
                rows = self.own.layout.array(block, place)
                self.slab.arrays[key][:, slice(*self.span)] = rows


class RemoteSlabs:
    """Slabs in memory of this process; a worker writes into its own, which then travels."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._turns: dict[int, int] = {}
        self._own: dict[tuple[int, int], Slab] = {}

    def make(self, layout: Layout, spans: Mapping[int, tuple[int, int]]) -> Slab:
        """Return a slab; see `Slabs`."""
        return Slab(layout, HeapMemory(layout.nbytes))

    def share(self, slab: Slab, worker: int, span: tuple[int, int]) -> None:
        """Nothing: a worker does not see it."""

    def can_share(self, slab: Slab) -> bool:
        """Return True: a worker does not see it."""
        return True

    def order(self, worker: int, slab: Slab, span: tuple[int, int], steps: int) -> None:
        """Order a rollout into the memory of the worker that is free, and expect its block."""
        turn = self._turns[worker] = (self._turns.get(worker, 0) + 1) % IN_FLIGHT
        own = slab if span == (0, slab.layout.envs) else self._staged(worker, turn, slab, span)
        self._attach(worker, turn, own.layout)
        self._crew.order(worker, Collect(turn, steps), (), _Part(slab, span, own))

    def _attach(self, worker: int, number: int, layout: Layout) -> None:
        """Let a worker have memory of its own, unless it has it."""
        link: Any = self._crew.links.get(worker)
        if link is not None and number not in link.attached:
            link.attached.add(number)
            self._crew.tell(worker, Attach(number, layout, 0, layout.envs), [layout.nbytes])

    def _staged(self, worker: int, turn: int, slab: Slab, span: tuple[int, int]) -> Slab:
        """Return memory for a block of which the parts go to different places of a slab."""
        if (worker, turn) not in self._own:
            whole = slab.layout
            fields = [place.field for place in whole.places.values()]
            layout = Layout(fields, whole.steps, span[1] - span[0], whole.order)
            self._own[worker, turn] = Slab(layout, HeapMemory(layout.nbytes))
        return self._own[worker, turn]

    def forget(self, worker: int) -> None:
        """Let go of what was staged for a worker that does not come again."""
        self._turns.pop(worker, None)
        for turn in range(IN_FLIGHT):
            self._own.pop((worker, turn), None)

    def tidy(self) -> None:
        """Nothing: workers know none of these slabs."""

    def close(self) -> None:
        """Nothing is shared."""


class RemoteWeights:
    """One block for each version, which is sent to each worker."""

    def __init__(self, crew: Crew, spec: WeightSpec) -> None:
        self._crew, self._spec = crew, spec
        self._begun: dict[int, Link] = {}
        self._lock = threading.RLock()
        self._newest = np.zeros(spec.nbytes, np.uint8)
        self._missing = spec.optional
        self._current: dict[int, tuple[Publish, np.ndarray]] = {}
        self._later: dict[int, tuple[Publish, np.ndarray]] = {}

    def begin(self, worker: int) -> None:
        """Let a worker have what is published, from now on, and what is current."""
        with self._lock:
            link = self._crew.links.get(worker)
            if link is not None:  # else it has ended, and is started again
                self._begun[worker] = link
            if worker in self._current:
                self._push(worker, *self._current[worker])

    @torch.no_grad()
    def publish(
        self, source: Any, version: int, workers: Sequence[int], later: bool = False
    ) -> None:
        """Copy weights into one block and send it to these workers, or `later`."""
        fitting = self._spec.fit(source)
        whole = len(fitting) == len(self._spec.shapes)
        with self._lock:
            block = np.empty_like(self._newest) if whole else self._newest.copy()
            for name, view in self._spec.unflatten(block).items():
                if name in fitting:
                    view.copy_(fitting[name])
            self._newest, self._missing = block, self._missing - set(fitting)
            what = Publish(version, self._missing), block
            self._later.update(dict.fromkeys(workers, what))
            if not later:
                self.direct()

    def follow(self, worker: int, other: int) -> None:
        """Let a worker that will be started have what is published for another one."""
        with self._lock:
            for kept in (self._current, self._later):
                if other in kept:
                    kept[worker] = kept[other]

    def forget(self, worker: int) -> None:
        """Keep nothing for a worker that does not come again."""
        with self._lock:
            for kept in (self._begun, self._current, self._later):
                kept.pop(worker, None)

    def direct(self) -> None:
        """Send what was published for later."""
        with self._lock:
            later, self._later = self._later, {}
            self._current.update(later)
            for worker, what in later.items():
                self._push(worker, *what)

    def _push(self, worker: int, message: Publish, block: np.ndarray) -> None:
        link: Any = self._crew.links.get(worker)
        begun = link is not None and link is self._begun.get(worker)
        if begun:  # not while it is being started
            with contextlib.suppress(EOFError):  # the next wait says so
                self._send(link, worker, message, block)

    def _send(self, link: Any, worker: int, message: Publish, block: np.ndarray) -> None:
        link.push(message, block)

    def close(self) -> None:
        """Nothing is shared."""
