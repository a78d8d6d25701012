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
        self._only: Any = (..., *[0] * len(self.shape)) if size == 1 else None
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

    def _as_items(self, value: torch.Tensor) -> np.ndarray:
        """Return `[*lead, *shape]` as an array `[*lead]`; a view, if a frame is in one piece."""
        if value.requires_grad or value.is_cuda:
            value = value.detach().cpu()
        array = (value if self._bits is self.dtype else value.view(self._bits)).numpy()
        if self._only is not None:
            return array[self._only]
        if len(self.shape) > 1:
            array = array.reshape(*array.shape[: -len(self.shape)], -1)
        if array.strides[-1] != array.itemsize:
            array = np.ascontiguousarray(array)
        return array.view(self.item)[..., 0]

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
        self._kinds: list[tuple[str, list[Key], Any, tuple[int, ...], Any]] = []
        forms, places = [], []
        for _, kind in groupby(columns.items(), lambda pair: (pair[1].dtype, pair[1].shape)):
            members = dict(kind)
            first = next(iter(members.values()))
            forms.append(np.dtype((first.item, (len(members),))))
            places.append(first.tensor.data_ptr() - block.ctypes.data)
            name, shape = f"f{len(self._kinds)}", tuple(first.shape)
            self._kinds.append((name, list(members), first.form.base, shape, first.as_tensor))
        names = [name for name, *_ in self._kinds]
        self._form = np.dtype(
            {"names": names, "formats": forms, "offsets": places, "itemsize": block.shape[1]}
        )

    def take(self, rows: np.ndarray) -> dict[Key, torch.Tensor]:
        """Return copies of rows, contiguous, by key."""
        # All rows exist; to be told so makes numpy twice as fast.
        records = self._items.take(rows.reshape(-1), mode="clip").view(self._form)
        found: dict[Key, torch.Tensor] = {}
        for name, members, dtype, shape, as_tensor in self._kinds:
            values = records[name].T.copy().view(dtype)
            values = values.reshape((len(members), *rows.shape, *shape))
            # Each key is a tensor of its own, not one of several views of one: those cannot be
            # written to where gradients are wanted.
            found.update(zip(members, map(as_tensor, values), strict=True))
        return found


def column_of(tensor: torch.Tensor) -> Column:
    """Return the fastest column for a tensor `[capacity, *shape]`."""
    if tensor.is_cuda or not tensor.numel():
        return Column(tensor)
    return HostColumn(tensor)
