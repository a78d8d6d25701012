"""How tests start Ray and end it; scripts import it, too."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from pathlib import Path

LEAN = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": 256 << 20,
    "logging_level": "error",
    "log_to_driver": False,
}


def end(shutdown) -> None:
    """End Ray, which lets go of its processes without having waited for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        shutdown()
        gc.collect()


def descendants(of: int | None = None) -> list[int]:
    """Return the processes below one, this one by default."""
    found, waiting = [], [of or os.getpid()]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = list(map(int, path.read_text().split()))
                found += children
                waiting += children
    return found


def command(pid: int) -> str:
    """Return the command line of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
