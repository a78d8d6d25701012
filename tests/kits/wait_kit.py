"""Waiting in tests: by looks, not by the clock.

The clock goes on while a whole machine stands still, as virtual ones do at times. Whoever waits by
the clock may be the first to run after that, and would report what had no chance to happen.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def comes_true(told: Callable[[], object], within: float = 20.0, every: float = 0.01) -> bool:
    """Look until something is true, at most as often as fits into so many seconds."""
    for _ in range(round(within / every)):
        if told():
            return True
        time.sleep(every)
    return bool(told())


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended does not, also if nobody has asked how."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: Iterable[int], within: float = 20.0) -> bool:
    """Wait until these processes have ended; pytest shows what those that have not are doing."""
    pids = list(pids)
    if comes_true(lambda: not any(map(alive, pids)), within):
        return True
    for pid in filter(alive, pids):
        with contextlib.suppress(OSError):
            for name in ("status", "wchan", "stack", "cmdline"):
                text = Path(f"/proc/{pid}/{name}").read_text().replace("\0", " ")
                sys.stderr.write(f"-- {name} of process {pid}\n{text}\n")
    return False
