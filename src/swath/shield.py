"""Ctrl-C comes while something is waited for, never in the middle of the bookkeeping.

Python raises a KeyboardInterrupt wherever it happens to be: after a message was read and before it
was noted, say, and the message is lost. Inside a shield the signal is noted, and given to its own
handler as soon as something is waited for, or at the end.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Shield"]


# Not those of `signal`, which turn what they return into an enum: that takes longer than all else.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal


class Shield:
    """Holds Ctrl-C back in the main thread; elsewhere Python raises none."""

    def __init__(self) -> None:
        self._own = self._note  # one object, to be recognized
        self._handlers: list[Any] = []
        self._noted: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _get(signal.SIGINT)
            holds = callable(handler) and handler is not self._own
            if holds:
                _set(signal.SIGINT, self._own)
            self._handlers.append(handler if holds else None)

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = self._handlers.pop()
            if handler is not None:
                _set(signal.SIGINT, handler)
                self._pass_on(handler)

    def lifted(self) -> _Lifted:
        """Let the signal through, around a wait or what is not ours."""
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
        self._shield, self._handler = shield, None
        if threading.current_thread() is threading.main_thread():
            held = [one for one in shield._handlers if one is not None]
            self._handler = held[-1] if held else None

    def __enter__(self) -> None:
        if self._handler is not None:
            _set(signal.SIGINT, self._handler)
            self._shield._pass_on(self._handler)

    def __exit__(self, *exc_info: object) -> None:
        if self._handler is not None:
            _set(signal.SIGINT, self._shield._own)
