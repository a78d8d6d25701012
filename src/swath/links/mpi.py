"""Blocks over MPI, between ranks that `mpirun` has started.

```
 your process, rank 0          the worker with number n, rank n + 1
   Irecv, Isend  <=========>   Isend, Irecv          one tag for each collector, so that what one
                                                     left behind never reaches the next
```

MPI moves most data only while it is called, and spins when it is asked to wait. So requests are
tested between short sleeps: by whoever waits, and by a thread that lives as long as something is
under way, for the other side may wait for us while we train or step envs. One lock keeps the two
apart. A block belongs to MPI until its request is done; what is given up is cancelled, or kept for
ever if it cannot be.

Open MPI ends all ranks when one dies. With `--with-ft ulfm` the others go on, and their requests
fail, unless the one that died ended itself with an exit code other than 0: of that MPI tells
nobody, and waits for it for ever in the end. So who waits looks at the channel too, a worker that
has to end itself does so with 0, and rank 0 aborts the job if one does not say that it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np

from swath.errors import UsageError
from swath.links import remote
from swath.links.channel import Channel
from swath.links.remote import Bulk, wait_until

__all__ = ["MpiBoard", "MpiMedium", "MpiTicket", "load_mpi"]

_log = logging.getLogger("swath")
_SENDING, _RECEIVING, _READING = 5e-4, 2e-3, 2e-2
"""Seconds between two tests: in the thread, if there is something to send, or only to receive; for
who reads the board."""
_NEWS, _TAGS = 0, 1 << 14
_REPLIES = _TAGS + 1
_GRACE = 5.0
"""Seconds that ranks have to say that they end."""
_collectors = count()


def load_mpi() -> Any:
    """Return mpi4py's module, which joins the ranks when it is imported first."""
    ours = "mpi4py.MPI" not in sys.modules
    try:
        if ours:
            import mpi4py

            mpi4py.rc.finalize = False  # but by `_finalize`
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py cannot be imported ({error}). pip install 'swath[mpi]' installs it "
            "together with Open MPI."
        ) from error
    if ours:
        atexit.register(_finalize, MPI)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UsageError("this MPI cannot be called from several threads (MPI_THREAD_SERIALIZED).")
    return MPI


def _finalize(mpi: Any) -> None:
    if not _died and not mpi.Is_finalized():
        mpi.Finalize()


@dataclass(frozen=True)
class MpiTicket:
    """What a worker needs to be the other end."""

    number: int
    tag: int
    patience: float

    def connect(self, own_host: str) -> Bulk:
        """Return the worker's end."""
        return _MpiBulk(0, self.tag, self.patience)


class MpiMedium:
    """Connects rank 0 with each other rank.

    Args:
        patience: Seconds after which a transfer that does not go on is given up.
        in_mpi: This process is rank 0 of such ranks, and they are the workers.
    """

    def __init__(self, patience: float, in_mpi: bool) -> None:
        if not in_mpi:
            raise UsageError(
                "backend='mpi' needs the ranks of an MPI program as workers: start the script with "
                "`mpirun -n N python ...` and give no launcher."
            )
        load_mpi()
        self._tag, self._patience = 1 + next(_collectors) % _TAGS, patience

    def ticket(self, number: int) -> MpiTicket:
        """Return what a worker needs."""
        return MpiTicket(number, self._tag, self._patience)

    def connect(self, ticket: MpiTicket, own_host: str) -> Bulk:
        """Return this end for one worker."""
        return _MpiBulk(ticket.number + 1, ticket.tag, ticket.patience)

    def close(self) -> None:
        """Nothing: MPI ends with the process."""


class _MpiBulk:
    def __init__(self, peer: int, tag: int, patience: float) -> None:
        self._comm = load_mpi().COMM_WORLD
        self._where, self._patience = (peer, tag), patience
        self._ended: Callable[[], bool] = lambda: False

    def watch(self, channel: Channel) -> None:
        self._ended = channel.ended

    def send(self, block: np.ndarray) -> Callable[[], None]:
        return self._begin(self._comm.Isend, block, _SENDING)

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        return self._begin(self._comm.Irecv, block, _RECEIVING)

    def _begin(self, what: Any, block: np.ndarray, pause: float) -> Callable[[], None]:
        with _turn:
            transfer = _Transfer(self, what(block, *self._where), block, pause)
            _watch(transfer)
        return lambda: transfer.wait(self._patience, self._ended)

    def close(self) -> None:
        """Give up what is under way."""
        with _turn:
            for one in [one for one in _under_way if one.bulk is self]:
                if not one.test() and one.pause == _RECEIVING:
                    one.request.Cancel()
                if not one.test():
                    _kept.append(one)
                _under_way.remove(one)


@dataclass(eq=False)
class _Transfer:
    """A block under way."""

    bulk: _MpiBulk
    request: Any
    block: np.ndarray
    pause: float
    done: bool = False
    error: str = ""

    def test(self) -> bool:
        """Let MPI work; tell whether the request is done. To be called under the lock."""
        if not self.done:
            try:
                self.done = self.request.Test()
            except Exception as error:  # the other rank is gone
                self.done, self.error = True, str(error)
        return self.done

    def _test_in_turn(self) -> bool:
        with _turn:
            return self.test()

    def wait(self, patience: float, ended: Callable[[], bool]) -> None:
        """Return when the block is there, or gone."""
        wait_until(self._test_in_turn, patience, ended)
        if self.error:
            raise ConnectionError(self.error)


_died: list[int] = []
"""Ranks that were found dead in the end."""
_turn = threading.Lock()
_under_way: list[_Transfer] = []
_kept: list[_Transfer] = []


def _watch(transfer: _Transfer) -> None:
    """Let the thread test it too, under the lock."""
    if not transfer.test():
        _under_way.append(transfer)
        if len(_under_way) == 1:
            threading.Thread(target=_work, name="swath mpi", daemon=True).start()


def _work() -> None:
    while True:
        with _turn:
            _under_way[:] = [one for one in _under_way if not one.test()]
            if not _under_way:
                return
            pause = min(one.pause for one in _under_way)
        sleep(pause)


class MpiBoard:
    """Rank 0 posts texts, all others read them, one after the other."""

    def __init__(self) -> None:
        mpi = load_mpi()
        self._comm, self._gone = mpi.COMM_WORLD, mpi.Exception
        self._posted: list[Any] = []
        self._replies: dict[int, list[_Process]] = {}
        remote.exit_code = 0  # now that this process is a rank

    def post(self, text: str) -> None:
        """Post the next text, and wait for nobody: a rank may be stuck, or gone."""
        with _turn:
            for rank in range(1, self._comm.size):
                with contextlib.suppress(self._gone):
                    self._posted.append(self._comm.isend(text, rank, _NEWS))
            self._posted = [one for one in self._posted if not self._left(one)]

    def _left(self, request: Any) -> bool:
        try:
            return request.Test()
        except self._gone:
            return True

    def lacks(self, rank: int) -> bool:
        """Tell whether a rank is known to be gone."""
        with _turn:
            try:
                self._comm.iprobe(rank, _NEWS)
            except self._gone:
                return True
        return False

    def read(self) -> str:
        """Wait for the next text and return it; raises if rank 0 is gone."""
        if not self._posted:
            self._reply()
        return self._next(_NEWS)

    def _next(self, tag: int) -> Any:
        while True:
            with _turn:
                if self._comm.iprobe(0, tag):
                    return self._comm.recv(None, 0, tag)
            sleep(_READING)

    def _reply(self) -> None:
        with _turn:
            self._posted.append(self._comm.isend(_Process.own(), 0, _REPLIES))

    def part(self) -> None:
        """End together; in rank 0, end the job if a rank that has begun to read does not end.

        MPI would wait for ever for one that is stuck, or that has left with an exit code; and now
        and then, in Open MPI 5, for one that was killed: so it is left without MPI_Finalize then.
        """
        try:
            if self._comm.rank:
                self._reply()
                _died.extend(self._next(_REPLIES))
            else:
                self._part_from_all()
        except self._gone:
            _died.append(0)

    def _part_from_all(self) -> None:
        ranks = range(1, self._comm.size)
        until, missing = monotonic() + _GRACE, list(ranks)
        while missing := [rank for rank in missing if self._awaits(rank)]:
            if monotonic() > until:
                _log.error("ranks %s did not end, so this job is aborted", missing)
                for rank in missing:
                    self._replies[rank][0].kill()
                self._comm.Abort(1)
            sleep(_READING)
        _died.extend(rank for rank in ranks if self.lacks(rank))
        with _turn:
            for rank in ranks:  # to those too that begin to read only now
                with contextlib.suppress(self._gone):
                    self._posted.append(self._comm.isend(_died, rank, _REPLIES))

    def _awaits(self, rank: int) -> bool:
        """Tell whether a rank has begun to read and not said yet that it ends."""
        replies = self._replies.setdefault(rank, [])
        with _turn:
            try:
                while self._comm.iprobe(rank, _REPLIES):
                    replies.append(self._comm.recv(None, rank, _REPLIES))
            except self._gone:
                return False
        return len(replies) == 1


class _Process(NamedTuple):
    """A process of this host, with the time of its start: numbers are used again."""

    host: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> _Process:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    def kill(self) -> None:
        """Kill it, if it is here and alive: with fault tolerance, mpirun does not."""
        if self.host == socket.gethostname() and self.start and self.start == _start_of(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _start_of(pid: int) -> str:
    """Return when a process was started, in ticks; nothing, if that cannot be known."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
