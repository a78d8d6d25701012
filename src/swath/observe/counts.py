"""Counts that can be looked into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["CountOf"]


class CountOf(int):
    """How many rows there are, as a number; subscripted and iterated, the rows themselves.

    `stats()["workers"]` is one: monitors want a number there, and the pid of a worker has always
    been at `stats()["workers"][0]["pid"]`. Where it is pickled it becomes a plain number.

    Examples:
        >>> workers = CountOf([{"pid": 7}, {"pid": 8}])
        >>> workers == 2, workers[0]["pid"]
        (True, 7)
    """

    _rows: Sequence[Any]

    def __new__(cls, rows: Sequence[Any]) -> CountOf:
        count = super().__new__(cls, len(rows))
        count._rows = rows
        return count

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
