"""Random frames at the start of training (`init_random_frames`).

Exactly so many frames get a random action, in order of time and then of env. The policy is still
asked, so that every frame has all keys; what it says of its own action (a log-probability) is
replaced by what holds for the random one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from swath.memory import Slab
from swath.policies import ActionSampler, UniformPolicy
from swath.policies.base import Act
from swath.rollout import keys
from swath.tree import Leaf

if TYPE_CHECKING:
    from swath.rollout.runner import Runner

__all__ = ["RandomFrames", "uniform_log_prob"]


class RandomFrames:
    """Replaces the actions of the first frames by random ones."""

    def __init__(self, sampler: ActionSampler, left: int) -> None:
        self._sampler, self.left = sampler, left

    def wrap(self, act: Act, runner: Runner, slab: Slab, steps: int) -> Act:
        """Return `act` with the random frames of this rollout laid over it."""
        if not self.left or isinstance(runner.policy, UniformPolicy):
            return act
        n = runner.group.num_envs
        rows = min(steps, math.ceil(self.left / n))
        draws = self._sampler.draw(rows)
        leaves = runner.interface.actions
        overlays = [(slab.arrays[leaf.key], d) for leaf, d in zip(leaves, draws, strict=True)]
        log_prob = uniform_log_prob(leaves)
        extras = [
            slab.arrays[field.key]
            for field in runner.policy.extras
            if field.key[-1].endswith("log_prob")
        ]
        asked = bool(runner.policy.extras or runner.policy.states)
        left = self.left

        def act_at_random(t: int) -> None:
            envs = min(n, left - t * n)
            if asked or envs < n:
                act(t)
            if envs > 0:
                for array, draw in overlays:
                    array[t, :envs] = draw[t, :envs]
                for extra in extras:
                    extra[t, :envs] = log_prob

        return act_at_random

    def mark(self, slab: Slab, steps: int, mask: np.ndarray | None) -> None:
        """Say which frames of a finished rollout were random, and count them."""
        if not self.left:
            return
        column = slab.arrays[keys.RANDOM][:steps]
        order = np.arange(column.size).reshape(column.shape)
        column[...] = order < self.left
        made = column if mask is None else column & mask
        self.left -= int(made.sum())


def uniform_log_prob(leaves: list[Leaf]) -> float:
    """Return the log-probability (density) of any random action; NaN where it is not constant."""
    return sum(_leaf_log_prob(leaf.space) for leaf in leaves)


def _leaf_log_prob(space: Any) -> float:
    if isinstance(space, spaces.Discrete):
        return -math.log(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return -float(np.log(space.nvec).sum())
    if isinstance(space, spaces.MultiBinary):
        return -math.prod(space.shape) * math.log(2)
    if isinstance(space, spaces.Box) and space.is_bounded():
        return -float(np.log(space.high.astype(np.float64) - space.low).sum())
    return math.nan
