"""Checks of whole batches: of a `CountingEnv` by its numbers, of any env by stepping it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict import TensorDictBase

from swath.rollout import keys
from swath.rollout.keys import following
from swath.seeding import env_seed
from swath.testing.envs import episode_plan, reward_of
from swath.tree import Key, Leaf, action_leaves, builder, fetch, observation_leaves

__all__ = ["check_replay", "check_transitions"]

_FLAGS = (keys.TERMINATED, keys.TRUNCATED, keys.DONE)


@dataclass(frozen=True)
class _Rules:
    """What of a collector's options changes where trajectories end."""

    longest: int
    max_frames_per_traj: int | None
    set_truncated: bool
    reset_at_each_iter: bool


@dataclass(frozen=True)
class _Frame:
    """One delivered transition of a `CountingEnv`."""

    here: tuple[int, int, int]
    there: tuple[int, int, int]
    action: dict[Key, np.ndarray]
    reward: float
    flags: tuple[bool, bool, bool]
    """Terminated, truncated, done, below `next`."""
    begins_done: bool
    """One of the flags at the root."""
    traj_id: int
    last: bool
    """The last row of its batch."""


def check_transitions(
    batches: TensorDictBase | Iterable[TensorDictBase],
    *,
    longest: int = 9,
    max_frames_per_traj: int | None = None,
    set_truncated: bool = False,
    reset_at_each_iter: bool = False,
) -> int:
    """Assert that batches hold the transitions of `CountingEnv`s: real, once each, in order.

    Checked are, frame by frame: the next observation (the last of an episode included), the reward
    and with it the action, all flags; from frame to frame of an env: no gap, no double, one id for
    each episode and no id twice. Frames that are masked are left out.

    Args:
        batches: A batch of any shape, or consecutive batches; time is the last dimension.
        longest: As the envs have it.
        max_frames_per_traj: As the collector has it.
        set_truncated: As the collector has it.
        reset_at_each_iter: As the collector has it.

    Returns:
        The number of frames.

    Examples:
        >>> from swath.collectors import Collector
        >>> from swath.testing import CountingEnv
        >>> with Collector([CountingEnv, CountingEnv], frames_per_batch=30, seed=0) as collector:
        ...     check_transitions([collector.next(), collector.next()])
        60
    """
    rules = _Rules(longest, max_frames_per_traj, set_truncated, reset_at_each_iter)
    frames = list(_frames(_listed(batches)))
    before: dict[int, _Frame] = {}
    owners: dict[int, tuple[int, int]] = {}
    for frame in frames:
        stamp, episode, step = frame.here
        where = f"env {stamp}, episode {episode}, step {step}, id {frame.traj_id}"
        owner = owners.setdefault(frame.traj_id, (stamp, episode))
        _equal(owner, (stamp, episode), f"{where}: (env, episode) of this id")
        _check_frame(frame, rules, where)
        if stamp in before:
            _check_order(before[stamp], frame, rules, where)
        before[stamp] = frame
    return len(frames)


def _ending(frame: _Frame, rules: _Rules) -> tuple[tuple[bool, bool, bool], bool]:
    """Return the flags that a frame must have, and whether its env starts a new episode then."""
    stamp, episode, step = frame.here
    length, terminated, truncated = episode_plan(stamp, episode, rules.longest)
    ends = step + 1 == length
    over = step + 1 == rules.max_frames_per_traj
    cut = frame.last and not ends and (rules.reset_at_each_iter or rules.set_truncated)
    flags = (ends and terminated, (ends and truncated) or over or cut, ends or over or cut)
    return flags, ends or over or (frame.last and rules.reset_at_each_iter)


def _check_frame(frame: _Frame, rules: _Rules, where: str) -> None:
    stamp, episode, step = frame.here
    _equal(frame.begins_done, False, f"{where}: a flag at the root")
    _equal(frame.there, (stamp, episode, step + 1), f"{where}: next observation")
    _equal(frame.reward, reward_of(*frame.here, frame.action), f"{where}: reward")
    flags, _ = _ending(frame, rules)
    _equal(frame.flags, flags, f"{where}: next terminated, truncated, done")


def _check_order(before: _Frame, frame: _Frame, rules: _Rules, where: str) -> None:
    """Check that a frame follows the one before it of the same env."""
    stamp, episode, _ = before.here
    _, renewed = _ending(before, rules)
    start = (stamp, episode + 1, 0) if renewed else before.there
    if renewed and rules.reset_at_each_iter:
        # The episode in between may have been cut before its first frame.
        start = (stamp, max(frame.here[1], episode + 1), 0)
    _equal(frame.here, start, f"{where}: observation after {before.there}")
    _equal(frame.traj_id == before.traj_id, not renewed, f"{where}: same id as the frame before")


def _equal(got: Any, expected: Any, what: str) -> None:
    if got != expected:
        raise AssertionError(f"{what} is {got}; {expected} was expected.")


def _listed(batches: Any) -> list[TensorDictBase]:
    return [batches] if isinstance(batches, TensorDictBase) else list(batches)


def _frames(batches: Sequence[TensorDictBase]) -> Iterator[_Frame]:
    """Yield the frames row by row, masked ones left out."""
    for batch in batches:
        last = np.zeros(batch.batch_size, bool)
        last[..., -1] = True
        columns = {
            (key if isinstance(key, tuple) else (key,)): value.numpy().reshape(
                -1, *value.shape[batch.ndim :]
            )
            for key, value in batch.items(True, True)
        }
        actions = {key: column for key, column in columns.items() if key[0] == "action"}
        mask = columns.get(keys.MASK, np.ones(batch.numel(), bool))
        here, there = columns["observation",].tolist(), columns["next", "observation"].tolist()
        for n in np.flatnonzero(mask).tolist():
            terminated, truncated, done = (bool(columns[following(key)][n, 0]) for key in _FLAGS)
            yield _Frame(
                tuple(here[n]),
                tuple(there[n]),
                {key: column[n] for key, column in actions.items()},
                float(columns[keys.REWARD][n, 0]),
                (terminated, truncated, done),
                any(columns[key][n, 0] for key in _FLAGS),
                int(columns[keys.TRAJ_IDS][n]),
                bool(last.reshape(-1)[n]),
            )


def check_replay(
    batches: TensorDictBase | Iterable[TensorDictBase],
    make_env: Callable[[], gym.Env[Any, Any]],
    seed: int,
    first_env: int = 0,
) -> None:
    """Assert that batches hold what stepping the envs by hand with the same actions gives.

    Args:
        batches: The first batch of a collector made with this seed, or the first few; `[T]` or
            `[N, T]`.
        make_env: Makes an env that is a function of its seed and its actions.
        seed: The seed of the collector.
        first_env: The global index of the first env.

    Examples:
        >>> import gymnasium
        >>> from swath.collectors import Collector
        >>> with Collector("CartPole-v1", frames_per_batch=100, seed=3) as collector:
        ...     check_replay(collector.next(), lambda: gymnasium.make("CartPole-v1"), seed=3)
    """
    listed = [b if b.ndim > 1 else b.unsqueeze(0) for b in _listed(batches)]
    for row in range(listed[0].shape[0]):
        env = make_env()
        try:
            _replay(env, [batch[row] for batch in listed], env_seed(seed, first_env + row), row)
        finally:
            env.close()


def _replay(env: gym.Env[Any, Any], batches: Sequence[TensorDictBase], seed: int, row: int) -> None:
    actions = action_leaves(env.action_space)
    build = builder(env.action_space, actions)
    observation, _ = env.reset(seed=seed)
    for number, batch in enumerate(batches):
        for t in range(batch.shape[0]):
            frame, where = batch[t], f"env {row}, batch {number}, step {t}"
            _check_observation(env, observation, frame, (), where)
            values = [_single(frame[leaf.key].numpy(), leaf) for leaf in actions]
            observation, reward, terminated, truncated, _ = env.step(build(values))
            _check_observation(env, observation, frame, ("next",), where)
            _equal(frame[keys.REWARD].item(), float(np.float32(reward)), f"{where}: reward")
            outcome = (bool(terminated), bool(truncated), bool(terminated or truncated))
            flags = tuple(frame[following(key)].item() for key in _FLAGS)
            _equal(flags, outcome, f"{where}: next terminated, truncated, done")
            if terminated or truncated:
                observation, _ = env.reset()


def _single(value: np.ndarray, leaf: Leaf) -> Any:
    """Return a leaf of an action as an env expects it: a number, or an array of its own."""
    return value.item() if isinstance(leaf.space, gym.spaces.Discrete) else value.copy()


def _check_observation(
    env: gym.Env[Any, Any], observation: Any, frame: TensorDictBase, below: Key, where: str
) -> None:
    for leaf in observation_leaves(env.observation_space):
        expected = np.asarray(fetch(observation, leaf.path)).astype(leaf.dtype)
        got = frame[(*below, *leaf.key)].numpy()
        if got.dtype != expected.dtype or not np.array_equal(got, expected, equal_nan=True):
            raise AssertionError(f"{where}: {(*below, *leaf.key)} is {got}; expected {expected}.")
