"""Counts that can be looked into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

__all__ = ["CountOf"]

Row: TypeAlias = "Mapping[str, object]"


class CountOf(int):
    """How many rows there are, as a number; subscripted and iterated, the rows themselves.

    `stats()["workers"]` is one: monitors want a number there, and the pid of a worker has always
    been at `stats()["workers"][0]["pid"]`. Where it is pickled it becomes a plain number.

    Examples:
        >>> workers = CountOf([{"pid": 7}, {"pid": 8}])
        >>> workers == 2, workers[0]["pid"]
        (True, 7)
    """

    _rows: Sequence[Row]

    def __new__(cls, rows: Sequence[Row]) -> CountOf:
        count = super().__new__(cls, len(rows))
        count._rows = rows
        return count

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
