"""What a policy answers: checked, then written into a row of the slab.

A form is what one value of the answer must look like. The same form refuses a wrong answer at
construction and at step one million, with the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.errors import PolicyError, UsageError
from swath.memory import Slab, leaf_dtype, numpy_dtype, torch_dtype
from swath.policies.choices import OneHot
from swath.tree import Key, Leaf, key_name

__all__ = ["DISCRETE", "LONE_ENV", "Form", "bounds", "check_free", "check_range", "to_array"]

Write = Callable[[int, Any], None]

LONE_ENV = (
    " A single env has no batch dimension, but this policy seems to need one. Pass the env in "
    "a list, [env], which adds a batch dimension of size 1."
)

DISCRETE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

_RESERVED: tuple[Key, ...] = tuple(
    (name,) for name in ("done", "terminated", "truncated", "next", "collector")
)
_BELOW_NEXT: tuple[Key, ...] = (("reward",), ("info",))
_SMALL = 64
"""Up to this many numbers plain Python checks a row faster than numpy does."""


def to_array(value: Any) -> np.ndarray:
    """Return a policy's output as numpy array, without a copy where it is a CPU tensor."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype is torch.bfloat16:
            value = value.view(torch.uint16)
        return value.numpy(force=True)
    return np.asarray(value)


@dataclass(frozen=True)
class Form:
    """What one output must look like at every step.

    Actions may be rounded to the dtype of their space, as envs do; all else must fit exactly.
    """

    key: Key
    shape: tuple[int, ...]
    """With the batch dimension, if there is one."""
    dtype: torch.dtype
    leaf: Leaf | None = None
    """The part of the action space that this is for."""
    leads: int = 1
    """How many dimensions of the shape count the envs."""

    @classmethod
    def of_action(cls, leaf: Leaf, batch: tuple[int, ...]) -> Form:
        """Return the form of a leaf of the action."""
        return cls(leaf.key, (*batch, *leaf.shape), leaf_dtype(leaf), leaf, len(batch))

    @classmethod
    def of_extra(cls, key: Key, value: Any, batch: tuple[int, ...]) -> Form:
        """Return the form of an extra output, from its first value."""
        array = _numbers(key, value)
        if array.shape[: len(batch)] != batch:
            raise PolicyError(
                f"the policy's output {key_name(key)} has shape {array.shape}; it must start with "
                f"the batch shape {batch} of the policy's input, one entry for each env. Expand it."
            )
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch_dtype(array.dtype, key)
        return cls(key, array.shape, dtype, leads=len(batch))

    def fit(self, value: Any) -> np.ndarray:
        """Return any value as an array of this form, or say why it cannot be."""
        if self.leaf is not None and self.leaf.exact:
            value = self._exactly(value)
        array = _numbers(self.key, value)
        if array.shape != self.shape:
            raise PolicyError(
                f"the policy's output {key_name(self.key)} has shape {array.shape}; {self.shape} "
                f"is needed{self._for_what()}.{self._shape_hint(array.shape)}"
            )
        dtype = numpy_dtype(self.dtype)
        given = value.dtype if isinstance(value, torch.Tensor) else array.dtype
        bits = torch.bfloat16 in (self.dtype, given)  # numpy knows them as uint16
        casting: Any = "safe" if self.leaf is None else "same_kind"
        if (bits and given is not self.dtype) or not np.can_cast(array.dtype, dtype, casting):
            raise PolicyError(
                f"the policy's output {key_name(self.key)} has dtype {given}; {self.dtype} is "
                f"needed{self._for_what()}. Convert it in the policy; swath does not round "
                "silently."
            )
        fitting = array.astype(dtype, copy=False)
        if dtype.kind in "iu" and fitting is not array and not np.array_equal(fitting, array):
            raise PolicyError(
                f"the policy's output {key_name(self.key)} has numbers that do not fit into "
                f"{self.dtype}, {array.min()} to {array.max()}{self._for_what()}. Check what "
                "the policy computes."
            )
        return fitting

    def _exactly(self, value: Any) -> Any:
        """Return a value in this form where that loses nothing, else as it is."""
        tensor = value.detach() if isinstance(value, torch.Tensor) else None
        if tensor is None:
            tensor = torch.from_numpy(_numbers(self.key, value).copy())
        space: Any = self.leaf and self.leaf.space
        if isinstance(space, OneHot) and len(space.sizes) == 1:
            tensor = _one_hot(tensor, self.shape)
        if tensor.shape == (*self.shape, 1) or (*tensor.shape, 1) == self.shape:
            tensor = tensor.reshape(self.shape)
        converted = tensor.to(self.dtype)
        return converted if torch.equal(converted.to(tensor.dtype), tensor) else tensor

    def writer(self, slab: Slab) -> Write:
        """Return the function that checks the value of step t and writes it."""
        carried, leaf = slab.layout.places[self.key].field.carried, self.leaf
        if not slab.arrays:
            return self._device_writer(slab.rows(self.key, (slab.layout.envs,)), int(carried))
        array = slab.arrays[self.key]
        if self.leads > 1:
            array = array.reshape(len(array), *self.shape)
        if leaf is not None and isinstance(leaf.space, spaces.Discrete) and not self.shape:
            return self._index_writer(leaf, array[:, 0])
        shape, dtype, fit, check = self.shape, numpy_dtype(self.dtype), self.fit, self._row_check()
        shift = int(carried)  # a state that comes out belongs to the next row
        tensor = None if self.dtype is torch.bfloat16 else torch.Tensor  # numpy has no bfloat16

        def write(t: int, value: Any) -> None:
            # .numpy() is a view for a plain CPU tensor; whatever else comes takes the long way.
            try:
                row = value.numpy() if value.__class__ is tensor else None
            except (TypeError, RuntimeError):
                row = None
            if row is None or row.shape != shape or row.dtype != dtype:
                row = fit(value)
            if check is not None:
                check(row)
            array[t + shift] = row

        return write

    def _device_writer(self, rows: Any, shift: int) -> Write:
        """Return the writer for a slab on a device: no number is looked at here."""

        def write(t: int, value: Any) -> None:
            rows[t + shift].copy_(self.as_tensor(value))

        return write

    def as_tensor(self, value: Any) -> torch.Tensor:
        """Return any value as a tensor of this form; one that is stays where it is."""
        fits = value.__class__ is torch.Tensor and value.shape == self.shape
        return value if fits and value.dtype is self.dtype else torch.from_numpy(self.fit(value))

    def _index_writer(self, leaf: Leaf, column: np.ndarray) -> Write:
        """Return the writer of one env's discrete action: a Python int is the shortest way."""
        low, high = bounds(leaf.space)
        fit, tensor, integer = self.fit, torch.Tensor, torch.int64

        def write(t: int, value: Any) -> None:
            if value.__class__ is tensor and value.dtype is integer and not value.ndim:
                index = value.item()
            else:
                index = fit(value).item()
            if not low <= index <= high:
                check_range(leaf, np.asarray(index))
            column[t] = index

        return write

    def _row_check(self) -> Callable[[np.ndarray], None] | None:
        """Return the fastest function that raises where `check_range` does."""
        leaf = self.leaf
        if leaf is None:
            return None
        check, space = partial(check_range, leaf), leaf.space
        if math.prod(self.shape) > _SMALL:
            return check
        if self.dtype.is_floating_point:
            # What has a finite sum is finite; `check` knows whether another sum just overflowed.
            return lambda row: None if math.isfinite(sum(row.ravel().tolist())) else check(row)
        if isinstance(space, spaces.Discrete) and space.n <= 4096 and len(self.shape) < 2:
            low, high = bounds(space)
            there = frozenset(range(low, high + 1))
            return lambda row: None if there.issuperset(row.tolist()) else check(row)
        return check

    def _for_what(self) -> str:
        if self.leaf is None:
            return ", as at the first call"
        batch = self.shape[: len(self.shape) - len(self.leaf.shape)]
        return f" for the action space {self.leaf.space} and the batch shape {batch}"

    def _shape_hint(self, given: tuple[int, ...]) -> str:
        space = None if self.leaf is None else self.leaf.space
        if isinstance(space, spaces.Discrete) and given == (*self.shape, int(space.n)):
            return " It looks like logits or a one-hot vector: return its argmax(-1)."
        if not self.leads and given == (1, *self.shape):
            return LONE_ENV
        if given == (*self.shape, 1):
            return " Drop the last dimension with squeeze(-1)."
        if self.shape == (*given, 1):
            return " Add a last dimension with unsqueeze(-1)."
        return ""


def _one_hot(index: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an index as the vector that has its one there; anything else as it is."""
    if index.shape != shape[:-1] or index.is_floating_point() or index.dtype is torch.bool:
        return index
    hot = torch.nn.functional.one_hot
    return hot(index.long(), shape[-1]) if ((index >= 0) & (index < shape[-1])).all() else index


def _numbers(key: Key, value: Any) -> np.ndarray:
    """Return a value as array, or refuse what has no place in a tensor."""
    try:
        array = to_array(value)
    except (TypeError, ValueError):
        array = np.empty((), object)
    if array.dtype.kind in "biufc":
        return array
    what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    raise PolicyError(
        f"the policy's output {key_name(key)} is {value!r}, of type {what}; numbers are needed, "
        "in a tensor or array of a dtype that numpy has. Remove it, or convert it."
    )


def check_free(key: Key, taken: Iterable[Key], also_at_root: bool = False) -> None:
    """Refuse a key that would hide, or be hidden by, another one of the batch.

    Args:
        key: Where the policy writes.
        taken: What stands at the root.
        also_at_root: What it writes below `next` stands at the root as well, and is read there.
    """
    if also_at_root and key[0] == "next":
        key, others, under = key[1:], (*taken, *_RESERVED, *_BELOW_NEXT), "next "
    else:
        others, under = (*taken, *_RESERVED), ""
    for other in others:
        short = min(len(key), len(other))
        if key[:short] == other[:short]:
            ours = other in _RESERVED or other in _BELOW_NEXT
            whose = "swath fills in itself" if ours else "is taken already"
            hint = f" A state must be read at {key_name(key[1:])} too." if key[0] == "next" else ""
            raise UsageError(
                f"the policy's {under}output {key_name(key)} clashes with {key_name(other)}, "
                f"which {whose}. Rename the output.{hint}"
            )


def check_range(leaf: Leaf, array: np.ndarray) -> None:
    """Refuse numbers that a discrete action space does not have, and non-finite ones."""
    if array.dtype.kind == "f":
        bad, wrong = ~np.isfinite(array), "not finite"
    elif isinstance(leaf.space, DISCRETE):
        low, high = bounds(leaf.space)
        bad, wrong = (array < low) | (array > high), "outside the action space {space}"
    else:
        return  # envs with a Box of whole numbers clip or accept as they see fit
    if bad.any():
        wrong = wrong.format(space=leaf.space)  # here, as describing a space takes its time
        rows = array.reshape(-1, *leaf.shape)
        row = int(bad.reshape(len(rows), -1).any(1).argmax())
        raise PolicyError(
            f"the policy's action {key_name(leaf.key)} is {wrong}: {rows[row].tolist()} in row "
            f"{row} of {len(rows)}. Check what the policy computes there."
        )


def bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest number that a space has; those of a Box as float64."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.Box):
        return space.low.astype(np.float64), space.high.astype(np.float64)
    return 0, 1
