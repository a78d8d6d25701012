"""Actions that are choices among a few: one-hot vectors, and choices that a mask restricts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from swath.errors import EnvError
from swath.tree import Leaf

__all__ = ["OneHot", "choose", "joined_masks", "log_share"]


class OneHot(gym.Space[Any]):
    """One or several one-hot vectors end to end, as TorchRL encodes discrete actions.

    Args:
        sizes: Of the vectors that lie in the last dimension.
        dtype: Of their numbers.
        lead: Further dimensions before it (agents, say).

    Examples:
        >>> OneHot([2, 3], np.dtype("int64")).contains(np.array([0, 1, 1, 0, 0]))
        True
    """

    def __init__(
        self, sizes: Sequence[int], dtype: np.dtype[Any], lead: tuple[int, ...] = ()
    ) -> None:
        super().__init__((*lead, sum(sizes)), dtype.type)
        self.sizes = list(sizes)

    @property
    def choices(self) -> list[int]:
        """Among how many is chosen, for each choice in turn."""
        lead: Any = self.shape
        return self.sizes * math.prod(lead[:-1])

    def sample(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return a random one."""
        return _hot(self, [self.np_random.integers([*self.choices])])[0].reshape(self.shape)

    def contains(self, x: Any) -> bool:
        """Tell whether each part of x is one-hot."""
        if np.shape(x) != self.shape:
            return False
        parts = np.split(np.asarray(x), np.cumsum(self.sizes)[:-1], axis=-1)
        return all(
            bool(((part != 0).sum(-1) == 1).all() and (part.sum(-1) == 1).all()) for part in parts
        )

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, OneHot) and self.sizes == other.sizes
        return same and self.shape == getattr(other, "shape", None)

    def __repr__(self) -> str:
        lead: Any = self.shape
        return f"OneHot({self.sizes})" if len(lead) == 1 else f"OneHot({self.sizes}, {lead})"

    @property
    def is_np_flattenable(self) -> bool:
        """It is an array."""
        return True


def choose(leaf: Leaf, units: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return actions `[steps, N, *shape]` from numbers `[steps, N, choices]` in [0, 1).

    Args:
        leaf: Of the action.
        units: One number for each choice.
        mask: bool `[N, all choices]`, what is allowed; None for all.
    """
    sizes, (steps, envs, _) = _sizes(leaf), units.shape
    picks = np.empty((steps, envs, len(sizes)), np.int64)
    for j, allowed in enumerate(_allowed(sizes, mask, envs)):
        counts = allowed.sum(1)
        if not counts.all():
            raise EnvError(
                f"the action mask of env {int(counts.argmin())} allows no action. Check how the "
                "env computes its mask."
            )
        rank = np.minimum(np.floor(units[..., j] * counts).astype(np.int64), counts - 1)
        nth = np.where(allowed, allowed.cumsum(1) - 1, -1)  # of those that are allowed
        picks[..., j] = (nth == rank[..., None]).argmax(-1)
    if isinstance(leaf.space, OneHot):
        flat = _hot(leaf.space, picks.reshape(steps * envs, -1))
    else:
        start = getattr(leaf.space, "start", 0)
        flat = picks + np.asarray(start).reshape(-1)
    return flat.reshape(steps, envs, *leaf.shape).astype(leaf.dtype)


def log_share(leaf: Leaf, actions: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return the log-probability of each number of random actions `[M, *shape]`.

    Of a one-hot vector it stands where the one is, so that a sum over the vector is right.
    """
    sizes = _sizes(leaf)
    counts = np.stack([part.sum(1) for part in _allowed(sizes, mask, len(actions))], 1)
    logs = -np.log(counts)
    if isinstance(leaf.space, OneHot):
        logs = np.repeat(logs, sizes, axis=1) * (actions.reshape(len(actions), -1) != 0)
    return logs.reshape(actions.shape)


def joined_masks(
    masks: Sequence[np.ndarray | None], leaf: Leaf, envs: Sequence[int]
) -> np.ndarray | None:
    """Return the masks of several groups of envs as one, None if all is open in all.

    Args:
        masks: Of each group.
        leaf: Of the action.
        envs: How many each group has.
    """
    if all(mask is None for mask in masks):
        return None
    width = sum(_sizes(leaf))
    return np.concatenate(
        [np.ones((n, width), bool) if m is None else m for m, n in zip(masks, envs, strict=True)]
    )


def _sizes(leaf: Leaf) -> list[int]:
    """Return among how many is chosen, for each choice in turn."""
    space = leaf.space
    if isinstance(space, OneHot):
        return space.choices
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    assert isinstance(space, spaces.MultiDiscrete)
    return [int(n) for n in space.nvec.reshape(-1)]


def _allowed(sizes: Sequence[int], mask: np.ndarray | None, envs: int) -> list[np.ndarray]:
    """Return bool `[N, n]` for each choice."""
    if mask is None:
        return [np.ones((envs, size), bool) for size in sizes]
    return np.split(mask, np.cumsum(sizes)[:-1], axis=1)


def _hot(space: OneHot, picks: Any) -> np.ndarray:
    """Return the vectors with ones at these places, `[M, all choices]`."""
    picked = np.asarray(picks)
    hot = np.zeros((len(picked), sum(space.choices)), space.dtype)
    starts = np.cumsum([0, *space.choices[:-1]])
    np.put_along_axis(hot, picked + starts, np.ones(1, space.dtype), 1)
    return hot
