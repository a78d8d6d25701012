"""A process that has imported torch once and forks workers on request.

```
 your process --request, 3 descriptors--> fork server --fork--> worker
      |  <------------ pid ------------------'   |                |
      |  <------------ exit status --------------'                |
      '------------------- channel -------------------------------'
```

The fork server owns nothing but its children. It ends, and they with it, when the socket to your
process closes or your process ends in any other way. It has one thread and never runs user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import multiprocessing
import os
import random
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from time import sleep

from swath.links.channel import Channel, close_all
from swath.preload import COMPILER
from swath.system import can_fork_workers

__all__ = ["ANSWER", "PLAIN", "REQUEST", "STATUS", "WITH_COMPILER", "serve"]

PLAIN, WITH_COMPILER = b"p", b"c"
"""Requests: for a worker, and for one that will compile, or import what does."""
REQUEST, ANSWER = struct.Struct("=cq"), struct.Struct("=qq")
"""What is asked for, with a number; the number and the process id of the worker that was made.

Who asks may be interrupted while it waits. The number says whose answer it is that comes then."""
STATUS = struct.Struct("=q")
_GIVEN = 4
"""Descriptors with a request: channel, output, errors, and where to tell how the worker ended."""
_PDEATHSIG = 1
_LOOK = 1.0
"""Seconds between two looks at whether the parent process is there."""

in_worker: int | None = None
"""In a process that a fork server made: its process id."""


def serve(requests: socket.socket, parent: int) -> None:
    """Fork a worker for each request, until the requests or the parent process end."""
    gc.collect()
    gc.freeze()  # so that collections in workers do not copy every page of the imports
    alarm, wakeup = socket.socketpair()
    for end in (alarm, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(alarm, selectors.EVENT_READ)
    watched = _watch(parent)
    if watched is not None:
        selector.register(watched, selectors.EVENT_READ)
    statuses: dict[int, int] = {}
    own = [end.fileno() for end in (requests, alarm, wakeup, selector)]
    own += [] if watched is None else [watched]
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if watched in ready:
            break
        if alarm in ready:
            alarm.recv(4096)
        _reap(statuses)
        if requests in ready and not _answer(requests, statuses, own):
            break
    signal.set_wakeup_fd(-1)
    for pid in statuses:
        os.kill(pid, signal.SIGKILL)


def serve_as_fork(requests: socket.socket, parent: int) -> None:
    """Turn a fresh fork of a worker into the fork server of that worker; does not return."""
    try:
        _die_with(parent)
        kept = requests.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        serve(requests, parent)
    finally:
        os._exit(0)


def _watch(parent: int) -> int | None:
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, or an old one: the socket tells, mostly
        return None


def _reap(statuses: dict[int, int]) -> None:
    """Tell how workers ended that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = statuses.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        try:
            os.write(descriptor, STATUS.pack(code))
        except BrokenPipeError:  # nobody wants to know
            pass
        os.close(descriptor)


def _answer(requests: socket.socket, statuses: dict[int, int], own: Sequence[int]) -> bool:
    """Fork one worker, without our own descriptors; False if nobody asks any more."""
    try:
        asked, descriptors, _, _ = socket.recv_fds(requests, REQUEST.size, 8)
    except ConnectionResetError:  # your process has ended with an answer unread
        return False
    if not asked:
        return False
    head, number = REQUEST.unpack(asked)
    if head == WITH_COMPILER:  # once for all workers, instead of in each
        with contextlib.suppress(Exception):  # a worker that needs it will say what is wrong
            importlib.import_module(COMPILER)
    try:
        pid = _forked(descriptors, statuses, own)
    except OSError as error:  # of one worker that cannot be; all others go on
        close_all(descriptors)
        pid = -(error.errno or errno.EIO)
    with contextlib.suppress(BrokenPipeError):  # as the next look at the requests tells
        requests.sendall(ANSWER.pack(number, pid))
    return True


def _forked(descriptors: list[int], statuses: dict[int, int], own: Sequence[int]) -> int:
    """Return the process of a new worker, which has these descriptors but the last."""
    if len(descriptors) < _GIVEN:  # the kernel gives no more than we may have
        raise OSError(errno.EMFILE, "not all descriptors have come")
    *for_worker, status = descriptors
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all([status, *statuses.values(), *own])
        become_worker(for_worker, server)
    close_all(for_worker)
    statuses[pid] = status
    return pid


def become_worker(descriptors: Sequence[int], parent: int) -> None:
    """Run what the channel says in this fresh fork, and end it; does not return."""
    channel, output, errors = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    close_all([output, errors])
    be_worker(channel, parent)


def be_worker(channel: int, parent: int) -> None:
    """Run what the channel says in this process, and end it; does not return."""
    global in_worker
    code, in_worker = 1, os.getpid()
    try:
        _die_with(parent)
        _run(Channel(socket.socket(fileno=channel)))
        code = 0
    except EOFError:  # your process is gone, or does not want us
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
        os._exit(code)


def _die_with(parent: int) -> None:
    """End this process when its parent ends: by the kernel, or by looking once a second."""
    if can_fork_workers() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we said so
            os._exit(0)
    else:
        threading.Thread(
            target=_end_after, args=(parent,), name="swath parent", daemon=True
        ).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        sleep(_LOOK)
    os._exit(0)


def _run(channel: Channel) -> None:
    surroundings, _ = channel.receive()
    os.environ.clear()
    os.environ.update(surroundings["environ"])
    os.chdir(surroundings["cwd"])
    sys.path[:], sys.argv[:] = surroundings["path"], surroundings["argv"]
    # Else it could not talk to a multiprocessing.Manager of the process that it works for.
    multiprocessing.current_process().authkey = surroundings["authkey"]
    _reseed()
    module, name = surroundings["target"]
    getattr(importlib.import_module(module), name)(channel, surroundings["payload"])


def _reseed() -> None:
    """Give this process random states of its own: forked ones start with equal states."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()
