"""Threads that work for a collector or a buffer, and end before the interpreter does.

They are daemons, since a script that does not close what it made is to end all the same. But the
interpreter ends daemons wherever they are, and where one is inside of torch's C++ that is the end
of the process: "terminate called without an active exception", exit code 134. So all of them are
asked to end before, when nothing of the user's runs any more.

 1. Each is told to end, and has some seconds for the step that it is in.
 2. In who is still there, a SystemExit is raised: it ends what runs Python, an env that computes
    for an hour, say.
 3. Who does not come back to Python even then, in `sleep` or a simulator's C, is left alone: it
    would have to come back in the milliseconds in which the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from swath.shield import Shield
from swath.system import after_fork_in_child

__all__ = ["Helper"]

_STEP, _LAST = 3.0, 1.0
"""Seconds for the step that a thread is in, and for what it does when that is broken off."""
_alive: set[Helper] = set()


class Helper(threading.Thread):
    """A daemon thread that does not outlive the interpreter.

    Args:
        target: What it does.
        name: Of the thread.
        end: Called when the interpreter is about to end: lets `target` return soon.
        args: For `target`.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        name: str,
        end: Callable[[], object] = lambda: None,
        args: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.end = end

    def start(self) -> None:
        """Start the thread."""
        # Again for each: before all that was registered earlier, which it may need to the last.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        _alive.add(self)
        super().start()

    def run(self) -> None:
        """Do what it is there for."""
        try:
            super().run()
        finally:
            _alive.discard(self)

    def break_off(self) -> None:
        """Raise a SystemExit in the thread as soon as it runs Python."""
        ident = ctypes.c_ulong(self.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))


def _end_all() -> None:
    with Shield():  # one more Ctrl-C is no reason to abort
        for thread in list(_alive):
            with contextlib.suppress(Exception):
                thread.end()
        if not _joined(_STEP):
            for thread in list(_alive):
                thread.break_off()
            _joined(_LAST)


def _joined(seconds: float) -> bool:
    """Wait for the threads, all in all for so many seconds; tell whether they have ended."""
    until = monotonic() + seconds
    for thread in list(_alive):
        thread.join(max(0.0, until - monotonic()))
    return not any(thread.is_alive() for thread in list(_alive))


after_fork_in_child(_alive.clear)  # a fork has none of them
