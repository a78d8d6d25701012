"""The door through which workers on other machines come in.

```
 worker                          gate (a thread of your process)
   | ------ connects ------------> |
   | <----- nonce ---------------- |
   | --- proof, own nonce -------> |   a wrong proof, or none in time: refused, logged, closed
   | <----- proof ---------------- |
   | --- who I am ---------------> |   the first thing that is unpickled, on either side
```

Both sides prove that they know the secret of the run, so neither unpickles a byte of a stranger.
The gate owns the listening socket and whoever has come in but was not fetched yet; each greeting
has a thread of its own, so a stranger who says nothing holds nobody up.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

from swath.errors import UsageError
from swath.links.channel import Channel

__all__ = ["Arrival", "Gate", "Hello", "dial", "guess_host"]

_log = logging.getLogger("swath")
_SIZE = 32
_RETRY = 0.2


@dataclass(frozen=True)
class Hello:
    """Who comes in."""

    number: int
    host: str
    pid: int


@dataclass(frozen=True)
class Arrival:
    """Somebody who came in, and under which addresses the two see each other."""

    hello: Hello
    channel: Channel
    own_host: str


class Gate:
    """Listens until it is closed.

    Args:
        host: The address to listen on.
        port: The port; 0 for any that is free.
        secret: What workers must know.
        patience: Seconds that a newcomer has for its greeting, and after which a connection that
            does not answer is given up.
    """

    def __init__(self, host: str, port: int, secret: bytes, patience: float) -> None:
        self._secret, self._patience = secret, patience
        try:
            self._socket = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port}: {error.strerror}. Leave tcp_port out for a "
                "free one, or give another host."
            ) from error
        self.host, self.port = host, self._socket.getsockname()[1]
        self._came: dict[int, Arrival] = {}
        self._change = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="swath gate", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, (host, *_) = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(end, host), daemon=True).start()

    def _greet(self, end: socket.socket, host: str) -> None:
        try:
            end.settimeout(self._patience)
            nonce = os.urandom(_SIZE)
            end.sendall(nonce)
            answer = _exactly(end, 2 * _SIZE)
            if not hmac.compare_digest(answer[:_SIZE], _proof(self._secret, b"worker", nonce)):
                raise PermissionError("it does not know the secret")
            end.sendall(_proof(self._secret, b"trainer", answer[_SIZE:]))
            channel = _channel(end, self._patience)
            hello, _ = channel.receive()
            self._enter(Arrival(hello, channel, end.getsockname()[0]))
        except (OSError, EOFError) as error:
            _log.warning("refused a connection from %s: %s", host, error)
            end.close()

    def _enter(self, arrival: Arrival) -> None:
        with self._change:
            earlier = self._came.pop(arrival.hello.number, None)
            if self._closed:
                arrival.channel.close()
            else:
                self._came[arrival.hello.number] = arrival
            self._change.notify_all()
        if earlier is not None:
            earlier.channel.close()

    def fetch(self, number: int, until: float, check: Callable[[], None]) -> Arrival | None:
        """Wait for a worker until a point of the monotonic clock; None if it does not come.

        Args:
            number: Which worker.
            until: When to give up.
            check: Called now and then; raises if waiting makes no sense any more.
        """
        with self._change:
            while number not in self._came:
                check()
                if self._closed or monotonic() >= until:
                    return None
                self._change.wait(min(0.2, max(0.0, until - monotonic())))
            return self._came.pop(number)

    def close(self) -> None:
        """Let nobody in any more."""
        with self._change:
            self._closed = True
            came, self._came = self._came, {}
            self._change.notify_all()
        for arrival in came.values():
            arrival.channel.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()


def dial(
    host: str, port: int, secret: bytes, number: int, patience: float, is_open: bool = False
) -> tuple[Channel, str]:
    """Go through a gate; return the channel, and the address that this host is seen under.

    A gate that is not there yet is tried again for `patience` seconds. One that was open when its
    address was told, and refuses, is closed again.
    """
    until = monotonic() + patience
    while True:
        try:
            end = socket.create_connection((host, port), timeout=patience)
            break
        except OSError as error:
            closed = is_open and isinstance(error, ConnectionRefusedError)
            if closed or monotonic() >= until:
                raise ConnectionError(f"nobody listens on {host} port {port}: {error}") from error
            sleep(_RETRY)
    nonce = _exactly(end, _SIZE)
    own = os.urandom(_SIZE)
    end.sendall(_proof(secret, b"worker", nonce) + own)
    try:
        proof = _exactly(end, _SIZE)
    except (EOFError, ConnectionResetError):
        proof = b""
    if not hmac.compare_digest(proof, _proof(secret, b"trainer", own)):
        end.close()
        raise PermissionError(f"{host} port {port} refused us, or has another secret")
    channel = _channel(end, patience)
    channel.send(Hello(number, socket.gethostname(), os.getpid()))
    return channel, end.getsockname()[0]


def new_secret() -> bytes:
    """Return a secret nobody can guess."""
    return secrets.token_bytes(_SIZE)


def guess_host(slurm: bool = False) -> str:
    """Return the address of this machine that the nodes of its Slurm can dial.

    That is the one which this machine has towards Slurm's controller. Loopback where this process
    is in no job of Slurm and will not start any.
    """
    if not slurm and "SLURM_JOB_ID" not in os.environ:
        return "127.0.0.1"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "config"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        found = re.search(r"^SlurmctldHost\[0\] *= *([^(\s]+)(?:\((.+)\))?", told, re.MULTILINE)
        if found is not None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((found[2] or found[1], 9))  # sends nothing
                return probe.getsockname()[0]
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            return socket.gethostbyname(name)
    return "127.0.0.1"


def _proof(secret: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + nonce, hashlib.sha256)


def _exactly(end: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = end.recv(count - len(got))
        if not more:
            raise EOFError("it closed the connection before it had proved who it is")
        got += more
    return got


def _channel(end: socket.socket, patience: float) -> Channel:
    """Return a channel that ends by itself if the other host is cut off for too long."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(patience))
    each = max(1, seconds // 4)
    for name, value in (
        ("TCP_KEEPIDLE", each),
        ("TCP_KEEPINTVL", each),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(end)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
