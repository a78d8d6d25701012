"""The ledger of a replay buffer on disk: what it must look like, whoever wrote it last.

```
 DIR/replay.bin:    | words | stamps | begins | before | an error |      see storage.py
```

A ledger that stands still follows from few of its numbers: row r holds the newest frame i below
`CLAIMED` with i % capacity == r, or nothing. So one that was damaged is told from a good one.
`BUSY` says where a writer was killed while it changed the ledger: less can be asked of that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swath.data.files import check_size, damaged

__all__ = [
    "CLOSED",
    "ERROR_BYTES",
    "FAILED",
    "LEDGER",
    "LEDGER_WORDS",
    "OPEN",
    "Word",
    "check_ledger",
    "ledger_size",
    "read_stamps",
]

LEDGER = "replay.bin"
"""In the directory of a replay buffer: words, then a stamp for each row."""
LEDGER_WORDS = 16
ERROR_BYTES = 1 << 14


class Word:
    """The words of a ledger, shared by all who use it."""

    CLAIMED = 0  # frames for which there was ever a row
    FLOOR = 1  # the number of the first one since `empty`
    HELD = 2  # rows that are whole
    WRITTEN = 3  # frames written
    CLEARED = 4  # how many of them before the last `empty`
    DRAWN = 5  # samples drawn
    NEWEST = 6  # the newest policy version
    RUNS = 7  # whether begins and before are kept
    BUSY = 8  # whether somebody changes the ledger
    STATE = 9  # OPEN, CLOSED or FAILED
    ERROR = 10  # bytes of the error
    FREE = 11  # whether somebody who may live does not want writers to be held back
    STARVED = 12  # 1 + how many frames were written when somebody could not draw; see pacing.py
    LOADED = 13  # how often a state was loaded: numbers mean other frames since


OPEN, CLOSED, FAILED = range(3)


def ledger_size(capacity: int) -> int:
    """Return how many bytes the ledger of so many rows has."""
    return -(-(8 * (LEDGER_WORDS + 3 * capacity) + ERROR_BYTES) // 64) * 64


def read_stamps(path: Path, capacity: int) -> np.ndarray:
    """Return the stamps of a ledger that others may be changing meanwhile.

    What contradicts itself is read again: if it has changed, somebody is writing; if not, the file
    is damaged.
    """
    check_size(path, ledger_size(capacity))
    first, second = (np.fromfile(path, np.uint8, ledger_size(capacity)) for _ in range(2))
    check_ledger(path, second, capacity, standing=np.array_equal(first, second))
    return _parts(second, capacity)[1]


def check_ledger(path: Path, block: np.ndarray, capacity: int, standing: bool = True) -> None:
    """Refuse a ledger that no writer can have left.

    Args:
        path: Where it is.
        block: Its bytes.
        capacity: Its rows.
        standing: Whether nobody changed it while it was read.
    """
    words, stamps, begins, before = _parts(block, capacity)
    held = np.flatnonzero(stamps)
    numbers = np.abs(stamps[held]) - 1
    wrong = (
        (words < 0).any()
        or words[[Word.RUNS, Word.BUSY]].max() > 1
        or words[Word.STATE] > FAILED
        or words[Word.ERROR] > ERROR_BYTES
        or (numbers % capacity != held).any()
    )
    if standing and not wrong:
        wrong = _counts_differ(words, stamps, numbers)
        if words[Word.RUNS]:
            rows = np.flatnonzero(stamps > 0)
            wrong = wrong or _runs_differ(stamps[rows] - 1, begins[rows], before[rows])
    if wrong:
        raise damaged(path, "contradicts itself", "the ledger of a buffer was expected")


def _counts_differ(words: np.ndarray, stamps: np.ndarray, numbers: np.ndarray) -> bool:
    """Tell whether the words do not go with the frames that are there."""
    claimed, floor, held = (int(words[one]) for one in (Word.CLAIMED, Word.FLOOR, Word.HELD))
    if (numbers >= claimed).any():
        return True
    if words[Word.BUSY]:  # a writer was killed in the middle of a change; `Ring` completes it
        return False
    lowest = max(floor, claimed - len(stamps))
    return held != np.count_nonzero(stamps > 0) or bool((numbers < lowest).any())


def _runs_differ(numbers: np.ndarray, begins: np.ndarray, before: np.ndarray) -> bool:
    """Tell whether whole frames stand in stretches that cannot be; see runs.py."""
    before = before[begins == numbers]
    first = numbers[begins == numbers]
    far = (before < -1) | (before >= np.maximum(first, 1))
    return bool((begins < 0).any() or (begins > numbers).any() or far.any())


def _parts(block: np.ndarray, capacity: int) -> tuple[np.ndarray, ...]:
    """Return the words of a ledger, and its three numbers for each row."""
    whole = block[: 8 * (LEDGER_WORDS + 3 * capacity)].view(np.int64)
    return whole[:LEDGER_WORDS], *whole[LEDGER_WORDS:].reshape(3, capacity)
