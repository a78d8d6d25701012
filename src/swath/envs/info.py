"""Numeric entries of the info dicts, stored below `("next", "info")`.

A name alone is stored as float64 with the shape it has in the info of the first reset (a number if
it is not there), NaN where a step has none. A name with a gymnasium space is stored in the form of
that space, 0 where a step has none. A tuple of names leads into infos that hold dicts.
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
    "InfoName",
    "InfoNames",
    "first_present",
    "info_fields",
    "info_writer",
    "vector_info_writer",
    "warn_unseen",
    "with_nested",
]

InfoName: TypeAlias = "str | tuple[str, ...]"
InfoNames: TypeAlias = "Sequence[InfoName] | Mapping[InfoName, gym.Space[Any]]"
"""Which entries to store: their names, or names with the spaces that give their form."""


def info_fields(names: InfoNames, first_info: Callable[[], Mapping[str, Any]]) -> list[Field]:
    """Return the field of each entry; an info is asked for only if there are entries to store."""
    if isinstance(names, str):
        raise UsageError(f"info_keys must be a list of names; got the string {names!r}.")
    for name in names:
        if (
            not name
            or not isinstance(name, (str, tuple))
            or not all(isinstance(p, str) for p in name)
        ):
            raise UsageError(f"info_keys has {name!r}; expected a name or a tuple of names.")
    spaces = names if isinstance(names, Mapping) else dict.fromkeys(names)
    info = with_nested(first_info(), names) if spaces else {}
    return [_field(name, space, info.get(name)) for name, space in spaces.items()]


def _field(name: InfoName, space: gym.Space[Any] | None, example: Any) -> Field:
    key = (*keys.INFO, *(name if isinstance(name, tuple) else (name,)))
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


def with_nested(info: Mapping[Any, Any], names: Iterable[InfoName]) -> Mapping[Any, Any]:
    """Return the info with the entries of its dicts that tuples among the names lead to.

    In the infos of a vector env, `"_name"` says which envs have an entry; so it does here.
    """
    found = dict(info)
    for name in names:
        if isinstance(name, tuple):
            value: Any = info
            there = None
            for part in name:
                if not (isinstance(value, Mapping) and part in value):
                    break
                value, there = value[part], value.get(f"_{part}", there)
            else:
                found[name] = value
                if there is not None:
                    found[f"_{name}"] = there
    return found


def first_present(infos: Mapping[str, Any], names: Iterable[InfoName]) -> dict[Any, Any]:
    """Return these entries of a vector env's infos, each of the first env that has it."""
    info: dict[Any, Any] = {}
    found = with_nested(infos, names)
    for name in names:
        values, there = found.get(name), found.get(f"_{name}")
        if values is not None and (there is None or np.any(there)):
            first = 0 if there is None else int(np.argmax(there))
            info[name] = values if isinstance(values, Mapping) else values[first]
    return info


def warn_unseen(unseen: set[InfoName]) -> None:
    """Say once which entries no info has had, when the first episode has ended without them."""
    names = sorted(unseen, key=str)
    unseen.clear()
    warnings.warn(
        f"info_keys names {', '.join(map(repr, names))}, but no info had it until the first "
        "episode ended: it is stored as missing (NaN, or 0 with a space) until an info has it. "
        "Check the spelling, or leave it out.",
        stacklevel=2,
    )


def info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[InfoName]
) -> Callable[[Mapping[Any, Any], int, int], None]:
    """Return the function that stores the info of env i at step t.

    Args:
        fields: The entries to store.
        slab: Where to.
        unseen: Those that no info has had yet; brought up to date while there are any.
    """
    columns = _columns(fields, slab)

    def store(info: Mapping[Any, Any], t: int, i: int) -> None:
        for name, array, missing, shape in columns:
            value = info.get(name, missing)
            array[t, i] = value if value is missing else _numbers(name, value, shape, env=i)

    def watch(info: Mapping[Any, Any], t: int, i: int) -> None:
        unseen.difference_update(info)
        store(info, t, i)

    return _into_dicts(watch if unseen else store, columns)


def vector_info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[InfoName]
) -> Callable[[Mapping[Any, Any], int, np.ndarray], None]:
    """Return the function that stores a vector env's infos of step t for these envs."""
    columns = _columns(fields, slab)

    def store(infos: Mapping[Any, Any], t: int, envs: np.ndarray) -> None:
        for name, array, missing, shape in columns:
            array[t, envs] = missing
            values, there = infos.get(name), infos.get(f"_{name}")
            having = envs if there is None else envs[np.asarray(there, bool)[envs]]
            if values is not None and len(having):
                array[t, having] = _numbers(name, values, (len(having), *shape), having)

    def watch(infos: Mapping[Any, Any], t: int, envs: np.ndarray) -> None:
        unseen.difference_update(infos)
        store(infos, t, envs)

    return _into_dicts(watch if unseen else store, columns)


_Column: TypeAlias = "tuple[InfoName, np.ndarray, Any, Any]"


def _into_dicts(
    store: Callable[[Mapping[Any, Any], int, Any], None], columns: Sequence[_Column]
) -> Callable[[Mapping[Any, Any], int, Any], None]:
    """Return the function with nested entries looked up first, if there are any to store."""
    nested = [name for name, *_ in columns if isinstance(name, tuple)]
    if not nested:
        return store
    return lambda info, t, which: store(with_nested(info, nested), t, which)


def _columns(fields: Sequence[Field], slab: Slab) -> list[_Column]:
    """Return the name of each entry, its column, the value of a missing one, and its shape."""
    columns: list[_Column] = []
    for field in fields:
        path = field.key[len(keys.INFO) :]
        name = path if len(path) > 1 else path[0]
        missing = np.nan if field.dtype.is_floating_point else 0
        columns.append((name, slab.arrays[field.key], missing, field.shape))
    return columns


def _numbers(
    name: InfoName, value: Any, shape: tuple[int, ...], rows: Any = ..., env: int | None = None
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
