"""What a policy answers: checked, then written into a row of the slab.

A form is what one value of the answer must look like. The same form refuses a wrong answer at
construction and at step one million, with the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.errors import PolicyError, UsageError
from swath.memory import Field, numpy_dtype, torch_dtype
from swath.tree import Key, Leaf, key_name

__all__ = ["Form", "Write", "check_free", "check_range", "extra_field", "to_array"]

Write = Callable[[int, Any], None]

_RESERVED: tuple[Key, ...] = tuple(
    (name,) for name in ("done", "terminated", "truncated", "next", "collector")
)
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

    @classmethod
    def of_action(cls, leaf: Leaf, batch: tuple[int, ...]) -> Form:
        """Return the form of a leaf of the action."""
        return cls(leaf.key, (*batch, *leaf.shape), torch_dtype(leaf.dtype, leaf.key), leaf)

    def fit(self, value: Any) -> np.ndarray:
        """Return any value as an array of this form, or say why it cannot be."""
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
                f"needed{self._for_what()}. Convert it in the policy, so that nothing is rounded "
                "behind your back."
            )
        return array.astype(dtype, copy=False)

    def check(self, row: np.ndarray) -> None:
        """Refuse an action that the action space does not have."""
        if self.leaf is not None:
            check_range(self.leaf, row)

    def writer(self, array: np.ndarray, *, carried: bool, batched: bool) -> Write:
        """Return the function that checks the value of step t and writes it.

        Args:
            array: The field in the slab, `[rows, N, *shape]`.
            carried: Whether the value belongs to the next row.
            batched: Whether values have the dimension N.
        """
        if self.leaf is not None and isinstance(self.leaf.space, spaces.Discrete) and not batched:
            return self._index_writer(array[:, 0])
        shape, dtype, fit, check = self.shape, numpy_dtype(self.dtype), self.fit, self._row_check()
        shift = int(carried)
        tensor = None if self.dtype is torch.bfloat16 else torch.Tensor  # numpy has no bfloat16

        def write(t: int, value: Any) -> None:
            # .numpy() is a view for a plain CPU tensor; whatever else comes takes the long way.
            if value.__class__ is tensor:
                try:
                    row = value.numpy()
                except (TypeError, RuntimeError):
                    row = fit(value)
                else:
                    if row.shape != shape or row.dtype != dtype:
                        row = fit(value)
            else:
                row = fit(value)
            if check is not None:
                check(row)
            array[t + shift] = row

        return write

    def _index_writer(self, column: np.ndarray) -> Write:
        """Return the writer of one env's discrete action: a Python int is the shortest way."""
        assert self.leaf is not None
        low, high = _bounds(self.leaf.space)
        fit, check, tensor, integer = self.fit, self.check, torch.Tensor, torch.int64

        def write(t: int, value: Any) -> None:
            if value.__class__ is tensor and value.dtype is integer and not value.ndim:
                index = value.item()
            else:
                index = fit(value).item()
            if not low <= index <= high:
                check(np.asarray(index))
            column[t] = index

        return write

    def _row_check(self) -> Callable[[np.ndarray], object] | None:
        """Return the fastest function that raises where `check` does."""
        if self.leaf is None:
            return None
        small, check = math.prod(self.shape) <= _SMALL, self.check
        if self.dtype.is_floating_point and small:
            # What has a finite sum is finite; `check` knows whether another sum just overflowed.
            return lambda row: math.isfinite(sum(row.ravel().tolist())) or check(row)
        space = self.leaf.space
        if isinstance(space, spaces.Discrete) and small and space.n <= 4096:
            there = frozenset(range(int(space.start), int(space.start + space.n)))
            return lambda row: there.issuperset(row.tolist()) or check(row)
        return None if _is_free(self.leaf) else check

    def _for_what(self) -> str:
        if self.leaf is None:
            return ", as at the first call"
        batch = self.shape[: len(self.shape) - len(self.leaf.shape)]
        return f" for the action space {self.leaf.space} and the batch shape {batch}"

    def _shape_hint(self, given: tuple[int, ...]) -> str:
        space = None if self.leaf is None else self.leaf.space
        if isinstance(space, spaces.Discrete) and given == (*self.shape, int(space.n)):
            return " It looks like logits or a one-hot vector: return its argmax(-1)."
        if given == (*self.shape, 1):
            return " Drop the last dimension with squeeze(-1)."
        if self.shape == (*given, 1):
            return " Add a last dimension with unsqueeze(-1)."
        return ""


def extra_field(key: Key, value: Any, batch: tuple[int, ...]) -> Field:
    """Return the field in which an extra output is stored, from its first value."""
    array = _numbers(key, value)
    if array.shape[: len(batch)] != batch:
        raise PolicyError(
            f"the policy's output {key_name(key)} has shape {array.shape}; it must start with the "
            f"batch shape {batch} of the policy's input, one entry for each env. Expand it."
        )
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch_dtype(array.dtype, key)
    return Field(key, array.shape[len(batch) :], dtype)


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
        f"the policy's output {key_name(key)} is {value!r}, of type {what}; numbers are needed, in "
        "a tensor or array of a dtype that numpy has. Leave it out, or convert it."
    )


def check_free(key: Key, taken: Iterable[Key]) -> None:
    """Refuse a key that would hide, or be hidden by, another one of the batch."""
    for other in (*taken, *_RESERVED):
        short = min(len(key), len(other))
        if key[:short] == other[:short]:
            whose = "swath fills in itself" if other in _RESERVED else "is taken already"
            hint = f" A state must be read at {key_name(key[1:])} too." if key[0] == "next" else ""
            raise UsageError(
                f"the policy's output {key_name(key)} clashes with {key_name(other)}, which "
                f"{whose}. Rename the output.{hint}"
            )


def check_range(leaf: Leaf, array: np.ndarray) -> None:
    """Refuse numbers that a discrete action space does not have, and non-finite ones."""
    if array.dtype.kind == "f":
        bad, wrong = ~np.isfinite(array), "is not finite"
    elif _is_free(leaf):
        return
    else:
        low, high = _bounds(leaf.space)
        bad, wrong = (array < low) | (array > high), f"is outside the action space {leaf.space}"
    if bad.any():
        rows = array.reshape(-1, *leaf.shape)
        row = int(bad.reshape(len(rows), -1).any(1).argmax())
        raise PolicyError(
            f"the policy's action {key_name(leaf.key)} {wrong}: {rows[row].tolist()} in row {row} "
            f"of {len(rows)}. Look for what the policy computes there."
        )


def _is_free(leaf: Leaf) -> bool:
    """Tell whether any whole number will do: envs with a Box clip or accept as they see fit."""
    kinds = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return leaf.dtype.kind != "f" and not isinstance(leaf.space, kinds)


def _bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1
