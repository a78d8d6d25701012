"""What the rollout loop needs of environments, and nothing more.

A group is N envs that are stepped together. Bound to a slab it writes its outcome straight there:

```
 reset(t, which)   observation rows t of the envs in `which` (None: of all)
 step(t)           reads action row t; writes observation row t + 1 (the true last observation of an
                   episode included), reward and flags of row t; returns the envs that ended
```

Flags are False when the loop starts, so a group only has to write those that are True.

Torch-native envs can be bound to a slab on their own device, too. Nobody asks there which envs have
ended: `step(t)` writes all of row t, next observations included, and `reset(t + 1, mask)` the whole
observation row t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium as gym
import torch

from swath.memory import Field, Slab
from swath.policies import Interface
from swath.policies.random import Masks
from swath.rollout.outcome import Outcome
from swath.tree import Leaf

__all__ = ["BoundEnvs", "CallFailed", "EnvGroup", "interface_of"]


class BoundEnvs(Protocol):
    """A group that writes into one slab."""

    eager: bool
    """`step` has written the next observations too, and started the next episodes of envs that
    ended: their first observation is in row t + 1 already."""

    def reset(self, t: int, which: Any) -> None:
        """Start new episodes and write their first observation into row t."""
        ...

    def step(self, t: int) -> Sequence[int]:
        """Step all envs with action row t and return the numbers of those whose episode ended."""
        ...


class EnvGroup(Protocol):
    """N environments with equal spaces."""

    num_envs: int
    batched: bool
    """Delivered as `[N, T]`; a lone env that is not batched is delivered as `[T]`."""
    lead: tuple[int, ...] | None
    """How the envs are arranged, if not in one row: delivered as `[*lead, T]`."""
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    observations: Sequence[Leaf]
    actions: Sequence[Leaf]
    outcome: Outcome
    action_masks: Masks | None
    """Tells which actions the envs allow just now, where they may forbid some."""
    skips_rows: bool
    """Some rows are no transitions (a reset takes a step of its own); they are masked."""
    resets_singly: bool
    """Any env can be reset at any time."""
    freezes: bool
    """Envs that ended can be left alone while others go on."""
    native: bool
    """Can be bound to a slab on the device where the envs live."""
    needs_shared_memory: bool
    """The envs live in other processes, so a slab must be in memory that those can map."""
    restores: int
    """How often `restore` was called: what was bound before that is bound to envs that are gone."""

    @property
    def info_fields(self) -> list[Field]:
        """What is stored of the info dicts, below `("next", "info")`."""
        ...

    def seed(self, seeds: Sequence[int]) -> None:
        """Give each env its seed; it counts from its next reset."""
        ...

    def place(self, device: torch.device | None) -> torch.device:
        """Let the envs live on this device, if they can live anywhere; return where they do."""
        ...

    def freeze(self, which: Sequence[int]) -> None:
        """Step these envs no more until they are reset."""
        ...

    @property
    def time_limits(self) -> Sequence[int | None] | None:
        """The longest episode of each env, where the caller can see to it; see `bind`."""
        ...

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> BoundEnvs:
        """Return the group ready to write into this slab.

        Args:
            slab: Where to write.
            bare: Leave the `time_limits` to the caller, who counts steps anyway.
            eager: Every env that ends is reset at once, so `step` may do that; see `BoundEnvs`.
        """
        ...

    def snapshot(self) -> Any:
        """Return the envs' whole state, or None with a warning where they cannot be pickled."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Put the envs back into the state of a snapshot; all must be bound again."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """Close the envs; those in other processes are ended by force after so many seconds."""
        ...


def interface_of(group: EnvGroup) -> Interface:
    """Return what a group shows to a policy."""
    return Interface(
        group.observation_space,
        group.action_space,
        group.num_envs,
        group.batched,
        group.lead,
        (group.observations, group.actions),
    )


class CallFailed(Exception):
    """A call into one env failed; the loop adds where and when.

    Raised by `bind`, `freeze` and what is bound; whoever calls these makes an `EnvError` of it,
    since users know no `CallFailed`. Other methods of a group raise an `EnvError` themselves.

    `completed` are the envs that had made the same step before, so that their frame is not lost.
    """

    def __init__(self, index: int | None, call: str, message: str | None = None) -> None:
        super().__init__(message or call)
        self.index, self.call, self.message = index, call, message
        self.completed: list[int] = []
