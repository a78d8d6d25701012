"""A world of ranks that exists already: this process was started by `torchrun` or `mpirun`.

Rank 0 trains; the others become workers as soon as the script makes its collector, and end with
rank 0. So the same script is run by all ranks, and it needs no launcher.

```
 rank 0                                            rank 1, 2, ...
   collector: posts an invitation  --- board --->   read, join as worker rank - 1, read again ...
   end of the script: posts the end  ---------->    exit
```

The board is the store of torchrun, or messages of MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import NoReturn, Protocol

from swath.errors import UsageError, WorkerError
from swath.links.launch import in_worker
from swath.shield import Shield
from swath.workers.remote import Invitation, Started, join

__all__ = ["World", "WorldLauncher", "find_world"]

_log = logging.getLogger("swath")
_END = "end"
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


class Board(Protocol):
    """What rank 0 posts, the others read, one after the other."""

    def post(self, text: str) -> None:
        """Post the next text."""
        ...

    def lacks(self, rank: int) -> bool:
        """Tell whether a rank is known to be gone."""
        ...

    def read(self) -> str:
        """Wait for the next text and return it; raises if rank 0 is gone."""
        ...

    def part(self) -> None:
        """End; in rank 0, with all others."""
        ...


class World:
    """The ranks that were started together.

    Args:
        rank: Of this process.
        size: How many there are.
        board: Connects them.
        host: The address of rank 0, if ranks are on several machines.
        is_mpi: They can talk by MPI.
    """

    def __init__(
        self, rank: int, size: int, board: Board, host: str | None, is_mpi: bool = False
    ) -> None:
        self.rank, self.size, self.host, self.is_mpi = rank, size, host, is_mpi
        self.busy = False
        self._board = board
        if rank == 0:
            atexit.register(self._end)

    def announce(self, invitation: Invitation, count: int) -> None:
        """In rank 0: tell so many others where to come."""
        told = {**asdict(invitation), "secret": invitation.secret.hex(), "count": count}
        self._board.post(json.dumps(told))

    def check(self, rank: int) -> None:
        """In rank 0: raise if a rank has died."""
        if self._board.lacks(rank):
            raise WorkerError(
                f"rank {rank} has died, and ranks cannot be started again: restart all of them.",
                worker=rank - 1,
            )

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # somebody is gone already
            self._board.post(_END)
            self._board.part()

    def serve(self) -> NoReturn:
        """In all other ranks: be a worker of each collector of rank 0, and exit with rank 0."""
        while (text := self._read()) != _END:
            told = json.loads(text)
            if self.rank > told.pop("count"):
                continue
            told["secret"] = bytes.fromhex(told["secret"])
            try:
                join(Invitation(**told), self.rank - 1, is_open=True)
            except (ConnectionError, EOFError) as error:  # it has given up before we came
                _log.warning("rank %d could not connect: %s", self.rank, error)
        with contextlib.suppress(Exception):  # rank 0 is gone
            self._board.part()
        raise SystemExit(0)

    def _read(self) -> str:
        try:
            return self._board.read()
        except Exception as error:
            _log.warning("rank %d ends, since rank 0 is gone: %s", self.rank, error)
            return _END


class WorldLauncher:
    """Ranks of the world whose rank 0 this process is; they are there and wait."""

    def __init__(self, world: World) -> None:
        self._world, self._mine = world, False

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Invite the ranks."""
        world = self._world
        if len(numbers) >= world.size:
            raise UsageError(
                f"{len(numbers)} workers need {len(numbers) + 1} ranks, but {world.size} were "
                "started: start more ranks, or pass fewer env makers."
            )
        if world.busy:
            raise UsageError(
                "the ranks already work for another collector: shut it down first, or give "
                "launcher='mp'."
            )
        ranks = {number: _Rank(world, number + 1) for number in numbers}
        for rank in ranks.values():  # before any of them comes in vain
            rank.check()
        self._mine = world.busy = True
        world.announce(invitation, len(numbers))
        return ranks

    def close(self) -> None:
        """Let the ranks work for another collector."""
        if self._mine:
            self._mine = self._world.busy = False


class _Rank:
    """A rank is not ours to end; whoever started the ranks watches over them."""

    process = None

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def check(self) -> None:
        self._world.check(self._rank)

    def cancel(self) -> None:
        pass


def find_world() -> World | None:
    """Return the world that this process was started in, if there is one."""
    return None if in_worker() else _find()


@cache
def _find() -> World | None:
    environ = os.environ
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        from swath.links.torch_distributed import TorchrunBoard

        rank, size, spread = _ranks(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        host = socket.gethostbyname(environ["MASTER_ADDR"]) if spread else None
        return World(rank, size, TorchrunBoard(rank), host) if size > 1 else None
    for names in _MPI:
        if names[0] in environ and names[1] in environ:
            from swath.links.mpi import MpiBoard

            rank, size, spread = _ranks(names)
            host = socket.gethostbyname(socket.gethostname()) if spread else None
            return World(rank, size, MpiBoard(), host, is_mpi=True) if size > 1 else None
    return None


def _ranks(names: tuple[str, str, str]) -> tuple[int, int, bool]:
    """Return the rank of this process, how many there are, and whether on several machines."""
    rank, size = (int(os.environ[name]) for name in names[:2])
    return rank, size, int(os.environ.get(names[2], size)) < size
