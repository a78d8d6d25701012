"""Numeric entries of the info dicts, stored below `("next", "info")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from swath.errors import UsageError
from swath.memory import Field, Slab, numpy_dtype, torch_dtype
from swath.rollout import CallFailed, keys

__all__ = ["InfoKeys", "InfoNames"]

InfoNames: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any]]"
"""Which entries to store: their names, or names with the spaces that give their form."""


class InfoKeys:
    """Which entries are stored, and in which form.

    A name alone is stored as float64 with the shape it has in the info of the first reset (a number
    if it is not there), NaN where a step has none. A name with a gymnasium space is stored in the
    form of that space, 0 where a step has none.
    """

    def __init__(self, names: InfoNames = ()) -> None:
        if isinstance(names, str):
            raise UsageError(f"info_keys must be a list of names; got the string {names!r}.")
        self._spaces = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        self.fields: list[Field] = []

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def settle(self, info: Mapping[str, Any]) -> None:
        """Fix the form of each entry from the info of the first reset."""
        self.fields = [_field(name, space, info.get(name)) for name, space in self._spaces.items()]

    def settle_vector(self, infos: Mapping[str, Any]) -> None:
        """Fix the form of each entry from the infos of a vector env's first reset."""
        some: dict[str, Any] = {}
        for name in self._spaces:
            values, there = infos.get(name), infos.get(f"_{name}")
            if values is not None and (there is None or np.any(there)):
                first = 0 if there is None else int(np.argmax(there))
                some[name] = values if isinstance(values, Mapping) else values[first]
        self.settle(some)

    def bind(self, slab: Slab) -> Callable[[Mapping[str, Any], int, int], None]:
        """Return the function that stores the info of env i at step t."""
        columns = [(f.key[-1], slab.arrays[f.key], _missing(f), f.shape) for f in self.fields]

        def store(info: Mapping[str, Any], t: int, i: int) -> None:
            for name, array, missing, shape in columns:
                value = info.get(name, missing)
                if np.shape(value) != shape and value is not missing:
                    raise CallFailed(i, "step()", _misfit(name, value, shape))
                try:
                    array[t, i] = value
                except (TypeError, ValueError) as error:
                    raise CallFailed(i, "step()", _misfit(name, value, shape)) from error

        return store

    def bind_vector(self, slab: Slab) -> Callable[[Mapping[str, Any], int, np.ndarray], None]:
        """Return the function that stores a vector env's infos of step t for these envs."""
        columns = [(f.key[-1], slab.arrays[f.key], _missing(f), f.shape) for f in self.fields]

        def store(infos: Mapping[str, Any], t: int, envs: np.ndarray) -> None:
            for name, array, missing, shape in columns:
                array[t, envs] = missing
                values, there = infos.get(name), infos.get(f"_{name}")
                having = envs if there is None else envs[np.asarray(there, bool)[envs]]
                if values is not None and len(having):
                    array[t, having] = _rows(name, values, having, shape)

        return store


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


def _rows(name: str, values: Any, envs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the entries of these envs, `[n, *shape]`."""
    try:
        rows = np.asarray(values)[envs]
        if rows.dtype == object:  # what a vector env does not know, a list say, it keeps as it is
            rows = np.asarray(rows.tolist())
    except (TypeError, ValueError, IndexError) as error:
        raise CallFailed(None, "step()", _misfit(name, values, shape)) from error
    if rows.shape[1:] != shape or rows.dtype.kind not in "fiub":
        raise CallFailed(None, "step()", _misfit(name, rows, (len(envs), *shape)))
    return rows


def _missing(field: Field) -> Any:
    return np.nan if numpy_dtype(field.dtype).kind == "f" else 0


def _misfit(name: str, value: Any, shape: tuple[int, ...]) -> str:
    return (
        f"info[{name!r}] is a {type(value).__name__} of shape {np.shape(value)}; numbers of shape "
        f"{shape} were expected. Say what it is with a space, "
        f"info_keys={{{name!r}: gymnasium.spaces.Box(...)}}, or leave it out"
    )
