"""Is what a contestant delivered really the experience that was asked for?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bench.batch import Batch, Rows, join
from bench.works import Work


def batches_needed(work: Work) -> int:
    """How many consecutive batches to look at: two, or enough to see an episode end."""
    if not work.rules.only_time_ends:
        return 2
    return max(2, -(-2 * work.rules.time_limit // work.steps))


def problems(work: Work, batches: Sequence[Batch], *, own_policy: bool = False) -> list[str]:
    """What is wrong with consecutive batches; nothing, it is hoped.

    Args:
        work: What was to be collected.
        batches: Consecutive batches, each kept while the next was collected.
        own_policy: The contestant acts by a policy of its own: the actions are not compared.
    """
    wanted = (work.steps, work.batch_envs)
    for batch in batches:
        if batch.reward.shape != wanted:
            return [f"a batch of {batch.reward.shape} steps and envs, not {wanted}"]
    whole = join(batches)
    found = [*_continuity(work, whole), *_dynamics(work, whole), *_time_limit(work, whole)]
    if not own_policy:
        found += _actions(work, whole)
    return found


def follows(work: Work, batch: Batch, earlier: Batch) -> bool:
    """Whether a batch goes on where another one ended, afresh in envs whose episode had ended."""
    done = earlier.done[-1]
    reached = {key: rows[-1] for key, rows in earlier.next_obs.items()}
    seen = {key: rows[0] for key, rows in batch.obs.items()}
    return bool(np.where(done, work.rules.is_start(seen), ~_differ(reached, seen, 1)).all())


def _wrong(what: str, bad: np.ndarray) -> Iterator[str]:
    if bad.any():
        where = np.argwhere(bad)[0].tolist()
        yield f"{what}: {int(bad.sum())} of {bad.size} frames, the first at (step, env) {where}"


def _differ(one: Rows, other: Rows, dims: int, tolerance: float = 0.0) -> np.ndarray:
    """Where two sets of observations differ, over the first ``dims`` dimensions."""
    differ = False
    for key, left in one.items():
        right = other[key]
        if tolerance and left.dtype.kind == "f":
            unequal = np.abs(left - right) > tolerance
        else:
            unequal = left != right
        differ = differ | unequal.reshape(*unequal.shape[:dims], -1).any(-1)
    return np.asarray(differ)


def _continuity(work: Work, batch: Batch) -> Iterator[str]:
    """An episode goes on from where it was, in the same batch and over to the next."""
    after = {key: rows[1:] for key, rows in batch.obs.items()}
    reached = {key: rows[:-1] for key, rows in batch.next_obs.items()}
    done, known = batch.done[:-1], batch.known[:-1]
    broken = _differ(after, reached, 2) & ~done & known
    yield from _wrong("next observation is not the following one", broken)
    yield from _wrong("episode does not start afresh", ~work.rules.is_start(after) & done)


def _dynamics(work: Work, batch: Batch) -> Iterator[str]:
    """The env itself, put into the stored state, gives the stored outcome."""
    known = batch.known
    states = {key: rows[known] for key, rows in batch.obs.items()}
    reached = {key: rows[known] for key, rows in batch.next_obs.items()}
    outcome = work.rules.step(states, batch.action[known])
    tolerance = work.rules.tolerance

    def spread(bad: np.ndarray) -> np.ndarray:
        rows = np.zeros_like(known)
        rows[known] = bad
        return rows

    yield from _wrong("next observation", spread(_differ(reached, outcome.obs, 1, tolerance)))
    yield from _wrong("reward", spread(np.abs(batch.reward[known] - outcome.reward) > tolerance))
    wrong_end = batch.terminated[known] != outcome.terminated
    if outcome.unsure is not None:
        wrong_end &= ~outcome.unsure
    yield from _wrong("terminated", spread(wrong_end))


def _time_limit(work: Work, batch: Batch) -> Iterator[str]:
    """Truncated at the time limit, and only there; lengths count from the first reset seen."""
    age = np.full(work.batch_envs, -(10**9))  # negative: not known
    bad = np.zeros_like(batch.truncated)
    for t, (truncated, done) in enumerate(zip(batch.truncated, batch.done, strict=True)):
        age += 1
        bad[t] = (age > 0) & (truncated != (age == work.rules.time_limit)) & batch.known[t]
        age[done] = 0
    yield from _wrong("truncated", bad)


def _actions(work: Work, batch: Batch) -> Iterator[str]:
    """The stored action is what the policy does on the stored observation."""
    seen = torch.from_numpy(np.ascontiguousarray(batch.obs[work.policy_key]))
    with torch.no_grad():
        agrees = work.policy().agrees(seen, torch.from_numpy(np.ascontiguousarray(batch.action)))
    yield from _wrong("action is not the policy's", ~agrees.numpy())
