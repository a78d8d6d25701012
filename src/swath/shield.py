"""Ctrl-C comes while something is waited for, never in the middle of the bookkeeping.

Python raises a KeyboardInterrupt wherever it happens to be: after a message was read and before it
was noted, say, and the message is lost. Inside a shield the signal is noted, and given to its own
handler as soon as something is waited for, or at the end.

```
 with shield:                   up: bookkeeping, a signal is noted
     with shield.lifted():      down: a wait, or what is not ours; a signal goes to your handler
         ...
     ...                        up again, however the block above ended
                                the end: your handler is in place, and gets what was noted
```

*What holds, at any instruction, for any number of signals.*

- The shield is up whenever bookkeeping runs. What lets a signal through closes the way behind it
  before it calls your handler: so an interrupt finds the shield up on its way out, although it may
  have come before the block had begun, or at the first instruction of what ends it.
- A signal reaches your handler once. One that comes while another is noted is merged with it, as
  the kernel merges signals that are pending; no other is lost.
- Your handler is in place again when the outermost shield has ended, whatever happens meanwhile. A
  handler that your own code has put there meanwhile, where the shield is lifted, takes its place.
- If Ctrl-C is ignored, or ends the process by itself, it stays so: a shield does nothing then.

So code that swallows a KeyboardInterrupt where the shield is lifted gets the next one later: at the
end of that block. Nothing that acts inside of it could know that it was swallowed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

__all__ = ["Shield"]


# Not those of `signal`, which turn what they return into an enum: that takes longer than all else.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal

_main = threading.main_thread().ident
"""Nearly always the answer, in a fraction of the time; every access to a buffer asks."""


def _is_main() -> bool:
    """Tell whether this is the main thread: in a fork, whichever has called for it."""
    return threading.current_thread() is threading.main_thread()


class _Mark(NamedTuple):
    """A block that the main thread is in, and those around it."""

    shield: Shield | None
    """None: no block, but an interrupt that is on its way out of what is below."""
    up: bool
    below: _Mark | None


class _Watch:
    """Stands in the place of the user's handler from the outermost shield's begin to its end.

    All that is known of shields is in `top`, and each change of it is one assignment of one
    attribute: nothing can come in the middle of it.
    """

    def __init__(self, handler: Any, top: _Mark) -> None:
        self.handler = handler
        self.top: _Mark | None = top
        self.noted: tuple[Any, ...] | None = None

    def __call__(self, *signal_and_frame: Any) -> None:
        if self.top is None:  # somebody has kept this and put it back: it is only a go-between now
            self.handler(*signal_and_frame)
            return
        self.noted = signal_and_frame
        self.let_through()

    def let_through(self) -> None:
        """Give the signal that is noted to the user's handler, if no shield is up."""
        while self.noted is not None and not self._holds():
            before = self.top
            self.top = _Mark(None, True, before)  # from here on signals are noted
            noted, self.noted = self.noted, None
            if noted is not None:  # one more has come just before, and had its turn
                self.handler(*noted)
            self.top = before
            self.adopt()

    def _holds(self) -> bool:
        """Tell whether a shield is up: of each, the block that was entered last counts."""
        lifted: list[Shield | None] = []
        mark = self.top
        while mark is not None:
            if mark.up and mark.shield not in lifted:
                return True
            lifted.append(mark.shield)
            mark = mark.below
        return False

    def adopt(self) -> None:
        """Take over a handler that the user has put in our place where no shield was up."""
        handler = _get(signal.SIGINT)
        if self.top is not None and handler is not self and callable(handler):
            self.handler = _users(handler)
            _set(signal.SIGINT, self)

    def find(self, shield: Shield | None) -> _Mark | None:
        """Return the innermost block in which this shield is up; any shield by default."""
        mark = self.top
        while mark is not None and not (
            mark.up and (mark.shield is shield if shield else mark.shield is not None)
        ):
            mark = mark.below
        return mark


def _watching() -> _Watch | None:
    """Return what holds signals back now, if this is the thread that gets them."""
    if get_ident() != _main and not _is_main():
        return None
    handler = _get(signal.SIGINT)
    return handler if type(handler) is _Watch and handler.top is not None else None


def _users(handler: Any) -> Any:
    """Return a handler, or what it stood for if it is one that the user has kept of ours."""
    while type(handler) is _Watch and handler.top is None:
        handler = handler.handler
    return handler


class Shield:
    """Holds Ctrl-C back in the main thread; elsewhere Python raises none."""

    def __enter__(self) -> None:
        if get_ident() == _main or _is_main():
            handler = _get(signal.SIGINT)
            if type(handler) is _Watch and handler.top is not None:
                handler.top = _Mark(self, True, handler.top)
            elif callable(handler):
                users = _users(handler) if type(handler) is _Watch else handler
                _set(signal.SIGINT, _Watch(users, _Mark(self, True, None)))

    def __exit__(self, *exc_info: object) -> None:
        watch = _watching()
        mark = None if watch is None else watch.top
        if watch is not None and mark is not None and not (mark.shield is self and mark.up):
            mark = watch.find(self)  # blocks that were interrupted have left theirs above ours
        if watch is None or mark is None:  # Ctrl-C was ignored, or is not ours any more
            return
        if mark.below is not None:
            watch.top = mark.below
            watch.let_through()
            return
        try:
            _set(signal.SIGINT, watch.handler)
        finally:
            watch.top = None
        if watch.noted is not None:
            watch.handler(*watch.noted)

    def lifted(self) -> _Lifted:
        """Let the signal through, around a wait or what is not ours."""
        return _Lifted(self)


class _Lifted:
    # No generator: one that is interrupted before its block begins runs its end much later.
    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._watch: _Watch | None = None
        self._before: _Mark | None = None

    def __enter__(self) -> None:
        watch = _watching()
        if watch is not None and watch.find(self._shield) is not None:
            self._watch, self._before = watch, watch.top
            # What is above the innermost shield was left by blocks that were interrupted.
            watch.top = _Mark(self._shield, False, watch.find(None))
            watch.let_through()

    def __exit__(self, *exc_info: object) -> None:
        if self._watch is not None:
            self._watch.top = self._before
            self._watch.adopt()
