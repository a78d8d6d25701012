"""The columns of a rollout: which fields it has, and those that are filled in one pass.

All functions here work on whole columns `[T, N]` of a slab, or on the rows of a few envs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from swath.memory import Field, Slab, leaf_dtype
from swath.policies import Interface, Policy
from swath.rollout import keys
from swath.rollout.final import FinalObservations
from swath.rollout.keys import following
from swath.rollout.outcome import Outcome
from swath.tree import Key, Leaf, nest

__all__ = [
    "ROOT_FLAGS",
    "clear",
    "count_fields",
    "cut",
    "env_fields",
    "fill_counts",
    "fill_ids",
    "final_table",
    "hold",
    "keep_final",
    "mark_done",
    "next_pairs",
    "own_fields",
]

ROOT_FLAGS = (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
_NEXT_FLAGS = (keys.NEXT_DONE, keys.NEXT_TERMINATED, keys.NEXT_TRUNCATED)


def env_fields(
    interface: Interface,
    info_fields: Sequence[Field],
    policy: Policy,
    outcome: Outcome,
    *,
    masked: bool,
    compact: bool,
) -> list[Field]:
    """Return the fields that envs and the carried state of the policy need."""
    fields = []
    for leaf in interface.observations:
        form, below = (leaf.shape, leaf_dtype(leaf)), (0, *leaf.nested)
        fields.append(Field(leaf.key, *form, carried=True, nested=leaf.nested))
        fields.append(Field(following(leaf.key), *form, delivered=not compact, nested=below))
    for leaf in interface.actions:
        fields.append(Field(leaf.key, leaf.shape, leaf_dtype(leaf), nested=leaf.nested))
    for state in policy.states:
        shape, dtype = tuple(state.initial.shape), state.initial.dtype
        fields.append(Field(state.key, shape, dtype, carried=True))
        fields.append(Field(following(state.key), shape, dtype))
    if policy.needs_is_init:
        fields.append(Field(keys.IS_INIT, (1,), torch.bool, carried=True))
        fields.append(Field(following(keys.IS_INIT), (1,), torch.bool))
    fields += [Field(key, (1,), torch.bool, carried=True) for key in ROOT_FLAGS]
    fields += [Field(key, (1,), torch.bool) for key in _NEXT_FLAGS]
    fields += outcome.fields()
    if masked:
        fields.append(Field(keys.MASK, (), torch.bool))
    if compact:
        fields.append(Field(keys.FINAL, (), torch.int64))
    return [*fields, *info_fields]


def own_fields(*, random: bool, worker: bool) -> list[Field]:
    """Return the fields that say where a frame comes from."""
    named = [keys.TRAJ_IDS, keys.POLICY_VERSION, *[keys.WORKER] * worker]
    fields = [Field(key, (), torch.int64) for key in named]
    return [*fields, Field(keys.RANDOM, (), torch.bool)] if random else fields


def clear(slab: Slab) -> None:
    """Forget the flags of the last rollout: whoever writes next writes only what is True."""
    for key in (*ROOT_FLAGS, *_NEXT_FLAGS, keys.IS_INIT, following(keys.IS_INIT), keys.RANDOM):
        if key in slab.arrays:
            slab.arrays[key].fill(False)
    if keys.MASK in slab.arrays:
        slab.arrays[keys.MASK].fill(True)


def next_pairs(
    slab: Slab, observed: Sequence[Key], policy: Policy
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what row t is copied to and from after step t: below `next`, and the next at the root.

    The other way round where the env says only how a state starts, and the policy how it goes on.
    """
    carried = [*observed, *(state.key for state in policy.states)]
    pairs = [(following(key), key) for key in carried if key not in policy.primed]
    forth = [(slab.arrays[after], slab.arrays[key][1:]) for after, key in pairs]
    back = [(slab.arrays[key][1:], slab.arrays[following(key)]) for key in policy.primed]
    return forth + back


def mark_done(slab: Slab, t: int, which: np.ndarray) -> None:
    """Set `done` at step t of these envs from their two other flags."""
    done = slab.arrays[keys.NEXT_TERMINATED][t, which] | slab.arrays[keys.NEXT_TRUNCATED][t, which]
    slab.arrays[keys.NEXT_DONE][t, which] = done


def keep_final(slab: Slab, interface: Interface, t: int, which: np.ndarray) -> None:
    """Put the last observation of these envs aside before a reset overwrites it."""
    for leaf in interface.observations:
        slab.arrays[following(leaf.key)][t, which] = slab.arrays[leaf.key][t + 1, which]


def hold(slab: Slab, outcome: Outcome, which: np.ndarray, t: int) -> None:
    """Freeze envs that have ended: from row t on they repeat themselves and are masked."""
    flags = (*ROOT_FLAGS, *outcome.carried)
    for key, place in slab.layout.places.items():
        if not place.field.carried:
            continue
        array = slab.arrays[key]
        if key in flags and t > 0:
            array[t, which] = slab.arrays[following(key)][t - 1, which]
        array[t + 1 :, which] = array[t, which]
        if following(key) in slab.arrays:
            slab.arrays[following(key)][t:, which] = array[t, which]
    for field in (*outcome.rewards, *outcome.others):
        slab.arrays[field.key][t:, which] = 0
    slab.arrays[keys.MASK][t:, which] = False


def cut(slab: Slab, t: int, frozen: np.ndarray) -> np.ndarray:
    """Mark the trajectories that are open at the last step t as truncated; return their envs."""
    is_open = ~slab.arrays[keys.NEXT_DONE][t, :, 0] & ~frozen
    if keys.MASK in slab.arrays:
        is_open &= slab.arrays[keys.MASK][t]
    open_envs = np.flatnonzero(is_open)
    slab.arrays[keys.NEXT_TRUNCATED][t, open_envs] = True
    slab.arrays[keys.NEXT_DONE][t, open_envs] = True
    return open_envs


def fill_ids(
    slab: Slab,
    steps: int,
    current: np.ndarray,
    ends: Sequence[tuple[int, int]],
    next_id: int,
) -> int:
    """Write the trajectory ids and return the next free one.

    Args:
        slab: Where to.
        steps: How many rows are filled.
        current: The id of each env's open trajectory, `[N]`; brought up to date in place.
        ends: The (step, env) at which a trajectory ended and another began, in order of time.
        next_id: The next free id.
    """
    ids = slab.arrays[keys.TRAJ_IDS][:steps]
    ids.fill(0)
    if not steps:
        return next_id
    ids[0] = current
    if ends:
        at = np.asarray(ends)
        new = np.arange(next_id, next_id + len(at))
        inside = at[:, 0] + 1 < steps
        ids[at[inside, 0] + 1, at[inside, 1]] = new[inside]
        current[at[:, 1]] = new
    # Ids only grow, so the id of a row is the largest that was begun by then.
    np.maximum.accumulate(ids, 0, out=ids)
    return next_id + len(ends)


def count_fields(outcome: Outcome, fields: Sequence[Field]) -> list[Field]:
    """Return the fields that count the steps of trajectories, where none of these does so."""
    taken = {field.key for field in fields}
    counts = [field for field in outcome.count_fields() if field.key not in taken]
    after = [replace(f, key=following(f.key), nested=(0, *f.nested)) for f in counts]
    return [field for pair in zip(counts, after, strict=True) for field in pair]


def fill_counts(
    slab: Slab,
    fields: Sequence[Field],
    steps: int,
    lengths: np.ndarray,
    ends: Sequence[tuple[int, int]],
    mask: np.ndarray | None,
) -> None:
    """Write which step of its trajectory each frame is, from 0, and below `next` the one after.

    Args:
        slab: Where to.
        fields: Which, as `count_fields` gives them.
        steps: How many rows are filled.
        lengths: Of each env's open trajectory before the first row, `[N]`.
        ends: The (step, env) at which a trajectory ended and another began.
        mask: `[T, N]`, False where a row is no transition.
    """
    shape = (steps, len(lengths))
    frames = np.ones(shape, np.int64) if mask is None else mask[:steps].astype(np.int64)
    after = lengths + frames.cumsum(0)
    before = after - frames
    begun = np.zeros_like(before)
    for t, i in ends:
        if t + 1 < steps:
            begun[t + 1, i] = before[t + 1, i]
    np.maximum.accumulate(begun, 0, out=begun)  # the sums only grow
    for field, count in zip(fields, itertools.cycle((before - begun, after - begun)), strict=False):
        column = slab.arrays[field.key][:steps]
        column[...] = count.reshape(*shape, *[1] * (column.ndim - 2))


def final_table(
    slab: Slab, observations: Sequence[Leaf], steps: int, mask: np.ndarray | None = None
) -> NonTensorData:
    """Return the observations that no other row of a compact rollout holds, and point to them.

    These are the last observations of ended trajectories and those after the last row. Column
    `("collector", "final")` has their number in the table, -1 where the next row has it.
    """
    ends = slab.arrays[keys.NEXT_DONE][:steps, :, 0].copy()
    ends[steps - 1 :] = True
    if mask is None and keys.MASK in slab.arrays:
        mask = slab.arrays[keys.MASK][:steps]
    if mask is not None:  # some envs have fewer rows
        ends[:-1] |= mask[:-1] & ~mask[1:]
    index = slab.arrays[keys.FINAL][:steps]
    index.fill(-1)
    index[ends] = np.arange(int(ends.sum()))
    chosen = torch.from_numpy(ends)
    table = {leaf.key: slab.tensors[following(leaf.key)][:steps][chosen] for leaf in observations}
    return NonTensorData(FinalObservations(TensorDict(nest(table), [int(ends.sum())])))
