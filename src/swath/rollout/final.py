"""The observations that no other row of a compact batch holds."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

__all__ = ["FinalObservations"]


class FinalObservations:
    """A small table beside a compact batch, which goes with it as a whole.

    It is no TensorDict itself: buffers and `torch.stack` compare entries that are no tensors, and
    the comparison of two TensorDicts is not one answer. Two of these are equal if they are one.

    Args:
        table: The observations, `[rows]`, under the keys that they have in the batch.
    """

    def __init__(self, table: TensorDict) -> None:
        self.table = table

    def __getitem__(self, key: Any) -> Any:
        return self.table[key]

    def __len__(self) -> int:
        return len(self.table)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"FinalObservations({len(self)} of {sorted(map(str, self.table.keys(True, True)))})"
