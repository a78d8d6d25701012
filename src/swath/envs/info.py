"""Numeric entries of the info dicts, stored below `("next", "info")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from swath.errors import UsageError
from swath.memory import Field, Slab, numpy_dtype, torch_dtype
from swath.rollout import CallFailed, keys

__all__ = ["InfoKeys"]


class InfoKeys:
    """Which entries are stored, and in which form.

    A name alone is stored as float64 with the shape it has in the info of the first reset (a number
    if it is not there), NaN where a step has none. A name with a gymnasium space is stored in the
    form of that space, 0 where a step has none.
    """

    def __init__(self, names: Sequence[str] | Mapping[str, gym.Space[Any]] = ()) -> None:
        if isinstance(names, str):
            raise UsageError(f"info_keys must be a list of names; got the string {names!r}.")
        self._spaces = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        self.fields: list[Field] = []

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def settle(self, info: Mapping[str, Any]) -> None:
        """Fix the form of each entry from the info of the first reset."""
        self.fields = [
            self._field(name, space, info.get(name)) for name, space in self._spaces.items()
        ]

    @staticmethod
    def _field(name: str, space: gym.Space[Any] | None, example: Any) -> Field:
        key = (*keys.INFO, name)
        if space is not None:
            if space.shape is None or space.dtype is None:
                raise UsageError(f"info_keys[{name!r}] must be a Box or Discrete; got {space}.")
            return Field(key, tuple(space.shape), torch_dtype(np.dtype(space.dtype), key))
        array = np.asarray(0.0 if example is None else example)
        if array.dtype.kind not in "fiub":
            raise UsageError(
                f"info[{name!r}] is a {type(example).__name__}, not a number or an array of "
                "numbers. Leave it out of info_keys, or convert it in a wrapper."
            )
        return Field(key, tuple(array.shape), torch.float64)

    def bind(self, slab: Slab) -> Callable[[Mapping[str, Any], int, int], None]:
        """Return the function that stores the info of env i at step t."""
        columns = [(f.key[-1], slab.arrays[f.key], _missing(f), f.shape) for f in self.fields]

        def store(info: Mapping[str, Any], t: int, i: int) -> None:
            for name, array, missing, shape in columns:
                value = info.get(name, missing)
                if np.shape(value) != shape and value is not missing:
                    raise CallFailed(
                        i,
                        "step()",
                        f"info[{name!r}] has shape {np.shape(value)}; {shape} was expected. Say "
                        f"what it is: info_keys={{{name!r}: gymnasium.spaces.Box(...)}}",
                    )
                array[t, i] = value

        return store


def _missing(field: Field) -> Any:
    return np.nan if numpy_dtype(field.dtype).kind == "f" else 0
