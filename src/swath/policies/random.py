"""Random actions: uniform over the action space, from one stream per env.

The stream of an env depends on the seed and the env's global index alone, and the actions of a
whole rollout are drawn in one call per env, before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from swath.memory import Field, Slab
from swath.policies.base import Act, Interface, State
from swath.seeding import action_generator
from swath.tree import Leaf

__all__ = ["ActionSampler", "RandomPolicy", "UniformPolicy"]


class RandomPolicy:
    """Choose actions at random; the same as passing no policy.

    >>> RandomPolicy()
    RandomPolicy()
    """

    def __repr__(self) -> str:
        return "RandomPolicy()"


class ActionSampler:
    """Draws actions for each env of a group from that env's own generator."""

    def __init__(self, leaves: Sequence[Leaf], indices: Sequence[int]) -> None:
        self._leaves, self._indices = leaves, indices
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        """Restart the stream of every env."""
        self._generators = [action_generator(seed, index) for index in self._indices]

    def draw(self, steps: int) -> list[np.ndarray]:
        """Return, for each leaf of the action, the next `steps` actions `[steps, N, *shape]`."""
        columns = [[_draw(leaf, g, steps) for leaf in self._leaves] for g in self._generators]
        return [np.stack([column[n] for column in columns], 1) for n in range(len(self._leaves))]

    def state_dict(self) -> list[Any]:
        """Return the state of each generator."""
        return [generator.bit_generator.state for generator in self._generators]

    def load_state_dict(self, state: list[Any]) -> None:
        """Continue from what `state_dict` returned."""
        for generator, inner in zip(self._generators, state, strict=True):
            generator.bit_generator.state = inner


class UniformPolicy:
    """The adapter for `RandomPolicy`: fills the actions of a rollout before its first step."""

    def __init__(self, interface: Interface, sampler: ActionSampler) -> None:
        self.interface, self.sampler = interface, sampler
        self.extras: list[Field] = []
        self.states: list[State] = []
        self.needs_is_init = False

    def bind(self, slab: Slab, steps: int) -> Act:
        """Write all actions now; acting later is nothing."""
        for leaf, actions in zip(self.interface.actions, self.sampler.draw(steps), strict=True):
            slab.arrays[leaf.key][:steps] = actions
        return lambda t: None


def _draw(leaf: Leaf, generator: np.random.Generator, steps: int) -> np.ndarray:
    """Return `steps` draws; drawing a then b gives the same numbers as drawing a + b."""
    space, shape = leaf.space, (steps, *leaf.shape)
    # 64-bit draws only: numpy keeps left-over bits of smaller ones inside a single call.
    if type(space) is spaces.Discrete:
        return generator.integers(space.start, space.start + space.n, shape)
    if type(space) is spaces.MultiDiscrete:
        unit = generator.random(shape)
        return (space.start + np.floor(unit * space.nvec)).astype(leaf.dtype)
    if type(space) is spaces.MultiBinary:
        return generator.integers(0, 2, shape).astype(leaf.dtype)
    if type(space) is spaces.Box:
        return _draw_box(space, generator, shape)
    return _draw_other(space, generator, steps)


def _draw_box(
    space: spaces.Box, generator: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
    """Uniform where bounded, exponential where bounded on one side, normal where not at all."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    below, above = space.bounded_below, space.bounded_above
    unit = generator.random(shape)
    if space.dtype is not None and np.dtype(space.dtype).kind in "iub":
        return np.floor(low + unit * (high - low + 1)).astype(space.dtype)
    if (below & above).all():
        return (low + unit * (high - low)).astype(space.dtype)
    tail = -np.log1p(-unit)
    pair = generator.random(shape)
    normal = np.sqrt(2 * tail) * np.cos(2 * np.pi * pair)
    with np.errstate(invalid="ignore"):
        choices = [low + unit * (high - low), low + tail, high - tail]
    return np.select([below & above, below, above], choices, normal).astype(space.dtype)


def _draw_other(space: gym.Space[Any], generator: np.random.Generator, steps: int) -> np.ndarray:
    """Draw from a space that we do not know by its own method, seeded from the env's stream."""
    space.seed(int(generator.integers(2**31)))
    return np.stack([np.asarray(space.sample()) for _ in range(steps)])
