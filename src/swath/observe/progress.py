"""How far a collection is, in one line: on a terminal, in a notebook or in a log.

```
 67% [##########.....]  134,000/200,000 frames  12,345/s  0:00:05 left  671 episodes  return 21.3
```

It goes to stderr or into the notebook's cell. Nothing is redirected and no thread draws, so what a
script prints itself comes out where it always does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

__all__ = ["Bar"]

_WIDEST_BAR, _BAR_STEP = 40, 10


class Bar:
    """Shows how far a collection is; starts with the first update.

    Args:
        total_frames: How many there will be; -1 where nobody knows.
    """

    def __init__(self, total_frames: int) -> None:
        self._total = None if total_frames == -1 else total_frames
        self._screen: _Screen | None = None
        self._stats: Callable[[], dict[str, Any]] = dict
        self._due = 0.0

    def update(self, stats: Callable[[], dict[str, Any]], *, done: bool = False) -> None:
        """Show these statistics if it is time to; always, if the collection is `done`."""
        now, self._stats = perf_counter(), stats
        screen = self._screen  # another thread may end the line at any time
        if screen is None:
            screen = _screen()
            self._began = now, stats()["frames"]
            self._due = now + screen.first
            self._screen = screen
        if now >= self._due:
            self._draw(screen, now)
        if done:
            self.close()

    def close(self) -> None:
        """Show the last state and leave it there; an update after that begins another line."""
        screen, self._screen = self._screen, None
        if screen is not None:
            self._draw(screen, perf_counter())
            screen.close()

    def _draw(self, screen: _Screen, now: float) -> None:
        self._due = now + screen.every
        screen.show(_line(self._parts(now), self._share(), screen.width()))

    def _share(self) -> float | None:
        return None if self._total is None else min(1.0, self._stats()["frames"] / self._total)

    def _parts(self, now: float) -> list[str]:
        """Return what is to be said, the most important first."""
        stats = self._stats()
        frames: int = stats["frames"]
        of = "" if self._total is None else f"/{self._total:,}"
        # The whole rate, training included: that of the collector alone is in `stats()`.
        began, before = self._began
        rate = (frames - before) / max(now - began, 1e-9)
        parts = [f"{frames:,}{of} frames"]
        if rate:
            parts.append(f"{rate:,.0f}/s")
        if rate and self._total is not None and frames < self._total:
            parts.append(f"{timedelta(seconds=round((self._total - frames) / rate))} left")
        parts.append(f"{stats['episodes']:,} episodes")
        if stats["return"] is not None:
            parts.append(f"return {stats['return']['last_100']:.1f}")
        return parts


def _line(parts: list[str], share: float | None, width: int) -> str:
    """Return as many of the parts as fit, behind the share and, where there is room, a bar."""
    line = "" if share is None else f"{int(share * 100)}%"
    bar_at = len(line)
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    # In steps, so that the bar does not change its length with every digit beside it.
    room = min(_WIDEST_BAR, (width - len(line) - len(" []")) // _BAR_STEP * _BAR_STEP)
    if share is not None and room > 0:
        filled = int(share * room)
        line = f"{line[:bar_at]} [{'#' * filled}{'.' * (room - filled)}]{line[bar_at:]}"
    return line or parts[0][:width]


class _Screen(Protocol):
    """Where the line is shown."""

    first: float
    """Seconds until it is drawn first."""
    every: float
    """Seconds between two drawings."""

    def width(self) -> int: ...
    def show(self, line: str) -> None: ...
    def close(self) -> None: ...


def _screen() -> _Screen:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return _Notebook()
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return _Terminal() if terminal else _Log()


class _Terminal:
    """One line that is written over and over."""

    first, every = 0.0, 0.1

    def width(self) -> int:
        try:
            return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        except (OSError, ValueError):
            return 79

    def show(self, line: str) -> None:
        _write(f"\r{line}\x1b[K")  # and clear what stood behind it

    def close(self) -> None:
        _write("\n")


class _Notebook:
    """An output of the cell that is changed in place, and saved with the notebook."""

    first, every = 0.0, 0.3

    def __init__(self) -> None:
        self._handle: Any = None

    def width(self) -> int:
        return 100

    def show(self, line: str) -> None:
        said = {"text/plain": line}
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(said, raw=True, display_id=True)
        else:
            self._handle.update(said, raw=True)

    def close(self) -> None:
        self._handle = None


class _Log:
    """A line now and then."""

    first = every = 5.0

    def width(self) -> int:
        return 120

    def show(self, line: str) -> None:
        _write(f"swath: {line}\n")

    def close(self) -> None:
        pass


def _write(text: str) -> None:
    if sys.stderr is not None:  # as it is in a program without a console
        sys.stderr.write(text)
        sys.stderr.flush()
