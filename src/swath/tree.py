"""Spaces and nested values as flat lists of leaves.

A leaf has a *key* (where it stands in a batch) and a *path* (how to reach it in what an env
returns). Dict spaces become nested keys; entries of a Tuple are named by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from swath.errors import UsageError

__all__ = [
    "Key",
    "Leaf",
    "action_leaves",
    "builder",
    "fetch",
    "key_name",
    "nest",
    "observation_leaves",
]

Key = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of a space: its key in the batch, its path in the value, its shape and dtype."""

    key: Key
    path: tuple[str | int, ...]
    space: gym.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def key_name(key: Key) -> str:
    """Return a key as users write it: a string, or a tuple of strings when nested."""
    return repr(key[0] if len(key) == 1 else key)


def observation_leaves(space: gym.Space[Any]) -> list[Leaf]:
    """Return the leaves of an observation space; the entries of a Dict stand at the root."""
    root: Key = () if isinstance(space, spaces.Dict) else ("observation",)
    return _leaves(space, root, (), "observation")


def action_leaves(space: gym.Space[Any]) -> list[Leaf]:
    """Return the leaves of an action space, all below `"action"`."""
    return _leaves(space, ("action",), (), "action")


def _leaves(space: gym.Space[Any], key: Key, path: tuple[str | int, ...], kind: str) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        parts: Sequence[tuple[str | int, gym.Space[Any]]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = list(enumerate(space.spaces))
    else:
        shape, dtype = _array_form(space, key, kind)
        return [Leaf(key, path, space, shape, dtype)]
    return [
        leaf
        for name, part in parts
        for leaf in _leaves(part, (*key, str(name)), (*path, name), kind)
    ]


def _array_form(
    space: gym.Space[Any], key: Key, kind: str
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(space, spaces.Discrete):
        return (), np.dtype(np.int64)
    fixed = space.is_np_flattenable and not isinstance(space, spaces.Text)
    if fixed and space.shape is not None and space.dtype is not None:
        return tuple(space.shape), np.dtype(space.dtype)
    raise UsageError(
        f"the {kind} space has a {type(space).__name__} at {key_name(key or (kind,))}, which has "
        "no fixed array form. Supported are Box, Discrete, MultiDiscrete, MultiBinary and Dict or "
        "Tuple of these; convert it with a gymnasium wrapper."
    )


def fetch(value: Any, path: Sequence[str | int]) -> Any:
    """Return the part of a nested value that a path leads to."""
    for step in path:
        value = value[step]
    return value


def builder(space: gym.Space[Any], leaves: Sequence[Leaf]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a nested value of `space` from the values of its leaves."""
    if isinstance(space, spaces.Dict):
        parts = [(name, *_inner(part, leaves, name)) for name, part in space.spaces.items()]
        return lambda values: {
            name: build([values[n] for n in numbers]) for name, build, numbers in parts
        }
    if isinstance(space, spaces.Tuple):
        items = [_inner(part, leaves, i) for i, part in enumerate(space.spaces)]
        return lambda values: tuple(build([values[n] for n in numbers]) for build, numbers in items)
    return lambda values: values[0]


def _inner(
    part: gym.Space[Any], leaves: Sequence[Leaf], name: str | int
) -> tuple[Callable[[Sequence[Any]], Any], list[int]]:
    numbers = [n for n, leaf in enumerate(leaves) if leaf.path[0] == name]
    below = [
        Leaf(leaf.key, leaf.path[1:], leaf.space, leaf.shape, leaf.dtype)
        for leaf in (leaves[n] for n in numbers)
    ]
    return builder(part, below), numbers


def nest(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """Return nested dicts from a flat mapping of keys.

    Examples:
        >>> nest({("a",): 1, ("next", "a"): 2})
        {'a': 1, 'next': {'a': 2}}
    """
    out: dict[str, Any] = {}
    for key, value in flat.items():
        inner = out
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = value
    return out
