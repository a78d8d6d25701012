"""Collecting in a thread while the user trains.

```
 your thread:   start() ... sample, train, update_policy_weights_() ... pause() ... shutdown()
 its thread:    batch --> replay buffer, batch --> replay buffer, ...   rests between two batches
```

A failure ends the thread and is kept: the next call of the user raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from swath.errors import ClosedError
from swath.helpers import Helper
from swath.shield import Shield

__all__ = ["Background", "Pause"]

_LOOK = 0.05
"""Seconds between two looks at whether Ctrl-C has come."""


class Background:
    """A thread that makes one batch after the other.

    Args:
        advance: Makes one batch; False when there are no more.
        on_end: Called by the thread at its end, with what was raised.
        on_rest: Called by it before it rests.
        wake: Lets it hear of its end, whatever it waits for, when the interpreter is to end.
        shield: Of whoever makes a pause; lifted while it is waited for.
    """

    def __init__(
        self,
        advance: Callable[[], bool],
        on_end: Callable[[BaseException | None], None],
        on_rest: Callable[[], None],
        wake: Callable[[], None],
        shield: Shield,
    ) -> None:
        self._advance, self._on_end, self._on_rest = advance, on_end, on_rest
        self._wake, self._shield = wake, shield
        self._state = threading.Condition()
        self._resting, self._stopping = False, False
        self._pauses = 0
        """How many have one: threads make theirs side by side, and one's end is not the other's."""
        self.failure: BaseException | None = None
        self._thread = Helper(self._run, "swath", self._end)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._may_go_on() and self._advance():
                pass
        except ClosedError:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self._on_end(self.failure)
            with self._state:
                self._resting = True
                self._state.notify_all()

    def _may_go_on(self) -> bool:
        """Rest while that is wanted; False when it is time to end."""
        while True:
            with self._state:
                if not self._pauses or self._stopping:
                    self._resting = False
                    return not self._stopping
            self._on_rest()
            with self._state:
                while self._pauses and not self._stopping:
                    self._resting = True
                    self._state.notify_all()
                    self._state.wait()
                self._resting = False  # whoever wants a pause from here on waits for the next rest

    @property
    def runs(self) -> bool:
        """Whether the thread is collecting, or would but for a pause."""
        return self._thread.is_alive() and not self._stopping

    @property
    def is_own(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def stopping(self) -> bool:
        """Tell whether the thread is to end."""
        return self._stopping

    def pause(self) -> Pause:
        """Rest after the batch that is being made; returns when it is made."""
        with self._shield, self._state:
            self._pauses += 1
            try:
                while not self._resting:
                    self._state.wait(_LOOK)  # itself no place for Ctrl-C: it holds a lock or not
                    with self._shield.lifted():
                        pass
            except BaseException:  # nobody has the pause, so nobody would end it
                self.end_pause()
                raise
        return Pause(self)

    def end_pause(self) -> None:
        """End one pause, and go on if it was the last."""
        with self._state:
            self._pauses = max(0, self._pauses - 1)
            self._state.notify_all()

    def resume(self) -> None:
        """End all pauses, and go on."""
        with self._state:
            self._pauses = 0
            self._state.notify_all()

    def _end(self) -> None:
        self.stop(0.0)
        self._wake()

    def stop(self, timeout: float | None) -> bool:
        """End the thread and tell whether it has ended within `timeout` seconds."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if not self.is_own:
            self._thread.join(timeout)
        return not self._thread.is_alive()


class Pause:
    """A pause that has begun; as a context manager it ends with the block."""

    def __init__(self, background: Background | None) -> None:
        self._background = background

    def __enter__(self) -> Pause:
        return self

    def __exit__(self, *exc_info: object) -> None:
        background, self._background = self._background, None  # it ends once
        if background is not None:
            background.end_pause()
