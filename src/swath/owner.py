"""Whose an object is: the process that made it, and one thread at a time.

A fork of a process has copies of its sockets and maps its shared memory. Were it to use them, it
would take what was meant for the process that made them: so whoever has such things asks its owner
first. An object that two threads use at once would do a part of what each of them wants: so the
second is refused, at once and in words, rather than made to wait for what it may not expect.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from swath.errors import UsageError
from swath.system import after_fork_in_child

__all__ = ["Owner", "only_here"]

_process = os.getpid()  # kept, since to ask for it is a call of the system


def _note_fork() -> None:
    global _process
    _process = os.getpid()


after_fork_in_child(_note_fork)


class Owner:
    """The process that made an object, and the thread that is using it.

    Args:
        what: The object, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what, self._process = what, _process
        self._lock = threading.RLock()  # what is called inside of a call is the same thread's
        self._inside = 0
        self.turn_of: Callable[[], _Turn | None] = lambda: None
        """Return the block that this thread is in: by a weak reference, since one that was broken
        off by what any other signal's handler raises may not have come to its end."""

    @property
    def is_here(self) -> bool:
        """Whether this process made the object: False in a fork of it."""
        return self._process == _process

    def check_process(self) -> None:
        """Refuse to be used in a fork of the process that made the object."""
        if self._process != _process:
            raise UsageError(
                f"this {self._what} was made in process {self._process} and is used in process "
                f"{_process}, a fork of it: its processes and memory belong to the first "
                "process, and both would get each other's frames. Make one in the fork, or use "
                "this one in the first process."
            )

    def turn(self, call: str, outermost: bool = False) -> _Turn:
        """Keep other threads out of a block; UsageError if one is in such a block already.

        Args:
            call: What the block is of, for messages.
            outermost: Refuse this thread, too, if it is in such a block already. Hooks, policies
                and signal handlers run inside of a call: what that is to give out is not theirs.
        """
        return _Turn(self, call, outermost)

    def enter(self, call: str) -> None:
        """Let this thread in, or refuse it; see `turn`."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"{call} of this {self._what} was called in thread "
                f"{_name_of(threading.get_ident())} while thread {_name_of(self._inside)} is using "
                "it: only one thread at a time may use it. Make one for each thread, or hold a "
                "lock around the calls."
            )
        self._inside = threading.get_ident()

    def leave(self) -> None:
        """Let this thread out."""
        self._lock.release()

    def check_outermost(self, call: str) -> None:
        """Refuse this thread if it is in a block already."""
        if self.turn_of() is not None:
            raise UsageError(
                f"{call} of this {self._what} was called inside another call of it, by a hook, "
                "the policy, an env or a signal handler: the frames that it would return "
                "belong to that call. Call it after that call has returned."
            )


def _name_of(ident: int) -> str:
    """Return the name of a running thread; its number if Python has not started it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return repr(names.get(ident, ident))


class _Turn:
    # Used inside of a shield: what lies between two of its instructions is never interrupted.
    def __init__(self, owner: Owner, call: str, outermost: bool) -> None:
        self._owner, self._call, self._outermost = owner, call, outermost
        self._entered, self._reference = False, weakref.ref(self)

    def __enter__(self) -> None:
        owner = self._owner
        owner.enter(self._call)
        self._before, self._entered = owner.turn_of, True
        if self._outermost:
            try:
                owner.check_outermost(self._call)
            except UsageError:
                self.__exit__()
                raise
        owner.turn_of = self._reference

    def __exit__(self, *exc_info: object) -> None:
        if self._entered:
            self._entered = False
            self._owner.turn_of = self._before
            self._owner.leave()

    # For what another signal's handler raises where the block ends: all others would be refused.
    __del__ = __exit__


def only_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does nothing in forks of this process."""
    process = _process

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if process == _process else None

    return call
