"""What your process and a worker say to each other. Everything large is in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swath.data.storage import Handle
from swath.memory import Field, Layout
from swath.memory.weights import WeightSpec
from swath.observe import Shares
from swath.policies import Interface
from swath.rollout import Plan

__all__ = [
    "Acknowledge",
    "Attach",
    "Begin",
    "Built",
    "Call",
    "Close",
    "Collect",
    "Detach",
    "Died",
    "Done",
    "Failed",
    "Job",
    "Publish",
    "PutState",
    "Ready",
    "Reset",
    "Rolled",
    "SetSeed",
    "State",
    "Store",
    "TakeHeld",
    "TakeState",
    "Value",
    "Weights",
]


@dataclass(frozen=True)
class Job:
    """What a worker is to be; parts of the user's are packed."""

    number: int
    envs: bytes
    copies_envs: bool
    """`envs` holds env objects, which other workers have copies of."""
    env_kwargs: bytes
    policy: bytes
    init_fn: bytes
    registered: bytes
    """Gymnasium ids; see `envs/registry.py`."""
    makes_policy: bool
    """`policy` is a callable that makes it."""
    num_threads: int
    quiet: bool
    """Warnings are not shown."""
    refreshes: bool
    """New weights are taken before any forward pass, not only before a rollout."""


# -- from your process ------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Make the runner, now that it is known which envs come before; answered by `Ready`."""

    plan: Plan


@dataclass(frozen=True)
class Weights:
    """The block that weights are published in; comes with its memory."""

    spec: WeightSpec
    readers: int
    reader: int
    """Which of them the worker is."""
    handle: Any = None
    """How to open the memory of a GPU that holds them."""


@dataclass(frozen=True)
class Publish:
    """New weights, to a worker that does not share memory; comes with them, even in a rollout."""

    version: int
    missing: frozenset[str]
    """Tensors that were never given: the worker keeps its own."""


@dataclass(frozen=True)
class Attach:
    """A slab to write into, or some of its envs; comes with its memory."""

    slab: int
    layout: Layout
    start: int
    stop: int


@dataclass(frozen=True)
class Detach:
    """A slab that is used no more."""

    slab: int


@dataclass(frozen=True)
class Collect:
    """Make a rollout; answered by `Rolled` or `Failed`."""

    slab: int
    steps: int


@dataclass(frozen=True)
class Store:
    """Write all further rollouts into a replay buffer; answered by `Done`.

    It comes with the buffer's memory; until there is some, rollouts wait.
    """

    finish: bytes
    """What is done with rollouts before, packed."""
    handle: Handle | bytes | None
    """Of memory; or a buffer in an actor, packed."""


@dataclass(frozen=True)
class TakeHeld:
    """Tell of trajectories that are not written yet; answered by `State`."""

    clear: bool


@dataclass(frozen=True)
class SetSeed:
    """Restart all random streams; answered by `Done`."""

    seed: int
    static: bool = False
    """All envs get one seed."""


@dataclass(frozen=True)
class Reset:
    """Start new episodes with the next rollout; answered by `Done`."""


@dataclass(frozen=True)
class TakeState:
    """Answered by `State`."""


@dataclass(frozen=True)
class PutState:
    """Continue from a state; answered by `Done`."""

    state: bytes


@dataclass(frozen=True)
class Acknowledge:
    """Take the newest weights now; answered by `Done`."""


@dataclass(frozen=True)
class Call:
    """Call a function with what the worker holds; answered by `Value`."""

    function: bytes


@dataclass(frozen=True)
class Close:
    """Close the envs and end."""


# -- from a worker ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """The envs are there."""

    num_envs: int


@dataclass(frozen=True)
class Ready:
    """The envs and the policy are there."""

    interface: Interface
    fields: Sequence[Field]
    weights: WeightSpec
    devices: str = ""
    """The device plan, in words."""
    envs: str = ""
    """The envs, in words by which a state of others can be told."""


@dataclass(frozen=True)
class Rolled:
    """A rollout is in the slab."""

    slab: int
    steps: int
    frames: int
    version: int
    episodes: Sequence[tuple[float, int]]
    """Return and length of those that ended."""
    shares: Shares
    open_ids: Sequence[int]
    """Trajectories that go on in the next rollout."""
    all_frozen: bool = False
    first: bytes | None = None
    """A frame like those to be stored, packed: there is no memory for them yet."""


@dataclass(frozen=True)
class Failed:
    """A call into env or policy raised; what is whole is in the slab, if it was a rollout."""

    error: bytes
    slab: int | None = None
    steps: int = 0
    frames: int = 0
    mask: np.ndarray | None = None
    storing: bool = False
    """It was the replay buffer that did not take the rollout."""


@dataclass(frozen=True)
class State:
    """What was asked for, packed: the state of the runner, or frames."""

    state: bytes


@dataclass(frozen=True)
class Value:
    """What a function returned, packed."""

    value: bytes


@dataclass(frozen=True)
class Done:
    """It is done."""


@dataclass(frozen=True)
class Died:
    """The worker ended without a reply. Made by the parent, never sent by a worker."""

    who: str
    how: str
    late: float | None = None
    """It was killed because it had not answered for this many seconds."""
    unplaced: bool = False
    """Ray found no node for it within `launch_timeout`."""
