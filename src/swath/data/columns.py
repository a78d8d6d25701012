"""One key of all frames of a replay buffer, `[capacity, *shape]`: rows in, rows out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch

from swath.data.frames import flat
from swath.memory import numpy_dtype
from swath.tree import Key

__all__ = ["WORTH_THREADS", "Column", "HostColumn", "Record", "Span", "column_of"]

Span = tuple[int, int, int]
"""Rows from start to stop, and how many frames of the batch stand before them."""

WORTH_THREADS = 4096
"""From this many bytes per frame on torch copies, since it has several threads for it."""
_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_NUMPY_KNOWS = {torch.from_numpy(np.zeros(1, name)).dtype for name in "?bhilBHILefdFD"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Column:
    """A key whose rows can be anywhere, on a GPU for example."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape[1:], tensor.dtype

    def put(
        self, spans: list[Span], value: torch.Tensor, mask: np.ndarray | None, skip: int
    ) -> None:
        """Copy the frames of `[*lead, *shape]` into rows, those of the mask, from `skip` on."""
        rows = flat(value, value.shape[: value.ndim - len(self.shape)], mask)
        for start, stop, at in spans:
            self.tensor[start:stop] = rows[skip + at : skip + at + stop - start]

    def put_back(self, rows: np.ndarray, value: torch.Tensor) -> None:
        """Copy frames `[frames, *shape]` into rows that stand anywhere."""
        self.tensor[torch.from_numpy(rows).to(self.tensor.device)] = value.to(self.tensor.device)

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Return a copy of these rows, `[*rows.shape, *shape]`."""
        return self.tensor[torch.from_numpy(rows).to(self.tensor.device)]


class HostColumn(Column):
    """A key in memory that numpy sees.

    The bytes of a frame are one item for it: a strided copy of `[N, T]` frames is then one call,
    and took a third of the time where measured; picking CartPole rows took a fifth of torch's.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        size, nbytes = math.prod(self.shape), math.prod(self.shape) * self.dtype.itemsize
        # numpy has not all of torch's types, and needs none of them to copy bytes.
        self._bits = self.dtype if self.dtype in _NUMPY_KNOWS else _BITS[self.dtype.itemsize]
        self.as_tensor: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
        if self._bits is not self.dtype:
            self.as_tensor = lambda values: torch.from_numpy(values).view(tensor.dtype)
        self.form = np.dtype((numpy_dtype(self._bits), tuple(self.shape)))
        self.item = np.dtype(_ITEMS.get(nbytes, f"V{nbytes}"))
        self.single = size == 1
        self._only: Any = (..., *[0] * len(self.shape))
        self.items = self._as_items(tensor)
        self.small = nbytes < WORTH_THREADS

    def put(
        self, spans: list[Span], value: torch.Tensor, mask: np.ndarray | None, skip: int
    ) -> None:
        items = self._as_items(value)
        if mask is None and not skip and len(spans) == 1:
            start, stop, _ = spans[0]
            self.items[start:stop].reshape(items.shape)[...] = items
            return
        rows = (items.reshape(-1) if mask is None else items[mask])[skip:]
        for start, stop, at in spans:
            self.items[start:stop] = rows[at : at + stop - start]

    def put_back(self, rows: np.ndarray, value: torch.Tensor) -> None:
        # Torch has no such assignment for all of its types: not for unsigned ones of 16 bits.
        if len(rows):
            self.items[rows] = self._as_items(value)

    def frames(self, value: torch.Tensor) -> np.ndarray:
        """Return `[*lead, *shape]` as an array `[*lead]` of `item`, or as it is if single.

        It is a view, if a frame is in one piece.
        """
        if self._bits is not self.dtype:
            value = value.detach().view(self._bits)
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):  # on a GPU, or with a gradient
            array = value.numpy(force=True)
        if self.single:
            return array
        if len(self.shape) > 1:
            array = array.reshape(*array.shape[: -len(self.shape)], -1)
        if array.strides[-1] != array.itemsize:
            array = np.ascontiguousarray(array)
        return array.view(self.item)[..., 0]

    def _as_items(self, value: torch.Tensor) -> np.ndarray:
        return self.frames(value)[self._only] if self.single else self.frames(value)

    def take(self, rows: np.ndarray) -> torch.Tensor:
        if not self.small:
            picked = self.tensor.index_select(0, torch.from_numpy(rows.reshape(-1)))
            return picked if rows.ndim == 1 else picked.view(*rows.shape, *self.shape)
        values = self.items.take(rows.reshape(-1), mode="clip").view(self.form.base)
        return self.as_tensor(values.reshape(rows.shape + self.form.shape))


class Record:
    """Columns whose values for a frame stand together: one access to memory for all of them.

    Args:
        columns: Those of one shape and dtype follow one another, and are picked together.
        block: All their bytes, `[capacity, bytes]`.
    """

    def __init__(self, columns: Mapping[Key, HostColumn], block: np.ndarray) -> None:
        self._items = block.view(f"V{block.shape[1]}")[:, 0]
        forms: dict[str, tuple[np.dtype[Any], int]] = {}  # what to copy, and where it begins
        self._members = []
        for number, (key, column) in enumerate(columns.items()):
            name, place = f"f{number}", column.tensor.data_ptr() - block.ctypes.data
            forms[name] = (column.form if column.single else column.item), place
            self._members.append((name, key, column))
        self._form = _structure(forms, block.shape[1])
        forms, self._kinds = {}, []
        for _, kind in groupby(columns.items(), lambda pair: (pair[1].dtype, pair[1].shape)):
            members = dict(kind)
            first = next(iter(members.values()))
            name, each = f"f{len(forms)}", first.form if first.single else first.item
            forms[name] = (
                np.dtype((each.base, (len(members), *each.shape))),
                first.tensor.data_ptr() - block.ctypes.data,
            )
            cast = None if first.single else first.form
            axes = [
                (rows, *range(rows), *range(rows + 1, rows + 1 + each.ndim)) for rows in range(3)
            ]
            self._kinds.append((name, list(members), axes, cast, first.as_tensor))
        self._kind_form = _structure(forms, block.shape[1])

    def put(
        self, span: Span, values: Mapping[Key, torch.Tensor], lead: torch.Size
    ) -> dict[Key, np.ndarray]:
        """Copy all frames of `[*lead, *shape]` into rows that stand in one piece.

        Returns what was copied, as numpy sees it; see `HostColumn.frames`.
        """
        rows = self._items[span[0] : span[1]].view(self._form).reshape(lead)
        seen = {}
        for name, key, column in self._members:
            rows[name] = seen[key] = column.frames(values[key])
        return seen

    def take(self, rows: np.ndarray) -> dict[Key, torch.Tensor]:
        """Return copies of rows, contiguous, by key."""
        # All rows exist; to be told so makes numpy twice as fast.
        records = self._items.take(rows.reshape(-1), mode="clip").view(self._kind_form)
        if rows.ndim > 1:
            records = records.reshape(rows.shape)
        found: dict[Key, torch.Tensor] = {}
        for name, members, axes, cast, as_tensor in self._kinds:
            values = records[name].transpose(axes[rows.ndim]).copy()
            if cast is not None:
                values = values.view(cast.base).reshape(values.shape + cast.shape)
            # Each key is a tensor of its own, not one of several views of one: those cannot be
            # written to where gradients are wanted.
            found.update(zip(members, map(as_tensor, values), strict=True))
        return found


def _structure(forms: Mapping[str, tuple[np.dtype[Any], int]], nbytes: int) -> np.dtype[Any]:
    formats, offsets = zip(*forms.values(), strict=True)
    return np.dtype(
        {"names": list(forms), "formats": formats, "offsets": offsets, "itemsize": nbytes}
    )


def column_of(tensor: torch.Tensor) -> Column:
    """Return the fastest column for a tensor `[capacity, *shape]`."""
    if tensor.is_cuda or not tensor.numel():
        return Column(tensor)
    return HostColumn(tensor)
