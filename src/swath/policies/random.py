"""Random actions: uniform over the action space, from one stream per env.

The stream of an env depends on the seed and the env's global index alone: every step takes the
same count of uniform numbers from it, however many steps are drawn at once. What is made of them
depends on the space.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from swath.memory import Field, Slab
from swath.policies.base import Act, Interface, State
from swath.seeding import action_generator
from swath.tree import Leaf

__all__ = ["ActionSampler", "RandomPolicy", "UniformPolicy", "log_density"]

_KNOWN = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)


class RandomPolicy:
    """Choose actions at random; the same as passing no policy.

    Examples:
        >>> RandomPolicy()
        RandomPolicy()
    """

    def __repr__(self) -> str:
        return "RandomPolicy()"


class ActionSampler:
    """Draws actions for each env of a group from that env's own generator."""

    def __init__(self, leaves: Sequence[Leaf], indices: Sequence[int]) -> None:
        self._leaves, self._indices = leaves, indices
        self._ends = np.cumsum([_uniforms(leaf) for leaf in leaves]).tolist()
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        """Restart the stream of every env."""
        self._generators = [action_generator(seed, index) for index in self._indices]

    def draw(self, steps: int) -> list[np.ndarray]:
        """Return, for each leaf of the action, the next `steps` actions `[steps, N, *shape]`."""
        size = (steps, self._ends[-1])
        units = np.stack([generator.random(size) for generator in self._generators], 1)
        starts = [0, *self._ends]
        return [
            _actions(leaf, units[..., start:end])
            for leaf, start, end in zip(self._leaves, starts, self._ends, strict=False)
        ]

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

    @contextlib.contextmanager
    def bound(self, slab: Slab, steps: int) -> Iterator[Act]:
        """Write all actions now; acting later is nothing."""
        for leaf, actions in zip(self.interface.actions, self.sampler.draw(steps), strict=True):
            slab.arrays[leaf.key][:steps] = actions
        yield lambda t: None


def _kind(leaf: Leaf) -> type | None:
    """Return the known class whose way to sample a space has, or None if it has its own."""
    for kind in _KNOWN:
        if isinstance(leaf.space, kind) and type(leaf.space).sample is kind.sample:
            return kind
    return None


def _uniforms(leaf: Leaf) -> int:
    """Return how many uniform numbers make one action."""
    if _kind(leaf) is None:
        return 1
    return math.prod(leaf.shape) * _parts(leaf)


def _parts(leaf: Leaf) -> int:
    """Return how many uniform numbers make each number of an action."""
    return 2 if isinstance(leaf.space, spaces.Box) and not leaf.space.is_bounded() else 1


def _actions(leaf: Leaf, units: np.ndarray) -> np.ndarray:
    """Return actions `[steps, N, *shape]` from numbers `[steps, N, uniforms]` in [0, 1)."""
    space: Any = leaf.space
    kind = _kind(leaf)
    if kind is None:
        return _own_samples(leaf, units[..., 0])
    lead = units.shape[:2]
    if kind is spaces.Box:
        parts = units.reshape(*lead, _parts(leaf), *leaf.shape)
        return _box_actions(space, parts).astype(leaf.dtype)
    start, count = (0, 2) if kind is spaces.MultiBinary else (space.start, _count(space))
    return (start + np.floor(units.reshape(*lead, *leaf.shape) * count)).astype(leaf.dtype)


def _count(space: Any) -> Any:
    return space.n if isinstance(space, spaces.Discrete) else space.nvec


def _box_actions(space: spaces.Box, units: np.ndarray) -> np.ndarray:
    """Uniform where bounded, exponential where bounded on one side, normal where not at all."""
    below, above = space.bounded_below, space.bounded_above
    whole = space.low.dtype.kind != "f"  # every whole number has bounds, if only those of its dtype
    low = np.where(below | whole, space.low.astype(np.float64), 0)
    high = np.where(above | whole, space.high.astype(np.float64), 0)
    unit = units[:, :, 0]
    if whole:
        return np.floor(low + unit * (high - low + 1)).clip(low, high)
    within = low * (1 - unit) + high * unit  # no overflow, unlike low + unit * (high - low)
    if space.is_bounded():
        return within
    tail = -np.log1p(-unit)
    normal = np.sqrt(2 * tail) * np.cos(2 * np.pi * units[:, :, 1])
    return np.select([below & above, below, above], [within, low + tail, high - tail], normal)


def _own_samples(leaf: Leaf, units: np.ndarray) -> np.ndarray:
    """Let a space that we do not know sample by itself, seeded anew from each number."""
    space = copy.deepcopy(leaf.space)
    samples = []
    for unit in units.flat:
        space.seed(int(unit * 2**31))
        samples.append(np.asarray(space.sample(), leaf.dtype))
    return np.reshape(samples, (*units.shape, *leaf.shape))


def log_density(leaf: Leaf, actions: np.ndarray) -> np.ndarray:
    """Return the log-density of each number of random actions `[..., *shape]`, NaN if unknown."""
    space: Any = leaf.space
    kind = _kind(leaf)
    if kind is None:
        return np.full(actions.shape, np.nan)
    if kind is not spaces.Box:
        count = 2 if kind is spaces.MultiBinary else _count(space)
        return np.broadcast_to(-np.log(count), actions.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    whole = leaf.dtype.kind != "f"
    below, above = space.bounded_below | whole, space.bounded_above | whole
    half = high / 2 - low / 2 + whole / 2  # of the width, which itself may overflow
    flat = -np.log(np.where(half > 0, half, 0.5)) - math.log(2)  # a single point is certain
    with np.errstate(over="ignore"):  # in choices that are not taken
        normal = -0.5 * actions.astype(np.float64) ** 2 - 0.5 * math.log(2 * math.pi)
        choices = [flat, low - actions, actions - high]
    return np.select([below & above, below, above], choices, normal)
