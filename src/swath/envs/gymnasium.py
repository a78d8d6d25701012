"""Gymnasium envs stepped one after the other in this thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from swath.compat.gymnasium import step_limit
from swath.envs.group import Group, as_declared, as_number, close_all, is_flag, not_a
from swath.envs.info import InfoNames, info_fields, info_writer, unseen_in, warn_unseen
from swath.memory import Slab
from swath.rollout import CallFailed, keys
from swath.tree import Leaf

__all__ = ["GymGroup"]


class GymGroup(Group):
    """N gymnasium envs with equal spaces; see `swath.rollout.env.EnvGroup`."""

    kept = ("envs", "_seeds", "_first", "live")

    def __init__(
        self, envs: Sequence[gym.Env[Any, Any]], batched: bool, info_keys: InfoNames = ()
    ) -> None:
        super().__init__(len(envs), envs[0].observation_space, envs[0].action_space)
        self.envs, self.batched = list(envs), batched
        self.time_limits = [_bare(env)[1] for env in envs]
        self._seeds: list[int | None] = [None] * self.num_envs
        self._first: list[tuple[Any, dict[str, Any]] | None] = [None] * self.num_envs
        self.info_fields = info_fields(info_keys, self._first_info)
        self.unseen = unseen_in(info_keys, self._first[0][1] if self._first[0] else {})

    def _first_info(self) -> dict[str, Any]:
        """Return what only an info can tell, from a reset that counts as the first one."""
        first = self._first[0] = self._reset_one(0)
        return first[1]

    @classmethod
    def joined(cls, groups: Sequence[GymGroup]) -> GymGroup:
        """Return one group of the envs of several that store the same infos."""
        joined = cls([env for group in groups for env in group.envs], batched=True)
        joined.info_fields = groups[0].info_fields
        joined.unseen = set.intersection(*(group.unseen for group in groups))
        joined._seeds = [seed for group in groups for seed in group._seeds]
        joined._first = [first for group in groups for first in group._first]
        return joined

    def parted(self, count: int) -> list[GymGroup]:
        """Return groups of some of the envs each, in order."""
        ends = [self.num_envs * number // count for number in range(count + 1)]
        groups = []
        for start, stop in itertools.pairwise(ends):
            part = GymGroup(self.envs[start:stop], batched=True)
            part.info_fields, part.unseen = self.info_fields, self.unseen
            part._seeds, part._first = self._seeds[start:stop], self._first[start:stop]
            groups.append(part)
        return groups

    def seed(self, seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self._first = [None] * self.num_envs

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> _BoundGym:
        return _BoundGym(self, slab, [_bare(env)[0] if bare else env for env in self.envs])

    def close(self, timeout: float | None = None) -> None:
        close_all(self.envs)

    def first(self, i: int) -> Any:
        """Start an episode of env i, with its seed if it has one not used yet; observe it."""
        made, self._first[i] = self._first[i], None
        return (made or self._reset_one(i))[0]

    def _reset_one(self, i: int) -> tuple[Any, dict[str, Any]]:
        seed = self._seeds[i]
        try:
            answer = self.envs[i].reset() if seed is None else self.envs[i].reset(seed=seed)
        except Exception as error:
            raise CallFailed(i, "reset()") from error
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise CallFailed(
                i, "reset()", f"reset() must return (observation, info); it returned {answer!r}"
            )
        self._seeds[i] = None  # only now: a reset that is broken off has not used it
        return answer


def _bare(env: gym.Env[Any, Any]) -> tuple[gym.Env[Any, Any], int | None]:
    """Return the env without the wrappers whose work the loop does anyway, and its time limit.

    `gymnasium.make` wraps every env to count its steps and to see that it is reset first: a tenth
    of a step of CartPole (docs/decisions/002-fast-paths.md). The loop does both for all envs.
    """
    limit: int | None = None
    while type(env) in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
        if isinstance(env, TimeLimit):
            limit = min(limit or step_limit(env), step_limit(env))
        env = env.env  # type: ignore[attr-defined]
    return env, limit


_FLAGS = frozenset((bool, np.bool_))


class _BoundGym:
    """A `GymGroup` that writes into one slab."""

    eager = False

    def __init__(self, group: GymGroup, slab: Slab, envs: Sequence[gym.Env[Any, Any]]) -> None:
        self._group = group
        self._leaves = group.observations
        self._obs = [slab.arrays[leaf.key] for leaf in self._leaves]
        # A memory view takes numbers only: numpy makes NaN of None and a number of text.
        self._reward = slab.arrays[keys.REWARD][:, :, 0].data
        self._terminated = slab.arrays[keys.NEXT_TERMINATED][:, :, 0]
        self._truncated = slab.arrays[keys.NEXT_TRUNCATED][:, :, 0]
        self._actions = _action_reader(group, slab)
        fields = group.info_fields
        self._info = info_writer(fields, slab, group.unseen) if fields else None
        leaf = self._leaves[0]
        flat = len(self._leaves) == 1 and not leaf.path and leaf.shape != ()
        self._form = flat, leaf, leaf.shape, leaf.dtype
        self._everyone, self._steps = range(len(envs)), [env.step for env in envs]

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        group = self._group
        group.thaw(which)
        if group.unseen and which is not None:
            warn_unseen(group.unseen)
        for i in range(group.num_envs) if which is None else which:
            self._write(group.first(i), [array[t] for array in self._obs], i)

    def step(self, t: int) -> Sequence[int]:
        (flat, leaf, shape, dtype), array = self._form, np.ndarray
        rows, rewards, info_to = [o[t + 1] for o in self._obs], self._reward, self._info
        row, no = rows[0], np.False_
        ended: list[int] = []
        i = 0
        try:
            for i, step, action in self._calls(t):
                observation, reward, terminated, truncated, info = step(action)
                if flat:  # the same as _write, without a call for every env at every step
                    if (
                        observation.__class__ is not array
                        or observation.shape != shape
                        or observation.dtype is not dtype
                    ):
                        observation = as_declared(observation, leaf, shape, i)
                    row[i] = observation
                else:
                    self._write(observation, rows, i)
                try:
                    rewards[t, i] = reward
                except Exception:
                    rewards[t, i] = as_number(reward, i)
                # There is one False of Python and one of numpy: what is neither is looked at.
                if (terminated is not False and terminated is not no) or (
                    truncated is not False and truncated is not no
                ):
                    self._note_end(t, i, terminated, truncated, ended)
                if info_to is not None:
                    info_to(info, t, i)
        except CallFailed as failure:
            failure.completed = self._before(i)
            raise
        except Exception as error:
            raised = CallFailed(i, "step()", _own_error(error))
            raised.completed = self._before(i)
            raise raised from error
        return ended

    def _note_end(self, t: int, i: int, terminated: Any, truncated: Any, ended: list[int]) -> None:
        """Write the flags of env i and add it to those that ended, if one of them is True."""
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if value.__class__ not in _FLAGS and not is_flag(value):
                raise not_a("bool", name, value, i)
        if terminated or truncated:
            self._terminated[t, i] = terminated
            self._truncated[t, i] = truncated
            ended.append(i)

    def _calls(self, t: int) -> Iterable[tuple[int, Callable[..., Any], Any]]:
        """Return number, `step` and action of each env that is not frozen."""
        live, everyone, actions = self._group.live, self._everyone, self._actions(t)
        if len(live) == len(everyone):
            return zip(everyone, self._steps, actions)  # noqa: B905 - strict takes time
        if self._info is not None:
            for i in np.setdiff1d(everyone, live).tolist():
                self._info({}, t, i)
        return [(i, self._steps[i], actions[i]) for i in live.tolist()]

    def _before(self, i: int) -> list[int]:
        """Return the envs that are stepped before env i."""
        return [j for j in self._group.live.tolist() if j < i]

    def _write(self, observation: Any, rows: Sequence[np.ndarray], i: int) -> None:
        """Write the observation of env i into these rows, one for each leaf."""
        for leaf, row in zip(self._leaves, rows):  # noqa: B905 - strict takes time
            row[i] = as_declared(observation, leaf, leaf.shape, i)


def _own_error(error: Exception) -> str | None:
    """Say what is wrong if not the env raised, but what it returned could not be taken apart."""
    traceback = error.__traceback__
    if traceback is not None and traceback.tb_next is not None:
        return None
    return (
        "step() gave no (observation, reward, terminated, truncated, info): "
        f"{type(error).__name__}: {error}"
    )


def _action_reader(group: GymGroup, slab: Slab) -> Callable[[int], Sequence[Any]]:
    """Return a function that gives the action of each env at step t, as the env expects it.

    Arrays are copied first: an env may keep or change what it gets, the slab may not.
    """
    arrays = [slab.arrays[leaf.key] for leaf in group.actions]
    readers = [_leaf_reader(a, leaf) for a, leaf in zip(arrays, group.actions, strict=True)]
    if len(readers) == 1 and not group.actions[0].path:
        return readers[0]
    build, n = group.build_action, group.num_envs

    def read(t: int) -> Sequence[Any]:
        values = [reader(t) for reader in readers]
        return [build([value[i] for value in values]) for i in range(n)]

    return read


def _leaf_reader(array: np.ndarray, leaf: Leaf) -> Callable[[int], Sequence[Any]]:
    if isinstance(leaf.space, gym.spaces.Discrete):
        # Items of the row are numpy integers, which a Discrete space checks faster than Python's.
        return array.__getitem__
    if leaf.shape == ():  # an array without dimensions, not the number that indexing would give
        return lambda t: [np.array(value) for value in array[t]]
    return lambda t: array[t].copy()
