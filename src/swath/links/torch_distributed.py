"""Blocks over `torch.distributed`: one group of two ranks for each worker.

A group for each pair, since gloo closes every connection of a group when one of them fails, and
since a worker that was started again can join a new group of two at once. A receive that was begun
early is served by gloo's own threads, while Python does something else.

```
 your process, rank 0                             worker, rank 1
   store (TCP, on the gate's address)  <-------->   keys of this pair, under a name of the run
   group of two  ==============================>    group of two
```

NCCL does all of a group in order, on one stream, and a transfer keeps a part of the GPU busy until
the other side comes. So it has a group for each direction, and begins to receive when the block was
announced. It connects with the first block, and then the host waits for the other side: one byte
goes each way first. It tells nobody that the other side has died: who waits looks at the channel.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from time import sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as _dist

from swath.compat.torch import gloo_options
from swath.errors import UsageError
from swath.helpers import Helper
from swath.links.channel import Channel
from swath.links.limits import check_descriptors
from swath.links.remote import Bulk, wait_until

dist: Any = _dist  # most of what is used here has no types

__all__ = ["TorchBulk", "TorchMedium", "TorchTicket", "TorchrunBoard", "store_on"]

_READING = 0.05
"""Seconds between two looks at the board."""
_NEVER = timedelta(days=365)
"""When NCCL itself is to give up: it would end the process."""
_ENDING = 5.0
"""Seconds for NCCL to end what is under way."""


@dataclass(frozen=True)
class TorchTicket:
    """What a worker needs to be the other end of a pair."""

    backend: str
    host: str
    port: int
    name: str
    patience: float
    worker: int = 0

    def connect(self, own_host: str) -> Bulk:
        """Return the worker's end."""
        store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=self.patience))
        if self.backend == "nccl":  # on one host, no GPU can serve two ranks; on others, any can
            return _NcclBulk(self, store, 1, (self.worker + 1) % torch.cuda.device_count())
        return TorchBulk(self, store, 1, own_host)


class TorchMedium:
    """Makes pairs, one for each worker that comes in.

    Args:
        backend: "gloo" or "nccl".
        host: The address that workers dial.
        name: Of this run; nobody else can guess it.
        patience: Seconds after which a transfer that does not go on is given up.
    """

    def __init__(self, backend: str, host: str, name: str, patience: float) -> None:
        if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise UsageError("backend='nccl' needs a CUDA device and a build of torch with NCCL.")
        self._store, port = store_on(host, patience)
        self._base = TorchTicket(backend, host, port, name, patience)
        self._pairs = count()

    def ticket(self, number: int) -> TorchTicket:
        """Return what the next worker needs."""
        name = f"{self._base.name}/{next(self._pairs)}"
        return replace(self._base, name=name, worker=number)

    def connect(self, ticket: TorchTicket, own_host: str) -> Bulk:
        """Return this end of the pair that a ticket is for."""
        if ticket.backend == "nccl":
            return _NcclBulk(ticket, self._store, 0, torch.cuda.current_device())
        return TorchBulk(ticket, self._store, 0, own_host)

    def close(self) -> None:
        """Let nobody join any more."""
        del self._store


def store_on(host: str, patience: float) -> tuple[Any, int]:
    """Return a store that listens on one address only, and its port."""
    check_descriptors()
    # It would listen everywhere if it were not given a socket.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=patience),
        wait_for_workers=False,
        multi_tenant=True,  # RPC finds it by its port
        master_listen_fd=listening.detach(),
    )
    return store, port


class TorchBulk:
    """One end of a pair."""

    def __init__(self, ticket: TorchTicket, store: Any, rank: int, own_host: str) -> None:
        check_descriptors()
        self._peer = 1 - rank
        self._store = dist.PrefixStore(ticket.name, store)
        options = gloo_options(ticket.patience, own_host)
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, 2, options)
        self._sent, self._received = count(), count()
        self._receipts: deque[Any] = deque(maxlen=4)

    def send(self, block: np.ndarray) -> Callable[[], None]:
        """Begin to send; see `Bulk`.

        A receipt is waited for, not the send itself: that would not end if the other side died
        before it began to receive.
        """
        tag, receipt = self._tag(self._sent), torch.empty(1, dtype=torch.uint8)
        sent = self._group.send([torch.from_numpy(block)], self._peer, tag)
        received = self._group.recv([receipt], self._peer, tag + 1)
        return lambda: (received.wait(), sent)[1]

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        """Begin to receive; see `Bulk`."""
        tag = self._tag(self._received)
        work = self._group.recv([torch.from_numpy(block)], self._peer, tag)

        def wait() -> None:
            work.wait()
            receipt = torch.zeros(1, dtype=torch.uint8)
            self._receipts.append((self._group.send([receipt], self._peer, tag + 1), receipt))

        return wait

    @staticmethod
    def _tag(numbers: count[int]) -> int:
        return 2 * (next(numbers) % (1 << 29))

    def watch(self, channel: Channel) -> None:
        """Nothing: the group notices."""

    def close(self) -> None:
        """Let go of the other side."""
        self._group = None
        self._receipts.clear()


class _NcclBulk:
    """One end of a pair on GPUs.

    Blocks are copied on one stream and awaited on another: what is on a stream behind a transfer
    whose other side has died waits for ever, on the host, too.
    """

    def __init__(self, ticket: TorchTicket, store: Any, rank: int, device: int) -> None:
        self._peer, self._patience = 1 - rank, ticket.patience
        self._device = torch.device("cuda", device)
        self._ended: Callable[[], bool] = lambda: False
        self._groups: dict[int, Any] = {}
        stream: Any = torch.cuda.Stream
        self._copies, self._waits = [[stream(device) for _ in range(2)] for _ in range(2)]
        hello = np.zeros(1, np.uint8)
        for sender in (0, 1):
            path = dist.PrefixStore(f"{ticket.name}/{sender}", store)
            with _errors_are_ours():
                self._groups[sender] = dist.ProcessGroupNCCL(path, rank, 2, _NEVER)
            (self.send if rank == sender else self.receive)(hello)()

    def watch(self, channel: Channel) -> None:
        self._ended = channel.ended

    def send(self, block: np.ndarray) -> Callable[[], None]:
        with torch.cuda.stream(self._copies[0]):
            data = torch.from_numpy(block).to(self._device)
            work = self._groups[1 - self._peer].send([data], self._peer, 0)
        done = self._done(work, self._waits[0])
        return lambda: self._finish(done, data)

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        def receive_now() -> None:
            into = torch.from_numpy(block)
            with torch.cuda.stream(self._copies[1]):
                data = torch.empty_like(into, device=self._device)
                work = self._groups[self._peer].recv([data], self._peer, 0)
                self._finish(self._done(work, self._waits[1]), data)
                into.copy_(data)

        return receive_now

    @staticmethod
    def _done(work: Any, waits: torch.cuda.Stream) -> torch.cuda.Event:
        """Return what tells when the GPU is done: the work would be done with an error, too."""
        with torch.cuda.stream(waits):
            work.wait()
            return waits.record_event()

    def _finish(self, done: torch.cuda.Event, data: torch.Tensor) -> None:
        """Wait until a transfer is done; its data is kept that long."""
        wait_until(done.query, self._patience, self._ended)

    def close(self) -> None:
        """Let go of the other side, whatever is under way.

        All groups at once: to end one frees memory, which waits for what the other has under way.
        Threads have the last references: to forget a group whose other side died takes a minute.
        """
        groups, self._groups = list(self._groups.values()), {}
        ends = [Helper(groups.pop().abort, "swath abort") for _ in range(len(groups))]
        for end in ends:
            end.start()
        for end in ends:
            end.join(_ENDING)


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """Make groups of NCCL whose errors do not end the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class TorchrunBoard:
    """Rank 0 posts texts, all others read them, one after the other, in the store of torchrun."""

    def __init__(self, rank: int) -> None:
        environ = os.environ
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            None,
            rank == 0 and not agent,
            wait_for_workers=False,
            multi_tenant=True,
        )
        # The same store serves the ranks that torchrun starts after a failure.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store, self._keys = dist.PrefixStore(f"swath/{attempt}", store), map(str, count())

    def post(self, text: str) -> None:
        """Post the next text."""
        self._store.set(next(self._keys), text)

    def lacks(self, rank: int) -> bool:
        """Return False: torchrun ends all ranks together."""
        return False

    def read(self) -> str:
        """Wait for the next text and return it; raises if the store is gone."""
        key = next(self._keys)
        while not self._store.check([key]):
            sleep(_READING)
        return self._store.get(key).decode()

    def part(self) -> None:
        """Nothing: nobody waits for the others here."""
