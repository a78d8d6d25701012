"""Checks of whole batches: of a `CountingEnv` by its numbers, of any env by stepping it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict import TensorDictBase

from swath.rollout import keys
from swath.rollout.keys import following
from swath.seeding import env_seed
from swath.testing.envs import episode_plan, reward_of
from swath.tree import Key, action_leaves, builder, fetch, observation_leaves

__all__ = ["check_replay", "check_transitions"]

_FLAGS = (keys.TERMINATED, keys.TRUNCATED, keys.DONE)
_Frame = dict[Key, Any]  # the numpy value of each key


def check_transitions(
    batches: TensorDictBase | Iterable[TensorDictBase],
    *,
    longest: int = 9,
    max_frames_per_traj: int | None = None,
    set_truncated: bool = False,
    reset_at_each_iter: bool = False,
) -> int:
    """Assert that batches hold the real transitions of `CountingEnv`s, each once and in order.

    In each frame it checks the next observation (also the last of an episode), the reward, which
    depends on the action, and all flags. Between the frames of an env it checks that none is
    missing or doubled, that each episode has one id, and that no id is used twice. Masked frames
    are left out.

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
    owners: dict[int, tuple[int, int]] = {}
    # Of each env's last frame: where it led, its id, and whether a new episode follows.
    before: dict[int, tuple[tuple[int, int, int], int, bool]] = {}
    count = 0
    for frame, last in _frames(_listed(batches)):
        here: tuple[int, int, int] = tuple(frame["observation",].tolist())
        stamp, episode, step = here
        there, traj_id = (stamp, episode, step + 1), int(frame[keys.TRAJ_IDS])
        where = f"env {stamp}, episode {episode}, step {step}, id {traj_id}"
        owner = owners.setdefault(traj_id, (stamp, episode))
        _equal(owner, (stamp, episode), f"{where}: (env, episode) of this id")

        length, terminated, truncated = episode_plan(stamp, episode, longest)
        ends, over = step + 1 == length, step + 1 == max_frames_per_traj
        cut = over or (last and not ends and (reset_at_each_iter or set_truncated))
        _equal(any(frame[key].item() for key in _FLAGS), False, f"{where}: a flag at the root")
        _equal(tuple(frame["next", "observation"].tolist()), there, f"{where}: next observation")
        action = {key: value for key, value in frame.items() if key[0] == "action"}
        ending = (ends and terminated, (ends and truncated) or cut)
        _check_outcome(frame, reward_of(*here, action), *ending, where)

        if stamp in before:
            start, id_before, renewed = before[stamp]
            what = f"{where}: observation after {start}"
            if renewed:
                # With resets at each batch, an episode may have been cut before its first frame.
                first = max(start[1] + 1, episode if reset_at_each_iter else 0)
                start = (stamp, first, 0)
            _equal(here, start, what)
            _equal(traj_id == id_before, not renewed, f"{where}: same id as the frame before")
        before[stamp] = (there, traj_id, ends or over or (last and reset_at_each_iter))
        count += 1
    return count


def check_replay(
    batches: TensorDictBase | Iterable[TensorDictBase],
    make_env: Callable[[], gym.Env[Any, Any]],
    seed: int,
    first_env: int = 0,
) -> None:
    """Assert that stepping the envs by hand with the same actions gives the same batches.

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
        for t, (frame, _) in enumerate(_frames([batch])):
            where = f"env {row}, batch {number}, step {t}"
            _check_observation(env, observation, frame, (), where)
            # An env gets a number where it expects one, and arrays of its own.
            values = [
                frame[leaf.key].item()
                if isinstance(leaf.space, gym.spaces.Discrete)
                else np.array(frame[leaf.key])
                for leaf in actions
            ]
            observation, reward, terminated, truncated, _ = env.step(build(values))
            _check_observation(env, observation, frame, ("next",), where)
            _check_outcome(frame, float(reward), bool(terminated), bool(truncated), where)
            if terminated or truncated:
                observation, _ = env.reset()


def _listed(batches: Any) -> list[TensorDictBase]:
    return [batches] if isinstance(batches, TensorDictBase) else list(batches)


def _frames(batches: Sequence[TensorDictBase]) -> Iterator[tuple[_Frame, bool]]:
    """Yield the frames that are not masked, row by row, and whether each is the last of its row."""
    for batch in batches:
        columns = {
            (key if isinstance(key, tuple) else (key,)): value.flatten(0, batch.ndim - 1).numpy()
            for key, value in batch.items(True, True)
        }
        mask = columns.get(keys.MASK, np.ones(batch.numel(), bool))
        for n in np.flatnonzero(mask).tolist():
            frame = {key: column[n] for key, column in columns.items()}
            yield frame, (n + 1) % batch.shape[-1] == 0


def _check_outcome(
    frame: _Frame, reward: float, terminated: bool, truncated: bool, where: str
) -> None:
    _equal(frame[keys.REWARD].item(), float(np.float32(reward)), f"{where}: reward")
    flags = tuple(frame[following(key)].item() for key in _FLAGS)
    expected = (terminated, truncated, terminated or truncated)
    _equal(flags, expected, f"{where}: next terminated, truncated, done")


def _check_observation(
    env: gym.Env[Any, Any], observation: Any, frame: _Frame, below: Key, where: str
) -> None:
    for leaf in observation_leaves(env.observation_space):
        expected = np.asarray(fetch(observation, leaf.path)).astype(leaf.dtype)
        got = frame[(*below, *leaf.key)]
        if got.dtype != expected.dtype or not np.array_equal(got, expected, equal_nan=True):
            raise AssertionError(f"{where}: {(*below, *leaf.key)} is {got}; expected {expected}.")


def _equal(got: Any, expected: Any, what: str) -> None:
    if got != expected:
        raise AssertionError(f"{what} is {got}; {expected} was expected.")
