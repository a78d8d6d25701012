"""Both ends of every kind of link, for the contract that all of them keep; workers import this.

With MPI the other end is a rank, started with this process by `mpirun`: see `contract_ranks.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

import numpy as np
import pytest
import torch

from swath.links import ProcessLink, ProcessPort, launch, pack, unpack
from swath.links.gate import Gate, dial, new_secret
from swath.links.mpi import MpiBoard, MpiMedium, load_mpi
from swath.links.remote import RemoteLink, RemotePort
from swath.memory import SharedMemory

PATIENCE = 120.0  # longer than any test may take: what waits for it fails
SIZE = 1_000_000
IN_MPI = "OMPI_COMM_WORLD_RANK" in os.environ
NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
KINDS = ["mpi"] if IN_MPI else ["process", "gloo", "rpc", NCCL]


class Held:
    """Memory that blocks come into; counts how often."""

    def __init__(self) -> None:
        self.memory = SharedMemory(SIZE)
        self.block = self.memory.array
        self.times = 0

    def arrived(self) -> None:
        self.times += 1


class Pair:
    """Your end of a link whose other end runs a function, in a process."""

    def __init__(self, kind: str, function) -> None:
        self._closes = contextlib.ExitStack()
        self.held: list[Held] = []
        self.link = getattr(self, f"_{kind}")(pack(function, "it"))

    def _process(self, function):
        return ProcessLink(run_process, function)

    def _gloo(self, function):
        from swath.links.torch_distributed import TorchMedium

        name = new_secret().hex()
        return self._launched(function, TorchMedium("gloo", "127.0.0.1", name, PATIENCE))

    def _nccl(self, function):
        from swath.links.torch_distributed import TorchMedium

        os.environ["NCCL_HOSTID"] = "trainer"  # ranks of one host may not share a GPU
        name = new_secret().hex()
        return self._launched(function, TorchMedium("nccl", "127.0.0.1", name, PATIENCE))

    def _rpc(self, function):
        from swath.links.rpc import RpcMedium

        return self._launched(function, RpcMedium("127.0.0.1", PATIENCE, [None], None))

    def _launched(self, function, medium):
        gate, payload = self._gate(function, 0)
        return self._joined(gate, 0, medium, launch(run_remote, payload))

    def _mpi(self, function):
        """Take the first rank that lives."""
        pids, board = ranks()
        while True:
            self.rank = min(pids)
            gate, payload = self._gate(function, self.rank - 1)
            board.post(f"{self.rank} {payload.hex()}")
            try:
                return self._joined(gate, self.rank - 1, MpiMedium(PATIENCE, in_mpi=True))
            except ProcessLookupError:  # it was killed
                del pids[self.rank]

    def _gate(self, function, number):
        secret = new_secret()
        gate = Gate("127.0.0.1", 0, secret, PATIENCE)
        self._closes.callback(gate.close)
        return gate, pack((gate.port, secret, number, function), "it")

    def _joined(self, gate, number, medium, process=None):
        self._closes.callback(medium.close)
        lives = functools.partial(os.kill, process.pid if process else ranks()[0][number + 1], 0)
        arrival = gate.fetch(number, time.monotonic() + PATIENCE, lives)
        assert arrival is not None, "it does not come"
        ticket = medium.ticket(number)
        arrival.channel.send(ticket)
        bulk = medium.connect(ticket, arrival.own_host)
        link = RemoteLink(arrival.channel, bulk, "it", arrival.hello.pid, "here", process)
        assert link.receive() == "joined"  # as every worker tells before anything else
        return link

    def then(self) -> str:
        """Tell what the rank does next: it comes to the next pair ("free"), or it has died."""
        with Pair("mpi", echo) as pair:
            return "free" if pair.rank == self.rank else "dead"

    def give_memory(self) -> None:
        """Let the worker have memory; what it writes there comes here with its message."""
        held = Held()
        self.held.append(held)
        given = held.memory if self.link.shares_memory else SIZE
        self.link.send("memory", [given])

    def ask(self, message, number: int) -> None:
        """Send a message whose answer brings the memory of this number."""
        more = () if self.link.shares_memory else ((), self.held[number])
        self.link.send(message, *more)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.kill()
        self.link.close(5.0)
        for held in self.held:
            held.memory.close_descriptor()
        self._closes.close()


def run_process(channel, payload):
    unpack(payload)(ProcessPort(channel))


def run_remote(channel, payload):
    port, secret, number, function = unpack(payload)
    channel, own_host = dial("127.0.0.1", port, secret, number, PATIENCE)
    os.environ["NCCL_HOSTID"] = "worker"
    ticket, _ = channel.receive()
    port = RemotePort(channel, ticket.connect(own_host))
    port.send("joined")
    try:
        unpack(function)(port)
    finally:
        port.close()


# -- ranks of MPI ---------------------------------------------------------------------------------


@functools.cache
def ranks():
    """In rank 0: return the pids of the others that were not found dead, and how to call them."""
    told = enumerate(load_mpi().COMM_WORLD.gather(os.getpid()))
    return {rank: pid for rank, pid in told if rank}, MpiBoard()


def serve_pairs():
    """In each other rank: be the other end of one pair after the other."""
    world, board = load_mpi().COMM_WORLD, MpiBoard()
    while (text := board.read()) != "end":
        rank, payload = text.split()
        if int(rank) == world.rank:
            with contextlib.suppress(EOFError, OSError):  # it has let go of us
                run_remote(None, bytes.fromhex(payload))


# -- what workers do ------------------------------------------------------------------------------


def echo(port):
    """Send back what comes, until `stop`."""
    while (message := port.receive()[0]) != "stop":
        port.send(message)


def talk(port):
    """Send so many numbered messages for each one that comes."""
    while True:
        message, _ = port.receive()
        for number in range(message):
            port.send(number)


def fill(port):
    """Fill memory with numbers and send it, one block per message, in turn."""
    memories = []
    while True:
        message, memory = port.receive()
        if message == "memory":
            memories += memory
            continue
        number, value = message
        memories[number].array[:] = value
        port.send(("filled", value), memories[number])


def fill_half_and_die(port):
    """Announce a block and die before it has left."""
    _, (memory,) = port.receive()
    how, _ = port.receive()
    memory.array[:] = 1
    if not port.shares_memory:
        port._channel.send(("filled", True))
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(5)


def work(port):
    """Work until interrupted, then tell so; once for each message."""
    while True:
        message, _ = port.receive()
        port.send("began")
        while not port.interrupted():
            time.sleep(0.001)
        port.send(("interrupted", message))


def take(port):
    """Take pushed blocks: each must be whole; tell how many had come at each message."""
    seen = []

    def on_push(message, block):
        assert block.min() == block.max(), "half of a block"
        seen.append((message, int(block[0])))

    port.on_push = on_push
    while True:
        port.receive()
        port.send(list(seen))


def ignore(port):
    """Read nothing and do nothing, whatever comes."""
    time.sleep(3600)


def block_of(value: int) -> np.ndarray:
    return np.full(SIZE, value % 251, np.uint8)
