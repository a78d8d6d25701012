"""Spaces and nested values as flat lists of leaves.

A leaf has a *key* (where it stands in a batch) and a *path* (how to reach it in what an env
returns). Dict spaces become nested keys; entries of a Tuple are named by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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


# With slots, since every step reads them for every env: once copied, an object without slots has a
# dict of its own, from which Python 3.11 reads the slow way.
@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space: its key in the batch, its path in the value, its shape and dtype.

    Leaves are equal if their values are stored alike: a lone Box is the same as one that stands
    in a Dict as `"observation"`.
    """

    key: Key
    path: tuple[str | int, ...] = field(compare=False)
    space: gym.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nested: tuple[int, ...] = field(default=(), compare=False)
    """Of each TensorDict that it lies in below the root: how many dimensions of `shape` are its
    batch dimensions; see `Field`."""
    exact: bool = field(default=False, compare=False)
    """Takes values of any dtype that its own holds exactly, and a last dimension of size 1 may be
    missing or one too many, as TorchRL's envs allow."""


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
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts: Any = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return [
            leaf
            for name, part in parts
            for leaf in _leaves(part, (*key, str(name)), (*path, name), kind)
        ]
    if isinstance(space, spaces.Discrete):
        return [Leaf(key, path, space, (), np.dtype(space.dtype))]
    if _is_fixed(space) and space.shape is not None and space.dtype is not None:
        return [Leaf(key, path, space, tuple(space.shape), np.dtype(space.dtype))]
    is_minigrid = type(space).__name__ == "MissionSpace"
    raise UsageError(
        f"the {kind} space has a {type(space).__name__} at {key_name(key or (kind,))}, which "
        "has no fixed array form. Supported are Box, Discrete, MultiDiscrete, MultiBinary and "
        "Dict or Tuple of these; convert it with a Gymnasium wrapper."
        + (" MiniGrid has minigrid.wrappers.ImgObsWrapper for that." * is_minigrid)
    )


def _is_fixed(space: gym.Space[Any]) -> bool:
    try:
        return space.is_np_flattenable and not isinstance(space, spaces.Text)
    except NotImplementedError:  # what Gymnasium's base class says of a space made by others
        return False


def fetch(value: Any, path: Sequence[str | int]) -> Any:
    """Return the part of a nested value that a path leads to."""
    for step in path:
        value = value[step]
    return value


def builder(
    space: gym.Space[Any], leaves: Sequence[Leaf], path: tuple[str | int, ...] = ()
) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a nested value of `space` from the values of its leaves.

    Args:
        space: Of the value, or of the part of it to which `path` leads.
        leaves: Those of the whole value, in the order in which their values will come.
        path: From the whole value to the part.
    """
    if isinstance(space, spaces.Dict):
        parts = {name: builder(part, leaves, (*path, name)) for name, part in space.items()}
        return lambda values: {name: build(values) for name, build in parts.items()}
    if isinstance(space, spaces.Tuple):
        items = [builder(part, leaves, (*path, i)) for i, part in enumerate(space)]
        return lambda values: tuple(build(values) for build in items)
    return itemgetter([leaf.path for leaf in leaves].index(path))


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
