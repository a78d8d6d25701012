"""Order between accesses to memory that other processes read."""

from __future__ import annotations

import threading

__all__ = ["fence"]

_lock = threading.Lock()


def fence() -> None:
    """Keep processors that reorder memory accesses from doing so here: a lock does."""
    with _lock:
        pass
