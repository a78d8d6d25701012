"""The ring of a replay buffer: columns of frames, and a ledger of which frames are whole.

```
 block:    | words | stamps | begins | before | an error |     columns: [capacity, *shape] by key
 a stamp:  0  nothing     -(i + 1)  frame i is being written     i + 1  frame i is whole
```

Frames are numbered from 0 in the order in which rows are claimed; frame i stands in row
i % capacity. A writer claims rows under the ledger's lock, which makes their stamps negative,
copies without it, and sets the final stamps under it. A reader copies without a lock: it looks at
the stamps, copies, and looks again. A frame that is not whole is never seen.

*Who owns what.* A writer owns the rows that it claimed, by a lock of the kernel on as many bytes of
the block's file, until they are whole: a writer that is a lap ahead waits for one that is slow, and
not for one that is dead. Both locks end with their process. What a killed writer had begun stays
negative until the ring comes round, or until somebody needs to know (`is_being_written`): a stamp
alone does not tell whether a writer lives. If it died while it changed the ledger, the next one
counts again. On the heap the same locks are between threads. What a process says for as long as it
lives (`Says`) are shared locks on the bytes after the rows.
"""

from __future__ import annotations

import enum
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swath.data.columns import WORTH_THREADS, Column, HostColumn, Record, Span, column_of
from swath.data.datasets import claimed, partial_of, write_about
from swath.data.files import (
    ABOUT,
    check_size,
    count_in,
    make_files,
    read_description,
    read_json,
    write_meta,
)
from swath.data.ledger import (
    CLOSED,
    ERROR_BYTES,
    FAILED,
    LEDGER,
    LEDGER_WORDS,
    OPEN,
    Word,
    check_ledger,
    ledger_size,
)
from swath.data.locks import How, Locks, locks_of
from swath.data.room import reserve
from swath.errors import UsageError
from swath.memory import Field, Layout, SharedMemory
from swath.shield import Shield
from swath.tree import Key, nest

__all__ = [
    "CLOSED",
    "ERROR_BYTES",
    "FAILED",
    "OPEN",
    "Handle",
    "Ring",
    "Word",
    "attach",
    "holds_ring",
    "make_ring",
    "open_ring",
]


_Tensors = Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class Handle:
    """All that another process needs to attach, beside the memory; it can be pickled."""

    fields: tuple[Field, ...]
    capacity: int
    directory: Path | None
    pace: Mapping[str, float | None]


class Says(enum.IntEnum):
    """What all are to know for as long as a process says it, and lives."""

    FEEDS = 0  # it has a collector that fills the buffer
    FREES = 1  # it does not want writers to be held back


class Ring:
    """Rows of frames and their ledger; see the top of the file.

    Args:
        columns: A tensor `[capacity, *shape]` for each key.
        block: The ledger's bytes.
        memory: That the ledger lies in, if others can attach to it.
        directory: That the columns lie in, if they do.
        record: That all small columns lie in, if they do: `[capacity, bytes]`.
    """

    def __init__(
        self,
        columns: _Tensors,
        block: np.ndarray,
        memory: SharedMemory | None = None,
        directory: Path | None = None,
        record: torch.Tensor | None = None,
    ) -> None:
        self.memory, self.directory = memory, directory
        self.fields = _fields(columns)
        self.capacity = capacity = len(next(iter(columns.values())))
        self.columns: dict[Key, Column] = {k: column_of(t) for k, t in columns.items()}
        self.tree = nest({key: key for key in columns})
        self._apart = dict(self.columns)
        self._record: Record | None = None
        if record is not None and not record.is_cuda:
            small = {k: c for k, c in self.columns.items() if isinstance(c, HostColumn) and c.small}
            self._apart = {k: c for k, c in self.columns.items() if k not in small}
            self._record = Record(small, record.numpy())
        whole = block[: 8 * (LEDGER_WORDS + 3 * capacity)].view(np.int64)
        # Python reads and writes single words of a memoryview in half of numpy's time.
        self.words = whole.data[:LEDGER_WORDS]
        rows = whole[LEDGER_WORDS:].reshape(3, capacity)
        self.stamps, self.begins, self.before = rows  # the last two are those of runs.py
        self._copies: dict[Key, np.ndarray] = {}
        self._error = block[len(whole) * 8 :]
        descriptor = None if memory is None else memory.descriptor
        self._locks = Locks() if descriptor is None else locks_of(descriptor)
        self._is_shared = descriptor is not None  # else there is nothing to ask the kernel for
        self.writing, self._feeds = self._locks.writing, False
        self.shield = Shield()

    def put(
        self,
        spans: list[Span],
        values: _Tensors,
        lead: torch.Size,
        mask: np.ndarray | None,
        skip: int,
    ) -> Mapping[Key, np.ndarray]:
        """Copy frames `[*lead, *shape]` into rows, those of the mask, from `skip` on.

        Returns those of them that numpy sees in full, where that was found out on the way.
        """
        columns, seen = self.columns, {}
        if self._record is not None and mask is None and not skip and len(spans) == 1:
            seen, columns = self._record.put(spans[0], values, lead), self._apart
        for key, column in columns.items():
            column.put(spans, values[key], mask, skip)
        return seen

    def take(self, rows: np.ndarray) -> dict[Key, torch.Tensor]:
        """Return copies of rows, by key."""
        values = {} if self._record is None else self._record.take(rows)
        for key, column in self._apart.items():
            values[key] = column.take(rows)
        return values

    def on_host(self, key: Key) -> np.ndarray:
        """Return one item for each row of a key; zeros, if there is none."""
        column = self.columns.get(key)
        if isinstance(column, HostColumn):
            return column.items
        if key not in self._copies:
            self._copies[key] = np.zeros(self.capacity, np.int64)
        return self._copies[key]

    def copy_to_host(self, key: Key, rows: Any) -> None:
        """Let `on_host` have these rows too, if they are out of the host's sight."""
        column = self.columns.get(key)
        if column is not None and not isinstance(column, HostColumn):
            values = column.tensor[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
            self.on_host(key)[rows] = values.numpy(force=True).reshape(-1)

    # -- the ledger -----------------------------------------------------------------------------

    def __enter__(self) -> Ring:
        """Take the ledger: nobody claims rows or makes them whole meanwhile, nor comes Ctrl-C."""
        self.shield.__enter__()
        self._locks.ledger.acquire()
        try:
            if self._is_shared:
                self._locks.lock(How.OWN, 0)
        except BaseException:  # without the lock nothing may be kept of what came before it
            self._locks.ledger.release()
            self.shield.__exit__()
            raise
        if self.words[Word.BUSY]:  # who had it was killed
            self._complete_change()
        self.words[Word.BUSY] = 1
        return self

    def _complete_change(self) -> None:
        """Take out what a writer meant to that was killed while it had the ledger, and count."""
        self.stamps[np.abs(self.stamps) <= self.window()[0]] = 0
        self.words[Word.HELD] = self._count_whole([(0, self.capacity, 0)])

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.words[Word.BUSY] = kind is not None
        if self._is_shared:
            self._locks.lock(How.LET_GO, 0)
        self._locks.ledger.release()
        self.shield.__exit__()

    def fence(self) -> None:
        """Keep processors that reorder memory accesses from doing so here: a lock does."""
        with self._locks.ledger:
            pass

    def claim(self, frames: int, allowed: Callable[[], bool]) -> int | None:
        """Return the number of the first frame to write, or None if it is to wait.

        The last `capacity` of the frames get rows; `writing` must be held until `commit`.
        """
        with self:
            first = self.words[Word.CLAIMED]
            kept = min(frames, self.capacity)
            spans = self.spans(first + frames - kept, kept)
            if self.words[Word.FREE] and not self._is_said(Says.FREES):
                self.words[Word.FREE] = 0  # who said so was killed
            if not allowed() or not self._own(spans):
                return None
            whole = kept if self.words[Word.HELD] == self.capacity else self._count_whole(spans)
            self.words[Word.HELD] -= whole
            self.words[Word.CLAIMED] = first + frames
            for start, stop, at in spans:
                number = first + frames - kept + at + 1
                self.stamps[start:stop] = np.arange(-number, start - stop - number, -1)
        return first + frames - kept

    def commit(self, first: int, kept: int, frames: int, version: int) -> None:
        """Make rows whole; those that `empty` has taken meanwhile are left out."""
        self.fence()
        spans = self.spans(first, kept)
        with self:
            if first >= self.words[Word.FLOOR]:
                for start, stop, _ in spans:
                    np.negative(self.stamps[start:stop], out=self.stamps[start:stop])
                self.words[Word.HELD] += kept
            self.words[Word.WRITTEN] += frames
            self.words[Word.NEWEST] = max(self.words[Word.NEWEST], version)
            self._disown(spans)

    def abandon(self, first: int, kept: int) -> None:
        """Give claimed rows up."""
        spans = self.spans(first, kept)
        with self:
            for start, stop, _ in spans:
                self.stamps[start:stop] = 0
            self._disown(spans)

    def clear(self) -> None:
        """Forget all frames; their numbers are not used again."""
        with self:
            self.words[Word.FLOOR], self.words[Word.CLEARED] = (
                self.words[Word.CLAIMED],
                self.words[Word.WRITTEN],
            )
            self.stamps[:] = 0
            self.words[Word.HELD] = 0

    def _count_whole(self, spans: list[Span]) -> int:
        return sum(int(np.count_nonzero(self.stamps[i:j] > 0)) for i, j, _ in spans)

    def _own(self, spans: list[Span]) -> bool:
        for start, stop, _ in spans if self._is_shared else ():
            if not self._locks.lock(How.OWN, 1 + start, stop - start, waits=False):
                self._disown(spans)
                return False
        return True

    def _disown(self, spans: list[Span]) -> None:
        for start, stop, _ in spans if self._is_shared else ():
            self._locks.lock(How.LET_GO, 1 + start, stop - start)

    def is_being_written(self) -> bool:
        """Tell whether somebody who lives is writing; what the dead had begun is cleared away."""
        if not (self.stamps < 0).any():
            return False
        # The kernel knows no threads: a lock that one of ours has would seem to be free, and its
        # end would be the end of theirs. Whoever of ours writes, or is about to, has this one.
        if self.memory is None or not self.writing.acquire(blocking=False):
            return True
        try:
            with self:
                rows = np.flatnonzero(self.stamps < 0)
                spans = [(int(r[0]), int(r[-1]) + 1, 0) for r in _stretches(rows)]
                dead = [span for span in spans if self._own([span])]
                for start, stop, _ in dead:
                    self.stamps[start:stop] = 0
                self._disown(dead)
            return len(dead) < len(spans)
        finally:
            self.writing.release()

    def feed(self, on: bool) -> None:
        """Let all know that this ring's user fills the buffer, until its process ends, or not."""
        with self:
            self._say(Says.FEEDS, on - self._feeds)
            self._feeds = on

    def is_fed(self) -> bool:
        """Tell whether somebody who lives has said so, in whatever process."""
        with self:
            return self._is_said(Says.FEEDS)

    def free(self, on: bool) -> None:
        """Hold no writer back until the same is called with False, or this process ends."""
        with self:
            self._say(Says.FREES, 1 if on else -1)
            self.words[Word.FREE] = self._is_said(Says.FREES)

    def _say(self, what: Says, more: int) -> None:
        """Note that so many more in this process say something; the ledger must be held."""
        said = self._locks.said
        said[what] = max(0, said.get(what, 0) + more)  # in a fork, its parent has said it
        how = How.SHARE if said[what] else How.LET_GO
        self._locks.lock(how, 1 + self.capacity + what)

    def _is_said(self, what: Says) -> bool:
        """Tell whether somebody who lives says it, in whatever process; see `_say`."""
        if self._locks.said.get(what) or self.memory is None:
            return bool(self._locks.said.get(what))
        byte = 1 + self.capacity + what
        free = self._locks.lock(How.OWN, byte, waits=False)
        if free:
            self._locks.lock(How.LET_GO, byte)
        return not free

    # -- what readers ask -----------------------------------------------------------------------

    def spans(self, first: int, frames: int) -> list[Span]:
        """Return the rows of consecutive frames: one span, or two if they cross the seam."""
        start = first % self.capacity
        if start + frames <= self.capacity:
            return [(start, start + frames, 0)]
        return [
            (start, self.capacity, 0),
            (0, start + frames - self.capacity, self.capacity - start),
        ]

    def rows(self, numbers: np.ndarray) -> Any:
        """Return the rows of frames in order; as a slice where they stand in one piece."""
        first, frames = int(numbers[0]), len(numbers)
        start = first % self.capacity
        if start + frames > self.capacity or numbers[-1] - first >= frames:
            return numbers % self.capacity
        return slice(start, start + frames)

    def window(self) -> tuple[int, int]:
        """Return the numbers from and up to which there can be frames."""
        high = self.words[Word.CLAIMED]
        return max(self.words[Word.FLOOR], high - self.capacity), high

    def whole(self, numbers: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Tell which of these frames are here and whole; `rows` saves computing them."""
        return self.stamps.take(numbers % self.capacity if rows is None else rows) == numbers + 1

    def numbers(self) -> np.ndarray:
        """Return the numbers of all frames that are whole, the oldest first."""
        return np.sort(self.stamps[self.stamps > 0]) - 1

    # -- the state of all who use it ------------------------------------------------------------

    def tell(self, state: int, error: bytes = b"") -> None:
        """Let everybody know that the buffer is closed or has failed."""
        error = error[:ERROR_BYTES]
        self._error[: len(error)] = np.frombuffer(error, np.uint8)
        self.words[Word.ERROR] = len(error)
        self.fence()
        self.words[Word.STATE] = state

    def let_go(self) -> None:
        """Let another buffer open the directory."""
        descriptor = None if self.memory is None else self.memory.descriptor
        if self.directory is not None and descriptor is not None:
            self._locks.let_go_of_file(descriptor)

    def told(self) -> bytes:
        """Return the error that was told."""
        return self._error[: self.words[Word.ERROR]].tobytes()


def _stretches(rows: np.ndarray) -> list[np.ndarray]:
    """Return rows, in order, in parts that have no gaps."""
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []


def _fields(columns: _Tensors) -> tuple[Field, ...]:
    return tuple(Field(key, tuple(one.shape[1:]), one.dtype) for key, one in columns.items())


def _layout(fields: Iterable[Field], capacity: int) -> tuple[Layout, dict[Key, int]]:
    """Return where fields stand, and for small ones where in the record that they share.

    All that is small of a frame is together, so that picking it is one access to memory, not one
    for each key. Larger items come first, which keeps all of them aligned.
    """
    small = [field for field in fields if 0 < _nbytes(field) < WORTH_THREADS]
    small.sort(key=lambda field: (-field.dtype.itemsize, str(field.dtype), field.shape))
    places, size = {}, 0
    for field in small:
        places[field.key] = size
        size += _nbytes(field)
    size = -(-size // 16) * 16
    large = [field for field in fields if field.key not in places]
    return Layout([Field((), (size,), torch.uint8), *large], capacity, 1), places


def _nbytes(field: Field) -> int:
    return math.prod(field.shape) * field.dtype.itemsize


def _columns(
    fields: Iterable[Field], block: torch.Tensor, capacity: int
) -> tuple[dict[Key, torch.Tensor], torch.Tensor | None]:
    layout, places = _layout(fields, capacity)
    tensors = {key: tensor[:, 0] for key, tensor in layout.tensors(block).items()}
    record = tensors.pop(())
    for field in sorted(fields, key=lambda field: places.get(field.key, 0)):
        if field.key in places:
            start = places[field.key]
            part = record[:, start : start + _nbytes(field)].view(field.dtype)
            tensors[field.key] = part.view(capacity, *field.shape)
    return tensors, record if places else None


def make_ring(frames: _Tensors, capacity: int, storage: str, directory: Path | None) -> Ring:
    """Return an empty ring for frames like these, `[frames, *shape]` each."""
    if storage == "memmap":
        assert directory is not None
        _make_files(frames, capacity, directory)
        return open_ring(capacity, directory)
    fields, size = _fields(frames), ledger_size(capacity)
    nbytes = _layout(fields, capacity)[0].nbytes
    if storage == "shared":
        return attach(fields, capacity, SharedMemory(size + nbytes))
    device = "cpu" if storage == "memory" else storage
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    columns, record = _columns(fields, block, capacity)
    return Ring(columns, np.zeros(size, np.uint8), record=record)


def attach(
    fields: Iterable[Field], capacity: int, memory: SharedMemory, directory: Path | None = None
) -> Ring:
    """Return a ring on memory that the maker of the buffer has sent."""
    block, rest = np.split(memory.array, [ledger_size(capacity)])
    if directory is not None:
        return Ring(_mapped(directory), block, memory, directory)
    columns, record = _columns(fields, torch.from_numpy(rest), capacity)
    return Ring(columns, block, memory, record=record)


def _make_files(frames: _Tensors, capacity: int, directory: Path) -> None:
    """Write files for `capacity` frames beside the directory, and give them its name."""
    partial = partial_of(claimed(directory))
    try:
        columns = make_files(partial, frames)
        files = {column.path: column.nbytes(capacity) for column in columns.values()}
        reserve(directory, {**files, partial / LEDGER: ledger_size(capacity)})
        write_meta(partial, columns, capacity)
        write_about(partial, {"capacity": capacity})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.is_dir():
        directory.rmdir()
    partial.rename(directory)


def holds_ring(directory: Path) -> bool:
    """Tell whether a directory is that of a buffer, even if it is one that has lost a file."""
    if (directory / LEDGER).exists():
        return True
    return (directory / ABOUT).exists() and "frames" not in read_json(directory / ABOUT)


def open_ring(capacity: int, directory: Path) -> Ring:
    """Return the ring that a directory holds, as its last writer left it."""
    about = read_json(directory / ABOUT)
    known = count_in(directory / ABOUT, about, "capacity", 1)
    if known != capacity:
        raise UsageError(
            f"{directory} has a buffer with capacity={known}, not {capacity}; give the same, or "
            "name another directory."
        )
    columns, ledger = read_description(directory).columns, directory / LEDGER
    check_size(ledger, ledger_size(capacity))
    memory = SharedMemory(ledger_size(capacity), os.open(ledger, os.O_RDWR))
    assert memory.descriptor is not None
    locks = locks_of(memory.descriptor)
    if not locks.claim_file(memory.descriptor):
        raise UsageError(
            f"{directory} is open in another buffer; close that buffer, or attach to it."
        )
    check_ledger(ledger, memory.array, capacity)
    reserve(directory, {column.path: column.nbytes(capacity) for column in columns.values()})
    ring = Ring(_mapped(directory), memory.array, memory, directory)
    ring.stamps[ring.stamps < 0] = 0  # what a killed writer had begun
    ring.words[Word.BUSY], ring.words[Word.STATE], ring.words[Word.FREE] = 1, OPEN, 0
    return ring


def _mapped(directory: Path) -> _Tensors:
    columns = read_description(directory).map()
    return {key: value.as_subclass(torch.Tensor) for key, value in columns.items()}
