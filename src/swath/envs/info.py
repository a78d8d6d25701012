"""Numeric entries of the info dicts, stored below `("next", "info")`.

A name alone is stored as float64 with the shape it has in the info of the first reset (a number if
it is not there), NaN where a step has none. A name with a gymnasium space is stored in the form of
that space, 0 where a step has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from swath.errors import UsageError
from swath.memory import Field, Slab, torch_dtype
from swath.rollout import CallFailed, keys

__all__ = [
    "InfoNames",
    "first_present",
    "info_fields",
    "info_writer",
    "vector_info_writer",
    "warn_unseen",
]

InfoNames: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any]]"
"""Which entries to store: their names, or names with the spaces that give their form."""


def info_fields(names: InfoNames, first_info: Callable[[], Mapping[str, Any]]) -> list[Field]:
    """Return the field of each entry; an info is asked for only if there are entries to store."""
    if isinstance(names, str):
        raise UsageError(f"info_keys must be a list of names; got the string {names!r}.")
    spaces = names if isinstance(names, Mapping) else dict.fromkeys(names)
    info = first_info() if spaces else {}
    return [_field(name, space, info.get(name)) for name, space in spaces.items()]


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


def first_present(infos: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return these entries of a vector env's infos, each of the first env that has it."""
    info = {}
    for name in names:
        values, there = infos.get(name), infos.get(f"_{name}")
        if values is not None and (there is None or np.any(there)):
            first = 0 if there is None else int(np.argmax(there))
            info[name] = values if isinstance(values, Mapping) else values[first]
    return info


def warn_unseen(unseen: set[str]) -> None:
    """Say once which entries no info has had, when the first episode has ended without them."""
    names = sorted(unseen)
    unseen.clear()
    warnings.warn(
        f"info_keys names {', '.join(map(repr, names))}, but no info had it until the first "
        "episode ended: it is stored as missing (NaN, or 0 with a space) until an info has it. "
        "Check the spelling, or leave it out.",
        stacklevel=2,
    )


def info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[str]
) -> Callable[[Mapping[str, Any], int, int], None]:
    """Return the function that stores the info of env i at step t.

    Args:
        fields: The entries to store.
        slab: Where to.
        unseen: Those that no info has had yet; brought up to date while there are any.
    """
    columns = _columns(fields, slab)

    def store(info: Mapping[str, Any], t: int, i: int) -> None:
        for name, array, missing, shape in columns:
            value = info.get(name, missing)
            array[t, i] = value if value is missing else _numbers(name, value, shape, env=i)

    def watch(info: Mapping[str, Any], t: int, i: int) -> None:
        unseen.difference_update(info)
        store(info, t, i)

    return watch if unseen else store


def vector_info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[str]
) -> Callable[[Mapping[str, Any], int, np.ndarray], None]:
    """Return the function that stores a vector env's infos of step t for these envs."""
    columns = _columns(fields, slab)

    def store(infos: Mapping[str, Any], t: int, envs: np.ndarray) -> None:
        for name, array, missing, shape in columns:
            array[t, envs] = missing
            values, there = infos.get(name), infos.get(f"_{name}")
            having = envs if there is None else envs[np.asarray(there, bool)[envs]]
            if values is not None and len(having):
                array[t, having] = _numbers(name, values, (len(having), *shape), having)

    def watch(infos: Mapping[str, Any], t: int, envs: np.ndarray) -> None:
        unseen.difference_update(infos)
        store(infos, t, envs)

    return watch if unseen else store


def _columns(fields: Sequence[Field], slab: Slab) -> list[tuple[str, np.ndarray, Any, Any]]:
    """Return of each entry its name, its column, what stands for a missing one, and its shape."""
    return [
        (f.key[-1], slab.arrays[f.key], np.nan if f.dtype.is_floating_point else 0, f.shape)
        for f in fields
    ]


def _numbers(
    name: str, value: Any, shape: tuple[int, ...], rows: Any = ..., env: int | None = None
) -> np.ndarray:
    """Return an entry, or these rows of it, as numbers of this shape."""
    what, cause = type(value).__name__, None
    try:
        array = np.asarray(value)[rows]
        what += f" of shape {array.shape}"
        if array.dtype == object:  # what a vector env does not know, a list say, it keeps as it is
            array = np.asarray(array.tolist())
        if array.shape == shape and array.dtype.kind in "fiub":
            return array
    except (TypeError, ValueError, IndexError) as error:
        cause = error
    text = (
        f"info[{name!r}] is a {what}; numbers of shape {shape} were expected. Say what it is with "
        f"a space, info_keys={{{name!r}: gymnasium.spaces.Box(...)}}, or leave it out"
    )
    raise CallFailed(env, "step()", text) from cause
