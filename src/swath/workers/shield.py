"""Ctrl-C comes while something is waited for, never in the middle of the bookkeeping.

Python raises a KeyboardInterrupt wherever it happens to be: after a message was read and before it
was noted, say, and the message is lost. Inside a shield the signal is noted, and given to its own
handler as soon as something is waited for, or at the end.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

__all__ = ["Shield"]


class Shield:
    """Holds Ctrl-C back in the main thread; elsewhere Python raises none."""

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._noted: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if self._depth == 0 and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            signal.signal(signal.SIGINT, handler)
            self._pass_on(handler)

    def lifted(self) -> _Lifted:
        """Let the signal through, around a wait."""
        return _Lifted(self)

    def _note(self, *signal_and_frame: Any) -> None:
        self._noted = signal_and_frame

    def _pass_on(self, handler: Any) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            handler(*noted)


class _Lifted:
    # No generator: one that is interrupted before its block begins runs its end much later.
    def __init__(self, shield: Shield) -> None:
        self._shield, self._handler = shield, shield._handler
        if threading.current_thread() is not threading.main_thread():
            self._handler = None

    def __enter__(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._shield._pass_on(self._handler)

    def __exit__(self, *exc_info: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._shield._note)
