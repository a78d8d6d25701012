"""Random frames at the start of training (`init_random_frames`).

Exactly so many frames get a random action, in order of time and then of env. The policy is still
asked, so that every frame has all keys; what it says of its own action (a log-probability) is
replaced by what holds for the random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from swath.memory import Field, Slab
from swath.policies import ActionSampler, UniformPolicy
from swath.policies.base import Act
from swath.policies.random import log_density
from swath.rollout import keys
from swath.tree import Leaf

if TYPE_CHECKING:
    from swath.rollout.runner import Runner

__all__ = ["RandomFrames"]


class RandomFrames:
    """Replaces the actions of the first frames by random ones."""

    def __init__(self, sampler: ActionSampler, left: int) -> None:
        self._sampler, self.left = sampler, left

    def wrap(self, act: Act, runner: Runner, slab: Slab, steps: int) -> Act:
        """Return `act` with the random frames of this rollout laid over it."""
        policy, leaves = runner.policy, runner.interface.actions
        if isinstance(policy, UniformPolicy) and keys.RANDOM in slab.arrays:
            slab.arrays[keys.RANDOM][:steps] = True
        if not self.left or isinstance(policy, UniformPolicy):
            return act
        n, left = runner.group.num_envs, self.left
        random, mask = slab.arrays[keys.RANDOM], slab.arrays.get(keys.MASK)
        log_probs = [field for field in policy.extras if field.key[-1].endswith("log_prob")]
        asked = bool(policy.extras or policy.states or policy.primed)

        def act_at_random(t: int) -> None:
            nonlocal left
            if t:  # only now is it known which rows of the last step were frames
                left -= _count(random[t - 1], None if mask is None else mask[t - 1])
            chosen = (np.arange(n) if mask is None else np.flatnonzero(mask[t]))[: max(left, 0)]
            if asked or len(chosen) < n:
                act(t)
            if len(chosen):
                random[t, chosen] = True
                masks = [m if m is None else m[chosen] for m in self._sampler.current_masks()]
                draws = [draw[0, chosen] for draw in self._sampler.draw(1)]
                for leaf, draw in zip(leaves, draws, strict=True):
                    slab.arrays[leaf.key][t, chosen] = draw
                for field in log_probs:
                    slab.arrays[field.key][t, chosen] = _log_prob(field, leaves, draws, masks)

        return act_at_random

    def laid_over(self, act: Act, runner: Runner, slab: Slab, steps: int) -> Act:
        """Do what `wrap` does for a slab on a device, where every row is a frame."""
        column, n, leaves = (
            slab.tensors.get(keys.RANDOM),
            slab.layout.envs,
            runner.interface.actions,
        )
        if column is None:
            return act
        uniform = isinstance(runner.policy, UniformPolicy)
        rows = min(steps, -(-self.left // n))
        if uniform or not rows:
            column.fill_(uniform)
            return act
        column.copy_(torch.arange(column.numel()).view_as(column) < self.left)
        draws = self._sampler.draw(rows)
        placed = {leaf.key: draw for leaf, draw in zip(leaves, draws, strict=True)}
        flat = [draw.reshape(-1, *draw.shape[2:]) for draw in draws]
        for field in runner.policy.extras:
            if field.key[-1].endswith("log_prob"):
                values = _log_prob(field, leaves, flat, [None] * len(leaves))
                values = values.reshape(rows, n, *field.shape)
                placed[field.key] = values.astype(np.float32)
        tensors = [
            (slab.tensors[key], torch.from_numpy(v).to(column.device)) for key, v in placed.items()
        ]

        def act_at_random(t: int) -> None:
            act(t)
            if t < rows:
                for written, drawn in tensors:
                    chosen = column[t].view(-1, *[1] * (drawn.ndim - 2))
                    torch.where(chosen, drawn[t].to(written.dtype), written[t], out=written[t])

        return act_at_random

    def mark(self, slab: Slab, steps: int, mask: np.ndarray | None) -> None:
        """Count the random frames of a finished rollout; rows that are no frames are not random."""
        if self.left:
            column = slab.arrays[keys.RANDOM][:steps]
            if mask is not None:
                column &= mask
            self.left = max(0, self.left - _count(column, None))


def _count(random: np.ndarray, mask: np.ndarray | None) -> int:
    return int((random if mask is None else random & mask).sum())


def _log_prob(
    field: Field,
    leaves: Sequence[Leaf],
    draws: Sequence[np.ndarray],
    masks: Sequence[np.ndarray | None],
) -> np.ndarray:
    """Return the log-density of random actions in the form that the policy gives its own.

    That is one number for the whole action, or one for each number of an action; of the one leaf
    that the field is named after, or of all. NaN in any other form.
    """
    own = [leaf for leaf in leaves if (*leaf.key[:-1], f"{leaf.key[-1]}_log_prob") == field.key]
    parts = [
        log_density(leaf, draw, mask)
        for leaf, draw, mask in zip(leaves, draws, masks, strict=True)
        if leaf in own or not own
    ]
    if len(parts) == 1 and parts[0].shape[1:] == field.shape:
        return parts[0]
    if field.shape not in ((), (1,)):
        return np.full((len(parts[0]), *field.shape), np.nan)
    total = sum(part.reshape(len(part), -1).sum(1) for part in parts)
    return np.reshape(total, (-1, *field.shape))
