"""Numeric entries of the info dicts, stored below `("next", "info")`.

A name alone is stored as float64 with the shape it has in the info of the first reset (a number if
it is not there), NaN where a step has none. A name with a gymnasium space is stored in the form of
that space, 0 where a step has none. A tuple of names leads to an entry of a dict in the info.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import gymnasium as gym
import numpy as np
import torch

from swath.errors import UsageError
from swath.memory import Field, Slab, torch_dtype
from swath.rollout import CallFailed, keys
from swath.tree import Key

__all__ = [
    "InfoNames",
    "first_present",
    "info_fields",
    "info_writer",
    "unseen_in",
    "vector_info_writer",
    "warn_unseen",
]

InfoName: TypeAlias = "str | tuple[str, ...]"
InfoNames: TypeAlias = "Sequence[InfoName] | Mapping[InfoName, gym.Space[Any]]"
"""Which entries to store: their names, or names with the spaces that give their form."""


def info_fields(names: InfoNames, first_info: Callable[[], Mapping[str, Any]]) -> list[Field]:
    """Return the field of each entry; an info is asked for only if there are entries to store."""
    if isinstance(names, str):
        raise UsageError(f"info_keys must be a list of names; got the string {names!r}.")
    spaces = names if isinstance(names, Mapping) else dict.fromkeys(names)
    paths = [_path(name) for name in spaces]
    info = _reached(first_info(), paths) if spaces else {}
    return [_field(name, space, info.get(name)) for name, space in spaces.items()]


def _path(name: InfoName) -> Key:
    path = (name,) if isinstance(name, str) else tuple(name)
    if not (path and all(isinstance(part, str) for part in path)):
        raise UsageError(
            f"info_keys has {name!r}; names, or tuples of names for entries of dicts, are expected."
        )
    return path


def _name(path: Key) -> InfoName:
    """Return what an info has at its root under this path, or is given there by `_reached`."""
    return path[0] if len(path) == 1 else path


def _reached(info: Mapping[Any, Any], paths: Iterable[Key]) -> Mapping[Any, Any]:
    """Return an info in which entries of its dicts stand under their paths, too.

    In the infos of a vector env the masks that say who has them (`"_r"` beside `"r"`, or that of
    a dict around it) do as well.
    """
    deep = {path for path in paths if len(path) > 1}
    found: dict[Any, Any] = {}
    for path in deep:
        part: Any = info
        there = None
        for name in path:
            if not isinstance(part, Mapping) or name not in part:
                break
            there = part.get(f"_{name}", there)
            part = part[name]
        else:
            found[path] = part
            if there is not None:
                found[f"_{path}"] = there
    return {**info, **found} if deep else info


def _field(name: InfoName, space: gym.Space[Any] | None, example: Any) -> Field:
    key = (*keys.INFO, *_path(name))
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


def first_present(infos: Mapping[Any, Any], names: Iterable[InfoName]) -> dict[Any, Any]:
    """Return these entries of a vector env's infos, each of the first env that has it."""
    info: dict[Any, Any] = {}
    paths = [_path(name) for name in names]
    infos = _reached(infos, paths)
    for name in map(_name, paths):
        values, there = infos.get(name), infos.get(f"_{name}")
        if values is not None and (there is None or np.any(there)):
            first = 0 if there is None else int(np.argmax(there))
            info[name] = values if isinstance(values, Mapping) else values[first]
    return info


def unseen_in(names: Iterable[InfoName], info: Mapping[Any, Any]) -> set[InfoName]:
    """Return those of the names under which an info has nothing."""
    paths = [_path(name) for name in names]
    return set(map(_name, paths)).difference(_reached(info, paths))


def warn_unseen(unseen: set[InfoName]) -> None:
    """Say once which entries no info has had, when the first episode has ended without them."""
    names = sorted(unseen, key=str)
    unseen.clear()
    warnings.warn(
        f"no info had {', '.join(map(repr, names))} until the first episode ended, but info_keys "
        "names it: it is stored as missing (NaN, or 0 with a space) as long as none has. Look for "
        "a misspelt name, or leave it out.",
        stacklevel=2,
    )


def info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[InfoName]
) -> Callable[[Mapping[str, Any], int, int], None]:
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

    return _reaching(fields, watch if unseen else store)


def vector_info_writer(
    fields: Sequence[Field], slab: Slab, unseen: set[InfoName]
) -> Callable[[Mapping[str, Any], int, np.ndarray], None]:
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

    return _reaching(fields, watch if unseen else store)


_Store = TypeVar("_Store", bound=Callable[..., None])


def _reaching(fields: Sequence[Field], store: _Store) -> _Store:
    """Return the function with infos in which entries of dicts stand under their paths."""
    paths = [path for f in fields if len(path := _below_info(f)) > 1]
    if not paths:
        return store

    def reach(info: Mapping[Any, Any], *where: Any) -> None:
        store(_reached(info, paths), *where)

    return cast(_Store, reach)


def _below_info(field: Field) -> Key:
    return field.key[len(keys.INFO) :]


def _columns(fields: Sequence[Field], slab: Slab) -> list[tuple[InfoName, np.ndarray, Any, Any]]:
    """Return of each entry its name, its column, what stands for a missing one, and its shape."""
    return [
        (
            _name(_below_info(f)),
            slab.arrays[f.key],
            np.nan if f.dtype.is_floating_point else 0,
            f.shape,
        )
        for f in fields
    ]


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
