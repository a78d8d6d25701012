"""Starting worker processes.

Workers are forked from a server that has imported torch already, so that one more costs
milliseconds. Nothing of `__main__` is run again: no guard is needed in scripts. The server starts
with the first worker and serves for the life of this process. Where such a process may not be
forked (macOS), each worker is a program of its own instead; see `spawn.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import Any

from swath.errors import WorkerError
from swath.links import forkserver
from swath.links.channel import Channel, close_all
from swath.links.forkserver import ANSWER, PLAIN, REQUEST, STATUS, WITH_COMPILER
from swath.links.spawn import quiet_start, spawn
from swath.shield import Shield
from swath.system import after_fork_in_child, can_fork_workers, check_can_start_workers

__all__ = ["Launched", "ending", "in_worker", "launch", "server_pid", "stop_server"]

_TRIES = 5
"""How often a fork server is started for one worker."""
_ENDING, _LOOK = 5.0, 0.01
"""Seconds for a process to be gone that was told to go, or killed; and between two looks at it."""
_COMPILING = (b"torchrl", b"torch._dynamo")
_SERVE = """
import socket
from swath.links.forkserver import serve
serve(socket.socket(fileno={descriptor}), {parent})
"""


class Launched:
    """A worker process: its channel, and a sentinel that is ready once the process has ended."""

    def __init__(self, pid: int, channel: Channel, sentinel: int) -> None:
        self.pid, self.channel, self.sentinel = pid, channel, sentinel
        self._code: int | None = None
        self._closed = self._killed = False

    def exit_code(self, timeout: float | None = 0.0) -> int | None:
        """Return how the process ended (minus the signal if by one); None if it runs still."""
        if self._code is None and not self._closed and wait([self.sentinel], timeout):
            told = os.read(self.sentinel, STATUS.size)
            self._code = STATUS.unpack(told)[0] if told else -signal.SIGKILL
        return self._code

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        if self.exit_code() is None and not self._closed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, kill it after `timeout` seconds, and let go of it."""
        if self._closed:
            return
        # One that was killed ends at once, or hangs in the kernel, or nobody is there to tell.
        if not self._killed and self.exit_code(timeout) is None:
            self.kill()
        self.exit_code(_ENDING)
        self._closed = True
        self.channel.close()
        os.close(self.sentinel)


def ending(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"ended by itself with exit code {code}; look for a call of os._exit or sys.exit."
    known = {one.value: one.name for one in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hints = {
        "SIGKILL": " (often because the machine ran out of memory)",
        "SIGSEGV": " (a crash in native code of an env or a library)",
    }
    return f"was killed by {name}{hints.get(name, '')}."


def launch(
    target: Callable[[Channel, bytes], None], payload: bytes, shield: Shield | None = None
) -> Launched:
    """Start a process that calls `target(channel, payload)`.

    Args:
        target: A function of an importable module.
        payload: What it needs, as bytes.
        shield: What holds Ctrl-C back, until whoever called has noted what was launched; it is
            lifted while the process is waited for, which then ends by itself.
    """
    check_can_start_workers()
    shield = Shield() if shield is None else shield
    surroundings = {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "target": (target.__module__, target.__name__),
        "payload": payload,
    }
    request = WITH_COMPILER if any(name in payload for name in _COMPILING) else PLAIN
    ours, theirs = Channel.pair()
    opened = list(os.pipe())  # numbers, that nobody closes who does not do so here
    try:
        opened.append(_output(1))
        opened.append(_output(2))
        sentinel, status, output, errors = opened
        start = _fork if can_fork_workers() else spawn
        pid = start(request, [theirs.fileno(), output, errors, status], shield)
    except BaseException:
        ours.close()
        close_all(opened[:1])
        raise
    finally:
        theirs.close()
        close_all(opened[1:])
    with contextlib.suppress(EOFError):  # it has died already: the sentinel tells
        ours.send(surroundings)
    return Launched(pid, ours, sentinel)


def _output(number: int) -> int:
    """Return a copy of where this process writes, or nowhere."""
    try:
        return os.dup(number)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return os.open(os.devnull, os.O_WRONLY)


class _Server:
    """This process's end of a fork server."""

    def __init__(self) -> None:
        self._lock, self._asked = threading.Lock(), 0
        self._socket, theirs = socket.socketpair()
        # A worker has all imports already, and one thread: a fork of it can serve its own workers.
        start = _start_program if forkserver.in_worker is None else _start_fork
        self.pid, self._wait = start(theirs, self._socket)
        theirs.close()

    def fork(self, request: bytes, descriptors: list[int], shield: Shield) -> int:
        """Return the pid of a new worker that holds these descriptors."""
        with self._lock, shield:
            self._asked += 1
            try:
                asked = REQUEST.pack(request, self._asked)
                socket.send_fds(self._socket, [asked], descriptors)
                while True:
                    number, pid = self._answer(shield)
                    if number == self._asked:  # not one for who was interrupted, and does not wait
                        break
            except (BrokenPipeError, ConnectionResetError):
                raise _ServerGone from None
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _answer(self, shield: Shield) -> tuple[int, int]:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        with shield.lifted():  # only here: an answer of which a part is read would be none
            poller.poll()
        told = self._socket.recv(ANSWER.size, socket.MSG_WAITALL)
        if len(told) < ANSWER.size:
            raise _ServerGone
        number, pid = ANSWER.unpack(told)
        return number, pid

    def stop(self) -> int:
        """End the server, and with it all workers; return how it ended."""
        self._socket.close()
        return self._wait()


class _ServerGone(Exception):
    """The fork server was killed; for `_fork`, which starts another."""


def _start_program(theirs: socket.socket, ours: socket.socket) -> tuple[int, Callable[[], Any]]:
    program = _SERVE.format(descriptor=theirs.fileno(), parent=os.getpid())
    process = quiet_start(program, theirs.fileno())

    def wait_for_end() -> int:
        try:
            return process.wait(_ENDING)
        except subprocess.TimeoutExpired:  # it is stopped, or stuck
            process.kill()
            return process.wait()

    return process.pid, wait_for_end


def _start_fork(theirs: socket.socket, ours: socket.socket) -> tuple[int, Callable[[], Any]]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        forkserver.serve_as_fork(theirs, parent)

    def wait_for_end() -> int:
        until, status = monotonic() + _ENDING, 0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and monotonic() < until:
            sleep(_LOOK)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        status = ended[1]
        return os.waitstatus_to_exitcode(status)

    return pid, wait_for_end


_current: _Server | None = None
_guard = threading.Lock()


def _fork(request: bytes, descriptors: list[int], shield: Shield) -> int:
    """Return the pid of a new worker, from a new server if there is none or it was killed.

    It may be killed at any moment, also while it starts; only if that goes on there is no worker.
    """
    global _current
    with _guard, shield:
        for _ in range(_TRIES):
            if _current is None:
                _current = _Server()
            try:
                return _current.fork(request, descriptors, shield)
            except _ServerGone:
                gone, _current = _current, None  # first: there is none, whatever comes now
                code = gone.stop()
    raise WorkerError(
        f"no worker can be started: the process that forks them (the fork server) ended {_TRIES} "
        f"times before it had. The last, process {gone.pid}, {ending(code)}"
    )


def in_worker() -> bool:
    """Tell whether this process was launched as a worker."""
    return forkserver.in_worker is not None


def server_pid() -> int | None:
    """Return the process id of the fork server, if one runs."""
    return None if _current is None else _current.pid


@atexit.register
def stop_server() -> None:
    """End the fork server; the next `launch` starts another."""
    global _current
    with _guard:
        if _current is not None:
            _current.stop()
            _current = None


def _forget() -> None:
    """In a fork of this process: the server is not ours."""
    global _current, _guard
    if _current is not None:
        _current._socket.close()
    _current, _guard = None, threading.Lock()


after_fork_in_child(_forget)
