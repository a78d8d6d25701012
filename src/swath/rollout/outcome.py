"""What a step of an env gives beside its observation.

Most envs give one reward and end as a whole: `("next", "reward")`, and `done`, `terminated` and
`truncated` at the root. Others have several rewards, at keys of their own, or parts (agents, say)
that end by themselves. The flags at the root are there all the same: they say when the env's
trajectory ends, and everything that counts trajectories looks at them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swath.memory import Field, Slab
from swath.rollout import keys
from swath.rollout.keys import following
from swath.tree import Key

__all__ = ["Flags", "Outcome"]


@dataclass(frozen=True)
class Flags:
    """The flags of parts of an env, below a key of their own.

    They are carried: row t + 1 holds what step t led to, False again after a reset.
    """

    prefix: Key
    shape: tuple[int, ...]
    nested: tuple[int, ...] = ()

    @property
    def done(self) -> Key:
        """Where `done` stands."""
        return (*self.prefix, *keys.DONE)

    @property
    def truncated(self) -> Key:
        """Where `truncated` stands."""
        return (*self.prefix, *keys.TRUNCATED)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All three keys."""
        return (self.done, (*self.prefix, *keys.TERMINATED), self.truncated)


@dataclass(frozen=True)
class Outcome:
    """What steps give beside observations: rewards, flags beside those at the root, the rest."""

    rewards: tuple[Field, ...] = (Field(keys.REWARD, (1,), torch.float32),)
    flags: tuple[Flags, ...] = ()
    at_root: bool = True
    """The env itself says when it ends; else it ends with any of its parts."""
    others: tuple[Field, ...] = ()
    """What stands below `next` alone and is no reward: a change of the observation, say."""

    @property
    def carried(self) -> list[Key]:
        """The keys of all further flags."""
        return [key for flags in self.flags for key in flags.keys]

    def fields(self) -> list[Field]:
        """Return the fields that hold all of it."""
        fields = [*self.rewards, *self.others]
        for flags in self.flags:
            for key in flags.keys:
                below = (0, *flags.nested)
                fields.append(Field(key, flags.shape, torch.bool, True, nested=flags.nested))
                fields.append(Field(following(key), flags.shape, torch.bool, nested=below))
        return fields

    def count_fields(self) -> list[Field]:
        """Return where the steps of a trajectory are counted: beside each `done`."""
        found = [Field(keys.STEP_COUNT, (1,), torch.int64)] if self.at_root else []
        for flags in () if self.at_root else self.flags:
            key = (*flags.prefix, *keys.STEP_COUNT)
            found.append(Field(key, flags.shape, torch.int64, nested=flags.nested))
        return found

    def truncate(self, slab: Slab, t: int, which: Sequence[int] | np.ndarray) -> None:
        """Mark all parts of these envs as truncated at step t, as the envs are that they are of."""
        for flags in self.flags:
            for key in (flags.truncated, flags.done):
                slab.arrays[following(key)][t, which] = True

    def gains(self, slab: Slab, steps: int) -> np.ndarray:
        """Return what each env gained at each step, `[T, N]`: the sum of all its rewards."""
        columns = [slab.arrays[field.key][:steps] for field in self.rewards]
        if len(columns) == 1 and columns[0].shape[2:] == (1,):
            return columns[0][:, :, 0]
        total = np.zeros((steps, slab.arrays[keys.NEXT_DONE].shape[1]))
        for column in columns:
            total += column.sum(tuple(range(2, column.ndim)), dtype=np.float64)
        return total
