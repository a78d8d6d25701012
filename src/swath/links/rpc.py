"""Blocks over `torch.distributed.rpc`: TensorPipe moves them.

```
 your process                                                     worker
   receive: asks at once  ---- fetch(n) ----------------------->  answered when block n is sent
            <======================= block n as the answer =====  send
   send     ======== take(n, block) ============================> receive
```

Your process begins both kinds of call, so the death of a worker ends its calls at once. A worker
that waits looks after your process once a second. The calls may overtake each other; the numbers
put blocks in order.

Each process has one agent. It joins a group that grows as workers come, since a group of a fixed
size would wait half an hour for a worker that died on its way in. Nobody leaves the group and
nobody can come back to it. Order of shutdown: the agent ends with the last bulk, without a word to
the others, some of which may be dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as _rpc

from swath.compat.torch import has_rpc_agent, restart_rpc_names
from swath.errors import UsageError
from swath.links.channel import Channel
from swath.links.remote import Bulk
from swath.links.torch_distributed import store_on

rpc: Any = _rpc  # most of what is used here has no types

__all__ = ["RpcMedium", "RpcTicket"]

_TRAINER = "trainer"
_LOOK = 1.0
"""Seconds after which a worker that waits for a block asks whether your process lives."""
_INTERFACE = "TP_SOCKET_IFNAME"


@dataclass(frozen=True)
class RpcTicket:
    """What a worker needs to join the group."""

    host: str
    port: int
    number: int
    patience: float
    options: Mapping[str, Any]

    def connect(self, own_host: str) -> Bulk:
        """Return the worker's end."""
        _leaving.clear()
        _arrived.clear()
        _join(self, f"worker{self.number}", own_host)
        return _WorkerBulk(self.patience)


class RpcMedium:
    """The group that workers join.

    Args:
        host: The address that workers dial.
        patience: Seconds after which a transfer that does not go on is given up.
        devices: A CUDA device for each worker, or several, or None.
        options: Arguments of `TensorPipeRpcBackendOptions`, if any.
    """

    def __init__(
        self,
        host: str,
        patience: float,
        devices: Sequence[Any],
        options: Mapping[str, Any] | None,
    ) -> None:
        if has_rpc_agent():
            raise UsageError(
                "this process already takes part in a torch.distributed.rpc group, and can "
                "only be in one: shut the other collector (or rpc) down first, or give "
                "backend='gloo'."
            )
        self._store, port = store_on(host, patience)
        self._devices, self._open, self._closed = devices, 0, False
        self._base = RpcTicket(host, port, -1, patience, dict(options or {}))
        _join(self._base, _TRAINER, host)

    def ticket(self, number: int) -> RpcTicket:
        """Return what a worker needs."""
        options, own = dict(self._base.options), self._devices[number]
        if own is not None:
            options["devices"] = list(own) if isinstance(own, (list, tuple)) else [own]
        return replace(self._base, number=number, options=options)

    def connect(self, ticket: RpcTicket, own_host: str) -> Bulk:
        """Return this end for one worker; it joins while we go on."""
        self._open += 1
        return _TrainerBulk(f"worker{ticket.number}", ticket.patience, self._left)

    def _left(self) -> None:
        self._open -= 1
        self._end()

    def close(self) -> None:
        """Let nobody join any more, and end with the last bulk."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._closed and not self._open and self._store is not None:
            self._store = None
            _leave()


class _TrainerBulk:
    def __init__(self, peer: str, patience: float, on_close: Callable[[], None]) -> None:
        self._peer, self._patience, self._on_close = peer, patience, on_close
        self._sent, self._received = count(), count()

    def send(self, block: np.ndarray) -> Callable[[], None]:
        return self._call(_take, next(self._sent), torch.from_numpy(block))

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        wait = self._call(_fetch, next(self._received))
        return lambda: np.copyto(block, wait().numpy())

    def _call(self, what: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        future = rpc.rpc_async(self._peer, what, args=args, timeout=0)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())

        def wait() -> Any:
            if not done.wait(self._patience):
                raise TimeoutError(f"a transfer made no progress for {self._patience:g} s")
            return future.value()

        return wait

    def watch(self, channel: Channel) -> None:
        """Nothing: the agent notices."""

    def close(self) -> None:
        on_close, self._on_close = self._on_close, lambda: None
        on_close()


# The blocks of this worker, by number: those that leave, and those that came.
_leaving: dict[int, Any] = defaultdict(torch.futures.Future)
_arrived: dict[int, torch.Tensor] = {}
_change = threading.Condition()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _fetch(number: int) -> Any:
    with _change:
        return _leaving[number]


def _take(number: int, block: torch.Tensor) -> None:
    with _change:
        _arrived[number] = block
        _change.notify_all()


class _WorkerBulk:
    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._sent, self._received = count(), count()

    def send(self, block: np.ndarray) -> Callable[[], None]:
        """Answer a call that has come, or will.

        There is nothing to wait for: the memory is written again when the next but one rollout is
        ordered, which your process does after it has this one.
        """
        number = next(self._sent)
        with _change:
            future = _leaving[number]
            _leaving.pop(number - 2, None)
        future.set_result(torch.from_numpy(block))
        return lambda: None

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        number = next(self._received)

        def wait() -> None:
            with _change:
                while number not in _arrived:
                    if not _change.wait(_LOOK):
                        rpc.rpc_sync(_TRAINER, os.getpid, timeout=self._patience)
                np.copyto(block, _arrived.pop(number).numpy())

        return wait

    def watch(self, channel: Channel) -> None:
        """Nothing: the agent notices."""

    def close(self) -> None:
        _leave()


# -- joining ------------------------------------------------------------------------------------


def _join(ticket: RpcTicket, name: str, own_host: str) -> None:
    """Start the agent of this process, at one address."""
    host = f"[{ticket.host}]" if ":" in ticket.host else ticket.host
    where = f"tcp://{host}:{ticket.port}"  # in your process this is the store that is there
    # TensorPipe's other transport, shared memory, polls all the time, also when all are idle.
    defaults = {"rpc_timeout": ticket.patience, "_transports": ["uv"]}
    given = {**defaults, **ticket.options, "init_method": where}
    try:
        options = rpc.TensorPipeRpcBackendOptions(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"tensorpipe_options are not accepted: {error}") from error
    restart_rpc_names()  # keys in the store begin with a count, which all must have in common
    before = os.environ.get(_INTERFACE)
    interface = _interface_of(own_host)
    if before is None and interface is not None:
        os.environ[_INTERFACE] = interface
    _quiet(True)
    try:
        rpc.init_rpc(name, rank=ticket.number + 1, rpc_backend_options=options)
    finally:
        if before is None:
            os.environ.pop(_INTERFACE, None)


def _leave() -> None:
    rpc.shutdown(graceful=False)
    _quiet(False)


def _quiet(on: bool) -> None:
    """Hide that torch warns of each connection that ends, also when all is well."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    with contextlib.suppress(OSError, ValueError):  # elsewhere it is in another place
        level = ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
        if on:
            _levels.append(level.value)
            level.value = max(level.value, 2)  # errors
        elif _levels:
            level.value = _levels.pop()


_levels: list[int] = []


def _interface_of(host: str) -> str | None:
    """Return the network interface that has an address, if it can be told."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(told[20:24]) == host:
                return name
    return None
