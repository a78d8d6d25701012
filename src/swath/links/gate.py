"""TCP listener that authenticates workers of other machines before anything is unpickled.

```
 worker                          gate (one thread of your process)
   | ------ connects ------------> |
   | <----- handshake -----------> |   links/handshake.py; not in time: refused, logged, closed
   | <----- TLS -----------------> |   links/sealed.py, on Python 3.13 and newer
   | ====== channel =============> |   an arrival, until it is fetched
```

The gate owns the listening socket, newcomers, and whoever has come in but was not fetched yet.
One thread hears them all and never waits for one of them, so strangers cost a bounded number of
descriptors, no thread and some bytes, whatever they do: of more than it has room for, those are
dropped first that came first and have proved nothing. It ends when the gate is closed and for no
other reason: nobody could replace a worker any more.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from swath.errors import UsageError
from swath.links.bell import Bell
from swath.links.channel import Channel
from swath.links.handshake import BUSY, SIZE, Hello, UnlikeError, admission, proof, worker_proof
from swath.links.limits import in_words
from swath.system import why_no_tls

if TYPE_CHECKING:
    from swath.links.sealed import Sealed

__all__ = ["Arrival", "Gate", "Note", "dial", "guess_host", "new_secret"]

_Seal = Callable[[Any, bytes, bool], "Sealed"]
_log = logging.getLogger("swath")
_MOST = 64
"""Newcomers at once; fewer, if this process may have few descriptors."""
_REST = 0.01
"""Seconds that newcomers are left in peace after one of them was dropped."""
_RETRY = 0.2
"""Seconds until something is tried again that there was no room for."""
_TELL_EVERY = 5.0
"""Seconds between two lines of the log about newcomers for whom there was no room."""


@dataclass(frozen=True)
class Arrival:
    """Somebody who came in, and under which addresses the two see each other."""

    hello: Hello
    channel: Channel
    own_host: str


@dataclass(frozen=True)
class Note:
    """What a worker hears that has come in and is not wanted, or not yet."""

    text: str
    refused: bool


class Gate:
    """Listens until it is closed.

    Args:
        host: The address to listen on.
        port: The port; 0 for any that is free.
        secret: What workers must know.
        patience: Seconds that a newcomer has for all of its handshake, and after which a
            connection that does not answer is given up.
        workers: How many there are, numbered from 0; None if nobody knows.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, patience: float, workers: int | None = None
    ) -> None:
        self._workers = workers
        self._fetched: set[int] = set()
        self._secret, self._patience = secret, patience
        try:
            with in_words(f"cannot listen on {host} port {port}"):
                self._socket = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port}: {error.strerror}. Leave tcp_port out for a "
                "free one, or give another host."
            ) from error
        self._socket.setblocking(False)
        self.host, self.port = host, self._socket.getsockname()[1]
        descriptors = os.sysconf("SC_OPEN_MAX")
        self._most = max(1, min(_MOST, descriptors // 8)) if descriptors > 0 else _MOST
        self._seal = _sealer()
        if (why := why_no_tls()) is not None:  # documented, unless it is a surprise
            level = logging.INFO if sys.version_info < (3, 13) else logging.WARNING
            _log.log(level, "what workers say to port %d is not encrypted: %s", self.port, why)
        self._newcomers: dict[int, _Newcomer] = {}  # by descriptor, the oldest first
        self._came: dict[int, Arrival] = {}
        self._change = threading.Condition()
        self._closed, self._resume, self._next_line = False, 0.0, 0.0
        self._bell, self._poller = Bell(), select.poll()  # the bell wakes the thread
        self._thread = threading.Thread(target=self._serve, name="swath gate", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._bell.close()
            raise

    # -- the thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poller.register(self._bell, select.POLLIN)
        while not self._closed:
            rests = self._resume > monotonic()
            self._poller.register(self._socket, 0 if rests else select.POLLIN)
            ready = {descriptor for descriptor, _ in self._poller.poll(self._milliseconds())}
            for newcomer in [one for at, one in self._newcomers.items() if at in ready]:
                self._hear(newcomer)
            self._refuse_late()
            if self._socket.fileno() in ready:  # last: who has proved itself is not dropped
                self._accept_all()
        for newcomer in self._newcomers.values():
            newcomer.end.close()
        self._socket.close()
        with self._change:  # who closes has rung
            self._bell.close()

    def _milliseconds(self) -> int | None:
        """Return how long to wait before somebody is too late, or there may be room again."""
        now = monotonic()
        until = [one.until for one in self._newcomers.values()][:1]  # the first is late first
        until += [self._resume] if self._resume > now else []
        return max(0, math.ceil((min(until) - now) * 1000)) if until else None

    def _refuse_late(self) -> None:
        now = monotonic()
        for newcomer in [one for one in self._newcomers.values() if one.until <= now]:
            self._refuse(newcomer, f"it took longer than {self._patience:g} s (link_timeout)")

    def _hear(self, newcomer: _Newcomer) -> None:
        try:
            hello = newcomer.hear()
            if hello is not None:
                channel = _channel(newcomer.end, self._patience)
                arrival = Arrival(hello, channel, newcomer.end.getsockname()[0])
                self._forget(newcomer)
                self._enter(arrival)
        except Exception as error:  # whatever one can cause may only end that one
            self._refuse(newcomer, error)

    def _refuse(self, newcomer: _Newcomer, why: object) -> None:
        _log.warning("refused a connection from %s: %s", newcomer.host, why)
        if isinstance(why, UnlikeError):
            with contextlib.suppress(OSError):
                newcomer.end.sendall(why.answer)
        self._forget(newcomer)
        newcomer.end.close()

    def _forget(self, newcomer: _Newcomer) -> None:
        if self._newcomers.pop(newcomer.descriptor, None) is not None:
            self._poller.unregister(newcomer.descriptor)

    def _accept_all(self) -> None:
        """Accept who waits, but no more than there is room for before they are heard."""
        for _ in range(self._most):
            try:
                end, (host, *_) = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it has left already
                continue
            except OSError as error:  # mostly: no descriptor or memory is left
                self._make_room(error.strerror)
                return
            try:
                end.setblocking(False)
                until = monotonic() + self._patience
                newcomer = _Newcomer(end, host, until, self._secret, self._seal)
            except OSError:  # it has left already
                end.close()
                continue
            self._newcomers[newcomer.descriptor] = newcomer
            self._poller.register(end, select.POLLIN)
            if len(self._newcomers) > self._most:
                self._make_room(f"there were more than {self._most} connections at once")

    def _make_room(self, why: str | None) -> None:
        """Drop who has been here longest and proved nothing, and rest.

        So all others have some time to be heard, and a flood does not take all of a core.
        """
        now = monotonic()
        if now >= self._next_line:
            self._next_line = now + _TELL_EVERY
            _log.warning(
                "too many connections to port %d (%s): connections that have not authenticated "
                "yet are closed; workers try again",
                self.port,
                why,
            )
        strangers = [one for one in self._newcomers.values() if not one.proven]
        self._resume = now + (_REST if strangers else _RETRY)
        if strangers:
            self._forget(strangers[0])
            strangers[0].put_off()

    def _enter(self, arrival: Arrival) -> None:
        note = self._note_for(arrival.hello.number)
        if note is not None:
            _log.warning(
                "worker %d tried to connect from %s: %s",
                arrival.hello.number,
                arrival.hello.host,
                note.text,
            )
            arrival.channel.send(note)
            if note.refused:
                arrival.channel.close()
                return
        with self._change:
            earlier = self._came.pop(arrival.hello.number, None)
            if self._closed:
                arrival.channel.close()
            else:
                self._came[arrival.hello.number] = arrival
            self._change.notify_all()
        if earlier is not None:
            earlier.channel.close()

    def _note_for(self, number: int) -> Note | None:
        """Return what is to be said to a worker with this number, if it is not waited for."""
        count = self._workers
        if count is not None and not 0 <= number < count:
            last = "its only number is 0" if count == 1 else f"they are 0 to {count - 1}"
            return Note(f"there is no worker {number}: {last}.", refused=True)
        with self._change:
            if number in self._fetched:
                text = f"worker {number} is already connected; this one waits until it is lost."
                return Note(text, refused=False)
        return None

    # -- your process ---------------------------------------------------------------------------

    def fetch(self, number: int, until: float, check: Callable[[], None]) -> Arrival | None:
        """Wait for a worker until a point of the monotonic clock; None if it does not come.

        Args:
            number: Which worker.
            until: When to give up.
            check: Called now and then; raises if waiting makes no sense any more.
        """
        with self._change:
            self._fetched.discard(number)
            while number not in self._came:
                check()
                if self._closed or monotonic() >= until:
                    return None
                self._change.wait(min(0.2, max(0.0, until - monotonic())))
            self._fetched.add(number)
            return self._came.pop(number)

    def close(self) -> None:
        """Let nobody in any more."""
        with self._change:
            if not self._closed:
                self._closed = True
                self._bell.ring()
            came, self._came = self._came, {}
            self._change.notify_all()
        for arrival in came.values():
            arrival.channel.close()
        if threading.current_thread() is not self._thread:  # the port is free when we return
            self._thread.join()


class _Newcomer:
    """Somebody who has connected, and has not said yet who it is.

    Args:
        end: Its connection, which does not block.
        host: From where.
        until: When it must have done all of its handshake, by the monotonic clock.
        secret: What it must know.
        seal: Encrypts what follows the proofs; None if it is not encrypted.
    """

    def __init__(
        self, end: socket.socket, host: str, until: float, secret: bytes, seal: _Seal | None
    ) -> None:
        self.end: socket.socket | Sealed = end
        self.descriptor, self.host, self.until = end.fileno(), host, until
        self.proven = False
        self._secret, self._seal = secret, seal
        self._admission, self._heard = admission(secret, seal is not None), b""
        say, self._wanted = next(self._admission)
        end.send(say)  # a buffer that is empty takes it

    def hear(self) -> Hello | None:
        """Read what has come; return who it is once that is known.

        Not a byte more is read than belongs to the handshake.
        """
        while True:  # of what TLS has decrypted nobody would wake us
            try:
                more = self.end.recv(self._wanted - len(self._heard))
            except BlockingIOError:
                return None
            if not more:
                raise EOFError("it closed the connection before it had authenticated")
            self._heard += more
            if len(self._heard) == self._wanted:
                heard, self._heard = self._heard, b""
                try:
                    say, self._wanted = self._admission.send(heard)
                except StopIteration as admitted:
                    return admitted.value
                if not self.proven:
                    self._trust(say)

    def _trust(self, say: bytes) -> None:
        """Say the proof; what follows it is encrypted."""
        self.proven = True
        self.end.sendall(say)
        if self._seal is not None:
            self.end = self._seal(self.end, self._secret, True)

    def put_off(self) -> None:
        """Close, with the word that it may come again."""
        with contextlib.suppress(OSError):
            self.end.sendall(BUSY)
            self.end.shutdown(socket.SHUT_WR)
            self.end.recv(2 * SIZE)  # what is unread when it closes would undo what was said
        self.end.close()


def dial(
    host: str,
    port: int,
    secret: bytes,
    number: int,
    patience: float,
    is_open: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Channel, str]:
    """Go through a gate; return the channel, and the address that this host is seen under.

    A gate that is not there yet, or has no room now, is tried again for `patience` seconds. One
    that was open when its address was told, and refuses, is closed again. `tell` hears once why
    the first time failed.
    """
    until, tells = monotonic() + patience, True
    end: socket.socket | Sealed
    while True:
        try:
            end = socket.create_connection((host, port), max(_RETRY, until - monotonic()))
        except OSError as error:
            why = f"nothing listens on {host} port {port}: {error}"
            cause: Exception = error
            if is_open and isinstance(error, ConnectionRefusedError):
                raise ConnectionError(why) from error
        else:
            try:
                end = _proven(end, secret, f"{host} port {port}", until)
                end.sendall(Hello(number, socket.gethostname(), os.getpid()).packed())
                return _channel(end, patience), end.getsockname()[0]
            except PermissionError:
                end.close()
                raise
            except (OSError, EOFError) as error:
                end.close()
                why, cause = f"{host} port {port} did not accept the connection: {error}", error
        if monotonic() >= until:
            raise ConnectionError(why) from cause
        if tells:
            tell(f"{why}. Trying again for {patience:g} s.")
            tells = False
        sleep(_RETRY)


def _proven(end: socket.socket, secret: bytes, where: str, until: float) -> socket.socket | Sealed:
    """Be the worker's side of the handshake; PermissionError if the other is not our gate.

    A gate that refuses has read our proof, and closes; what ends in another way was no refusal.
    """
    nonce = _exactly(end, SIZE, until)
    own, seal = os.urandom(SIZE), _sealer()
    end.sendall(worker_proof(secret, nonce, sealed=seal is not None) + own)
    try:
        answer = _exactly(end, SIZE, until)
    except EOFError:
        answer = b""
    if answer == BUSY:
        raise ConnectionAbortedError("it has too many other connections")
    if hmac.compare_digest(answer, proof(secret, b"unlike", own)):
        differ = ("does not encrypt", "does") if seal else ("encrypts", f"cannot: {why_no_tls()}")
        raise UnlikeError(
            f"{where} {differ[0]} its connections, and this worker {differ[1]}. Run the collector "
            "and its workers with the same Python; connections are encrypted on 3.13 and newer"
        )
    if not hmac.compare_digest(answer, proof(secret, b"trainer", own)):
        raise PermissionError(f"{where} refused the connection; perhaps it has another secret")
    return end if seal is None else seal(end, secret, False)


def _sealer() -> _Seal | None:
    """Return what encrypts a connection, imported while there is a descriptor; None if nothing."""
    if why_no_tls() is not None:
        return None
    from swath.links.sealed import seal

    return seal


def new_secret() -> bytes:
    """Return a secret nobody can guess."""
    return secrets.token_bytes(SIZE)


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


def _exactly(end: socket.socket, count: int, until: float) -> bytes:
    got = b""
    while len(got) < count:
        end.settimeout(max(_RETRY, until - monotonic()))
        more = end.recv(count - len(got))
        if not more:
            raise EOFError("it closed the connection")
        got += more
        if monotonic() >= until:
            raise TimeoutError("it is too slow")
    return got


def _channel(end: socket.socket | Sealed, patience: float) -> Channel:
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
