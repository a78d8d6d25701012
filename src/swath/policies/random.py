"""Random actions: uniform over the action space, from one stream per env.

The stream of an env depends on the seed and the env's global index alone: every step takes the
same count of uniform numbers from it, however many steps are drawn at once. What is made of them
depends on the space.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from swath.memory import Slab
from swath.policies.base import Act, Interface, Policy
from swath.policies.choices import OneHot, choose, log_share
from swath.policies.outputs import DISCRETE, bounds
from swath.seeding import action_generator
from swath.tree import Leaf

__all__ = ["ActionSampler", "Masks", "RandomPolicy", "UniformPolicy", "log_density"]

Masks = Callable[[], Sequence[np.ndarray | None]]
"""Returns, for each leaf of the action, bool `[N, choices]`, or None where all are open."""


class RandomPolicy:
    """Choose actions at random; the same as passing no policy.

    Args:
        action_spec: This is ignored, since the envs define their actions.

    Examples:
        >>> RandomPolicy()
        RandomPolicy()
    """

    def __init__(self, action_spec: Any = None) -> None:
        pass

    def __repr__(self) -> str:
        return "RandomPolicy()"


class ActionSampler:
    """Draws actions for each env of a group from that env's own generator.

    Args:
        leaves: Of the action.
        indices: Of the envs' streams.
        masks: Tells which choices each env has just now. None: all, always.
    """

    def __init__(
        self, leaves: Sequence[Leaf], indices: Sequence[int], masks: Masks | None = None
    ) -> None:
        self._leaves, self._indices, self.masks = leaves, indices, masks
        self._ends = np.cumsum([_uniforms(leaf) for leaf in leaves]).tolist()
        self.seed(None)

    def seed(self, seed: int | None) -> None:
        """Restart the stream of every env; without a seed, from one that nobody else has.

        It is chosen here, not when numbers are first drawn: a state that is taken before has to
        lead to the same numbers as going on.
        """
        self._seed: Any = np.random.SeedSequence(seed).entropy
        self._made: list[np.random.Generator] | None = None

    @property
    def _generators(self) -> list[np.random.Generator]:
        """Made when they are needed: of a million envs with a policy they never are."""
        if self._made is None:
            self._made = [action_generator(self._seed, index) for index in self._indices]
        return self._made

    def draw(self, steps: int) -> list[np.ndarray]:
        """Return, for each leaf of the action, the next `steps` actions `[steps, N, *shape]`."""
        return self.actions(self.units(steps))

    def units(self, steps: int) -> np.ndarray:
        """Return the numbers in [0, 1) of which the next `steps` actions are made."""
        size = (steps, self._ends[-1])
        return np.stack([generator.random(size) for generator in self._generators], 1)

    def actions(self, units: np.ndarray) -> list[np.ndarray]:
        """Return the actions that are made of these numbers, by the masks of now."""
        starts, masks = [0, *self._ends], self.current_masks()
        return [
            _actions(leaf, units[..., start:end], mask)
            for leaf, start, end, mask in zip(self._leaves, starts, self._ends, masks, strict=False)
        ]

    def current_masks(self) -> Sequence[np.ndarray | None]:
        """Return the mask of each leaf; None where all choices are open."""
        return [None] * len(self._leaves) if self.masks is None else self.masks()

    def state_dict(self) -> tuple[int, list[Any] | None]:
        """Return the seed, and the state of each generator if they were used."""
        made = self._made
        return self._seed, made and [generator.bit_generator.state for generator in made]

    def load_state_dict(self, state: tuple[int, list[Any] | None]) -> None:
        """Continue from what `state_dict` returned."""
        self.seed(state[0])
        for generator, inner in zip(
            self._generators if state[1] else (), state[1] or (), strict=True
        ):
            generator.bit_generator.state = inner


class UniformPolicy(Policy):
    """The adapter for `RandomPolicy`: fills the actions of a rollout before its first step."""

    def __init__(self, interface: Interface, sampler: ActionSampler) -> None:
        super().__init__(interface)
        self.sampler = sampler

    @contextlib.contextmanager
    def bound(self, slab: Slab, steps: int) -> Iterator[Act]:
        """Write all actions now, and acting later is nothing; unless there are masks."""
        units = self.sampler.units(steps)

        def write(rows: slice) -> None:
            for leaf, actions in zip(
                self.interface.actions, self.sampler.actions(units[rows]), strict=True
            ):
                slab.tensors[leaf.key][:steps][rows].copy_(torch.from_numpy(actions))

        if self.sampler.masks is not None:
            yield lambda t: write(slice(t, t + 1))
        else:
            write(slice(None))
            yield lambda t: None


def _is_known(leaf: Leaf) -> bool:
    """Tell whether a space has the way to sample of a class that we know, and not its own."""
    kinds = (*DISCRETE, spaces.Box, OneHot)
    return any(isinstance(leaf.space, k) and type(leaf.space).sample is k.sample for k in kinds)


def _uniforms(leaf: Leaf) -> int:
    """Return how many uniform numbers make one action."""
    if not _is_known(leaf):
        return 1
    if isinstance(leaf.space, OneHot):
        return len(leaf.space.choices)
    bounded = not isinstance(leaf.space, spaces.Box) or leaf.space.is_bounded()
    return math.prod(leaf.shape) * (1 if bounded else 2)


def _actions(leaf: Leaf, units: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Return actions `[steps, N, *shape]` from numbers `[steps, N, uniforms]` in [0, 1).

    Uniform where bounded, exponential where bounded on one side, normal where not at all.
    """
    if mask is not None or isinstance(leaf.space, OneHot):
        return choose(leaf, units, mask)
    if not _is_known(leaf):
        return _own_samples(leaf, units[..., 0])
    size, shape = math.prod(leaf.shape), (*units.shape[:2], *leaf.shape)
    unit = units[..., :size].reshape(shape)
    low, high = bounds(leaf.space)
    if leaf.dtype.kind != "f":
        return (low + np.floor(unit * (high - low + 1))).clip(low, high).astype(leaf.dtype)
    below, above = np.isfinite(low), np.isfinite(high)
    low, high = np.where(below, low, 0), np.where(above, high, 0)
    actions = low * (1 - unit) + high * unit  # no overflow, unlike low + unit * (high - low)
    if units.shape[-1] > size:
        tail = -np.log1p(-unit)
        normal = np.sqrt(2 * tail) * np.cos(2 * np.pi * units[..., size:].reshape(shape))
        choices = [actions, low + tail, high - tail]
        actions = np.select([below & above, below, above], choices, normal)
    return actions.astype(leaf.dtype)


def _own_samples(leaf: Leaf, units: np.ndarray) -> np.ndarray:
    """Let a space that we do not know sample by itself, seeded anew from each number."""
    space = copy.deepcopy(leaf.space)
    samples = []
    for unit in units.flat:
        space.seed(int(unit * 2**31))
        samples.append(np.asarray(space.sample(), leaf.dtype))
    return np.reshape(samples, (*units.shape, *leaf.shape))


def log_density(leaf: Leaf, actions: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Return the log-density of each number of random actions `[..., *shape]`, NaN if unknown."""
    if mask is not None or isinstance(leaf.space, OneHot):
        return log_share(leaf, actions, mask)
    if not _is_known(leaf):
        return np.full(actions.shape, np.nan)
    low, high = bounds(leaf.space)
    below, above = np.isfinite(low), np.isfinite(high)
    whole = leaf.dtype.kind != "f"
    half = high / 2 - low / 2 + whole / 2  # of the width, which itself may overflow
    flat = -np.log(np.where(half > 0, half, 0.5)) - math.log(2)  # a single point is certain
    with np.errstate(over="ignore"):  # in choices that are not taken
        normal = -0.5 * actions.astype(np.float64) ** 2 - 0.5 * math.log(2 * math.pi)
        choices = [flat, low - actions, actions - high]
    return np.select([below & above, below, above], choices, normal)
