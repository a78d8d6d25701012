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

import enum
import errno
import os
import struct
import sys
import threading
import weakref

from swath.system import after_fork_in_child, fcntl, open_again

__all__ = ["How", "Locks", "locks_of"]

_GET, _SET, _SET_AND_WAIT = 36, 37, 38  # F_OFD_*, which the fcntl module of Python 3.10 lacks
_TAKEN = (errno.EAGAIN, errno.EACCES)
_WHOLE = 1 << 62
"""A byte that stands for the whole file; none is written so far out."""


class How(enum.Enum):
    """What to do with bytes: the names that `fcntl` has for it, of open files and of POSIX."""

    SHARE = "F_RDLCK", "LOCK_SH"
    OWN = "F_WRLCK", "LOCK_EX"
    LET_GO = "F_UNLCK", "LOCK_UN"


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
        self._described = self._claimed = False
        if descriptor is not None:
            self._fcntl = fcntl()
            self._described = _has_descriptions(descriptor)
            self._file = _file(descriptor)
            self._own = open_again(descriptor) if self._described else os.dup(descriptor)

    def lock(self, how: How, start: int, count: int = 1, waits: bool = True) -> bool:
        """Take bytes or let go of them; False if they are taken, and this does not wait."""
        if self._own is None:
            return True
        system, (kind, flag) = self._fcntl, how.value
        try:
            if self._described:
                about = _flock(getattr(system, kind), start, count)
                system.fcntl(self._own, _SET_AND_WAIT if waits else _SET, about)
            else:
                at_once = 0 if waits else system.LOCK_NB
                system.lockf(self._own, getattr(system, flag) | at_once, count, start)
        except OSError as error:
            if waits or error.errno not in _TAKEN:
                raise
            return False
        return True

    def claim_file(self, descriptor: int) -> bool:
        """Keep other buffers from opening the file; False if one has it open."""
        if self._described:
            try:
                self._fcntl.flock(descriptor, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True
        # macOS has `flock` and POSIX locks in one list: the former would keep us out ourselves. A
        # POSIX lock keeps nobody of this process out, so that is noted.
        if self._claimed or not self.lock(How.OWN, _WHOLE, waits=False):
            return False
        self._claimed = True
        return True

    def let_go_of_file(self, descriptor: int) -> None:
        """Let other buffers open the file."""
        if self._described:
            self._fcntl.flock(descriptor, self._fcntl.LOCK_UN)
        elif self._claimed:
            self.lock(How.LET_GO, _WHOLE)
            self._claimed = False

    def leave_to_parent(self) -> None:
        """In a fork: have a description of our own, on which nothing is locked."""
        self.said.clear()
        own = self._own
        if own is None or not self._described:  # a fork has none of the locks of POSIX
            return
        self._own = -1  # of no file: what would lock fails, rather than share its parent's locks
        # A fork that serves workers closes all descriptors, and others get the numbers.
        if _is_open(own, self._file):
            self._own = open_again(own)
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
    system = fcntl()
    try:
        system.fcntl(descriptor, _GET, _flock(system.F_WRLCK, 0, 1))
    except OSError:
        return False
    return True


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


after_fork_in_child(_in_fork)
