"""What a rollout is to be like, what has become of it, and how it is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType

from swath.memory import HeapMemory, Layout, MemoryOrder, PinnedMemory, SharedMemory, Slab, SlabPool
from swath.memory.weights import named_weights
from swath.policies import policy_module
from swath.rollout import columns, keys
from swath.rollout.env import EnvGroup
from swath.rollout.transfer import Transfer
from swath.tree import Leaf

__all__ = ["Devices", "Filled", "Plan", "lend", "slab_for", "view"]


@dataclass(frozen=True)
class Devices:
    """Where envs, policy and batches live; None where nothing was said."""

    env: torch.device | None = None
    policy: torch.device | None = None
    storing: torch.device | None = None

    def settled(self, group: EnvGroup, policy: Any) -> tuple[torch.device, ...]:
        """Return the three devices, after moving the envs if they can be moved.

        A policy lives where its weights are, or beside the envs; batches are stored beside both, or
        on the host.
        """
        env = group.place(_exact(self.env))
        module = policy_module(policy)
        weights = named_weights(module).values() if module is not None else ()
        own = next((weight.device for weight in weights), env)
        computes = _exact(self.policy) or own
        stored = env if env == computes else torch.device("cpu")
        return env, computes, _exact(self.storing) or stored


def _exact(device: torch.device | None) -> torch.device | None:
    """Return a device with its index, which the tensors that live there have."""
    return None if device is None else torch.empty(0, device=device).device


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rollout is to be like; the part of the options that the loop reads."""

    steps: int
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    """So many frames are random first, and a column tells all that are. None: no such column; it
    depends on the option alone, so that workers with and without random frames left are alike."""
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    compact_obs: bool = False
    stop_at_first_end: bool = False
    exploration_type: InteractionType = InteractionType.RANDOM
    trust_policy: bool = False
    """The policy takes a TensorDict, even if nothing about it says so."""
    memory_order: MemoryOrder = "time"
    compile_policy: dict[str, Any] | None = None
    cudagraph: bool | str = "auto"
    cudagraph_policy: bool = False
    env_groups: int = 1
    devices: Devices = field(default_factory=Devices)
    seed: int | None = None
    first_env: int = 0
    """The global index of the first env."""
    first_stream: int | None = None
    """The index of its random stream, if that is another: a restarted worker gets fresh ones."""
    first_traj_id: int = 0
    worker: int | None = None
    """The number of the worker, for messages."""
    marks_worker: bool = False
    """It is stored with each frame."""
    masked: bool = False
    """There is a mask, though all rows are frames: whoever joins rollouts may need it."""


@dataclass(frozen=True)
class Filled:
    """A slab with the rows that were filled and the number of frames in them."""

    slab: Slab
    steps: int
    frames: int
    mask: np.ndarray | None = None
    """Which rows of a broken rollout are frames, `[steps, N]`; None if all are."""


def slab_for(group: EnvGroup, layout: Layout, pinned: bool = False) -> Slab:
    """Return a slab that these envs can write into, `pinned` for a GPU to read if that can be."""
    memory = SharedMemory if group.needs_shared_memory else PinnedMemory if pinned else HeapMemory
    return Slab(layout, memory(layout.nbytes))


def lend(
    pool: SlabPool,
    filled: Filled,
    observations: Sequence[Leaf],
    lead: tuple[int, ...],
    transfer: Transfer | None = None,
) -> TensorDict:
    """Return a rollout as a batch `[*lead, T]` of views on its slab, which comes back by itself.

    With a transfer, on a slab of the device where batches are stored.
    """
    slab = filled.slab

    def views(steps: int, lead: tuple[int, ...]) -> TensorDict:
        if transfer is None:
            return pool.lend(slab, steps, lead)
        return transfer.pool.lend(transfer.move(slab, pool.give_back), steps, lead)

    return _complete(filled, observations, lead, views)


def view(filled: Filled, observations: Sequence[Leaf], lead: tuple[int, ...]) -> TensorDict:
    """Return the same without lending it: it stays as it is until the slab is written again."""
    return _complete(filled, observations, lead, filled.slab.view)


def _complete(
    filled: Filled,
    observations: Sequence[Leaf],
    lead: tuple[int, ...],
    views: Callable[[int, tuple[int, ...]], TensorDict],
) -> TensorDict:
    slab, steps, table = filled.slab, filled.steps, None
    if keys.FINAL in slab.arrays:
        table = columns.final_table(slab, observations, steps, filled.mask)
    batch = views(steps, lead)
    if table is not None:
        batch.set(keys.FINAL_OBS, table)
    if filled.mask is not None:
        mask = torch.from_numpy(filled.mask).T.reshape(*lead, steps)
        batch.set(keys.MASK, mask.contiguous().to(batch[keys.NEXT_DONE].device))
    return batch
