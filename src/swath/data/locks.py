"""Locks on a replay buffer's ledger: between threads, and the kernel's between processes.

```
 bytes of the ledger's file:   0: the ledger     1 + r: row r     then: what a process says
```

The kernel's locks must end with their process, and not before. Those of POSIX (`lockf`) end when
the process closes *any* descriptor of the file: if it merely reads the ledger, as `load_dataset`
does. So ours belong to an *open file description*, of which each process has its own: opened anew
from a descriptor that came from elsewhere, and opened anew in a fork, which would share it else,
and keep its locks alive. Where the system knows none (macOS), it is POSIX locks all the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
import weakref

from swath.memory import DESCRIPTORS

__all__ = ["Locks", "locks_of"]

_GET, _SET, _SET_AND_WAIT = 36, 37, 38  # F_OFD_*, which the fcntl module of Python 3.10 lacks
_KINDS = {
    fcntl.LOCK_SH: fcntl.F_RDLCK,
    fcntl.LOCK_EX: fcntl.F_WRLCK,
    fcntl.LOCK_UN: fcntl.F_UNLCK,
}
_TAKEN = (errno.EAGAIN, errno.EACCES)


class Locks:
    """Those of one process on one ledger; its threads share them.

    Args:
        descriptor: Of the ledger; None if no other process can see it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.writing, self.ledger = threading.Lock(), threading.Lock()
        self.said: dict[int, int] = {}
        """How many in this process say something."""
        self._own: int | None = None
        if descriptor is not None:
            self._described = _has_descriptions(descriptor)
            self._file = _file(descriptor)
            self._own = _opened_anew(descriptor) if self._described else os.dup(descriptor)

    def lock(self, how: int, start: int, count: int = 1) -> bool:
        """Take or give back bytes, `how` as in `fcntl.flock`; False if they are taken."""
        if self._own is None:
            return True
        kind, waits = _KINDS[how & ~fcntl.LOCK_NB], not how & fcntl.LOCK_NB
        try:
            if self._described:
                fcntl.fcntl(self._own, _SET_AND_WAIT if waits else _SET, _flock(kind, start, count))
            else:
                fcntl.lockf(self._own, how, count, start)
        except OSError as error:
            if waits or error.errno not in _TAKEN:
                raise
            return False
        return True

    def leave_to_parent(self) -> None:
        """In a fork: have a description of our own, on which nothing is locked."""
        self.said.clear()
        own = self._own
        if own is None or not self._described:  # a fork has none of the locks of POSIX
            return
        self._own = -1  # of no file: what would lock fails, rather than share its parent's locks
        # A fork that serves workers closes all descriptors, and others get the numbers.
        if _is_open(own, self._file):
            self._own = _opened_anew(own)
            os.close(own)

    def __del__(self) -> None:
        own = getattr(self, "_own", None)
        if own is not None and _is_open(own, self._file):
            os.close(own)


def _flock(kind: int, start: int, count: int) -> bytes:
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, start, count, 0)


def _has_descriptions(descriptor: int) -> bool:
    """Tell whether the system has locks of open file descriptions."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(descriptor, _GET, _flock(fcntl.F_WRLCK, 0, 1))
    except OSError:
        return False
    return True


def _opened_anew(descriptor: int) -> int:
    return os.open(f"{DESCRIPTORS}/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_open(descriptor: int, file: tuple[int, int]) -> bool:
    try:
        return _file(descriptor) == file
    except OSError:
        return False


_known: weakref.WeakValueDictionary[tuple[int, int], Locks] = weakref.WeakValueDictionary()


def locks_of(descriptor: int) -> Locks:
    """Return this process's locks on the ledger that a descriptor is of."""
    file = _file(descriptor)
    locks = _known.get(file)
    return _known.setdefault(file, Locks(descriptor)) if locks is None else locks


def _in_fork() -> None:
    for locks in list(_known.values()):
        locks.leave_to_parent()


os.register_at_fork(after_in_child=_in_fork)
