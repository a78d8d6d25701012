"""Where each field of a rollout stands in one block of memory.

A layout is computed once, from the spaces and one probe of the policy. Both ends of a link that
hold the same layout can read a slab from its bytes alone, so it never has to travel again.

```
block:  | field 0: [rows, N, *shape] | pad | field 1: [rows, N, *shape] | pad | ...
```

Time comes first in memory (`order="time"`): a step of N envs is one contiguous row. With
`order="batch"` each field is stored `[N, rows, *shape]`; the views have the same shape, only their
strides differ. docs/decisions/001-time-first.md has the measurements behind the default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from swath.errors import UsageError
from swath.tree import Key, Leaf, key_name, nest

__all__ = [
    "ALIGNMENT",
    "Field",
    "Layout",
    "MemoryOrder",
    "Place",
    "View",
    "leaf_dtype",
    "nested_shapes",
    "numpy_dtype",
    "tensors_on",
    "torch_dtype",
]

ALIGNMENT = 64  # a cache line; also enough for every vector instruction

MemoryOrder = Literal["time", "batch"]

_TORCH_OF_NUMPY: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_NUMPY_OF_TORCH = {torch_type: np.dtype(name) for name, torch_type in _TORCH_OF_NUMPY.items()}
# numpy has no bfloat16: its bytes are kept as uint16 and only torch gives them a meaning.
_NUMPY_OF_TORCH[torch.bfloat16] = np.dtype(np.uint16)
_RENAMED = {torch.bfloat16}


def torch_dtype(dtype: np.dtype[np.generic], key: Key) -> torch.dtype:
    """Return the torch dtype with the same bytes, or refuse with the key that has it."""
    try:
        return _TORCH_OF_NUMPY[np.dtype(dtype).name]
    except KeyError:
        raise UsageError(
            f"{key_name(key)} has dtype {dtype}, which torch does not have. Convert it with a "
            "Gymnasium wrapper, to float32 for example."
        ) from None


def leaf_dtype(leaf: Leaf) -> torch.dtype:
    """Return the torch dtype of a leaf; its space names it where numpy has none."""
    named: torch.dtype | None = getattr(leaf.space, "torch_dtype", None)
    return torch_dtype(leaf.dtype, leaf.key) if named is None else named


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    """Return the numpy dtype of the same bytes."""
    return _NUMPY_OF_TORCH[dtype]


@dataclass(frozen=True)
class Field:
    """One key of a slab: what it holds for one env at one step."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    carried: bool = False
    """Has one row more than there are steps: row t + 1 is what step t leads to."""
    delivered: bool = True
    """Is part of the batch; the others are working memory of the loop."""
    nested: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """Of each TensorDict that it lies in below the root: how many dimensions of `shape` are batch
    dimensions of that TensorDict (the agents of a group, say). None, beyond the end."""


@dataclass(frozen=True)
class Place:
    """A field with its offset in bytes and its number of rows."""

    field: Field
    offset: int
    rows: int


class View(NamedTuple):
    """One field as a tensor on a block; strides and offset are in bytes."""

    key: Key
    dtype: torch.dtype
    numpy_dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    renamed: bool
    """Numpy sees the bytes as something else, for want of such a dtype."""

    @classmethod
    def of(cls, place: Place, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        """Return a place in this form; `strides` counts elements."""
        dtype = place.field.dtype
        apart = tuple(stride * dtype.itemsize for stride in strides)
        kind = numpy_dtype(dtype)
        renamed = dtype in _RENAMED
        return cls(place.field.key, dtype, kind, shape, apart, place.offset, renamed)

    def of_tensor(self, block: torch.Tensor) -> torch.Tensor:
        """Return a view on a flat uint8 tensor, whose storage it shares."""
        size = self.dtype.itemsize
        strides = [stride // size for stride in self.strides]
        return block.view(self.dtype).as_strided(self.shape, strides, self.offset // size)


def tensors_on(block: np.ndarray, views: Iterable[View]) -> dict[Key, torch.Tensor]:
    """Return tensors on a flat uint8 array. The storage of each is its own and spans it alone."""
    tensors = {}  # all in one loop: every batch comes from here
    for key, dtype, kind, shape, strides, offset, renamed in views:
        tensor = torch.from_numpy(np.ndarray(shape, kind, block, offset, strides))
        tensors[key] = tensor.view(dtype) if renamed else tensor
    return tensors


class Layout:
    """The fields of a rollout of `steps` steps of `envs` envs, placed in one block.

    Examples:
        >>> layout = Layout([Field(("reward",), (1,), torch.float32)], steps=10, envs=4)
        >>> layout.nbytes
        192
    """

    def __init__(
        self, fields: Iterable[Field], steps: int, envs: int, order: MemoryOrder = "time"
    ) -> None:
        self.steps, self.envs, self.order = steps, envs, order
        self.places: dict[Key, Place] = {}
        offset = 0
        for field in fields:
            if field.key in self.places:
                raise UsageError(
                    f"two entries have the key {key_name(field.key)}. Rename the observation, "
                    "the policy output or the info entry that clashes."
                )
            self._refuse_overlap(field.key)
            place = Place(field, offset, steps + field.carried)
            self.places[field.key] = place
            size = place.rows * envs * math.prod(field.shape)
            offset += -(-size * field.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.nbytes = offset
        self.nested = nested_shapes([place.field for place in self.places.values()])
        """The TensorDicts in a batch that have batch dimensions of their own, and which."""

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The delivered fields as nested dicts, each with its key."""
        keys = [place.field.key for place in self.places.values() if place.field.delivered]
        return nest({key: key for key in keys})

    def _refuse_overlap(self, key: Key) -> None:
        """Refuse a key that others stand below, or that stands below another."""
        for other in self.places:
            short, long = sorted((key, other), key=len)
            # The key () is that of a replay buffer's rows, which are no entry of a batch.
            if short and long[: len(short)] == short:
                raise UsageError(
                    f"{key_name(short)} is the key of a value, but {key_name(long)} is below "
                    "it. Rename the observation, the policy output or the info entry that "
                    "clashes; 'next' and 'collector' are reserved for swath."
                )

    def array(self, block: np.ndarray, place: Place) -> np.ndarray:
        """Return a field of a block of bytes as a numpy view `[rows, N, *shape]`."""
        shape, strides = self._form(place)
        dtype = numpy_dtype(place.field.dtype)
        return np.ndarray(
            shape, dtype, block.data, place.offset, [s * dtype.itemsize for s in strides]
        )

    def tensors(self, block: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return all fields of a flat uint8 tensor as views `[rows, N, *shape]`."""
        places = self.places.values()
        return {p.field.key: View.of(p, *self._form(p)).of_tensor(block) for p in places}

    @lru_cache(maxsize=8)  # noqa: B019 - a layout lives as long as its collector
    def batch(self, steps: int, lead: tuple[int, ...]) -> tuple[View, ...]:
        """Return where the delivered fields stand as `[*lead, steps, *shape]`.

        Args:
            steps: How many steps.
            lead: How the envs are arranged: their product is the number of envs, `()` for one.
        """
        assert math.prod(lead) == self.envs
        views = []
        for place in self.places.values():
            if place.field.delivered:
                (_, _, *shape), (row, env, *strides) = self._form(place)
                apart = [env * math.prod(lead[i + 1 :]) for i in range(len(lead))]
                views.append(View.of(place, (*lead, steps, *shape), (*apart, row, *strides)))
        return tuple(views)

    def _form(self, place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides (in elements) of the view `[rows, N, *shape]`."""
        shape = place.field.shape
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        one = math.prod(shape)
        leading = (self.envs * one, one) if self.order == "time" else (one, place.rows * one)
        return (place.rows, self.envs, *shape), (*leading, *inner)


def nested_shapes(fields: Sequence[Field]) -> dict[Key, tuple[int, ...]]:
    """Return the batch dimensions of nested TensorDicts beyond those of the root, outer ones first.

    Examples:
        >>> field = Field(("agents", "reward"), (3, 1), torch.float32, nested=(1,))
        >>> nested_shapes([field])
        {('agents',): (3,)}
    """
    shapes: dict[Key, tuple[int, ...]] = {}
    for field in fields:
        for depth, dims in enumerate(field.nested, 1):
            if dims and field.delivered:
                shapes[field.key[:depth]] = field.shape[:dims]

    def fits(prefix: Key, shape: tuple[int, ...]) -> bool:
        # A policy may write something there that has no such dimensions.
        inside = (f for f in fields if f.delivered and f.key[: len(prefix)] == prefix)
        return all(field.shape[: len(shape)] == shape for field in inside)

    return {key: shapes[key] for key in sorted(shapes, key=len) if fits(key, shapes[key])}
