"""From whatever the user passes as envs to one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from swath.envs.base import Env, check_equal_spaces, make_gym
from swath.envs.gymnasium import GymGroup
from swath.envs.native import TorchEnv
from swath.envs.tensors import NativeGroup
from swath.envs.torchrl import TorchRLGroup, is_torchrl_env
from swath.envs.vector import VectorGroup
from swath.errors import SwathError, UsageError
from swath.memory import Field, Slab
from swath.rollout import BoundEnvs, CallFailed, EnvGroup

__all__ = ["JoinedGroup", "as_group"]

_ACCEPTED = (
    "a gymnasium id, a gymnasium.Env or VectorEnv, a swath env, a torch-native env, a TorchRL "
    "EnvBase, a callable that makes one of these, or a list of such"
)


def as_group(source: Any, kwargs: Mapping[str, Any] | None = None) -> EnvGroup:
    """Return the group for an env, an id, a callable or a list of these.

    Args:
        source: What the user passed.
        kwargs: Keyword arguments for the callables, or for `gymnasium.make` with an id.
    """
    if isinstance(source, (list, tuple)):
        if not source:
            raise UsageError(f"the list of envs is empty; expected {_ACCEPTED}.")
        groups = [as_group(item, kwargs) for item in source]
        return groups[0] if len(groups) == 1 else _join(groups)
    if isinstance(source, str):
        return GymGroup([make_gym(source, **(kwargs or {}))], batched=False)
    group = _wrap(source)
    if group is not None:
        return group
    if not callable(source):
        raise UsageError(f"create_env_fn is {source!r}; expected {_ACCEPTED}.")
    return _from_callable(partial(source, **kwargs) if kwargs else source)


def _from_callable(make: Callable[[], Any]) -> EnvGroup:
    try:
        made = make()
    except SwathError:
        raise
    except Exception as error:
        raise UsageError(
            f"the env maker {make!r} raised {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, str):
        return as_group(made)
    group = _wrap(made)
    if group is None:
        raise UsageError(
            f"the env maker {make!r} returned {type(made).__name__}; expected {_ACCEPTED}."
        )
    return group


def _wrap(env: Any) -> EnvGroup | None:
    """Return the group of an env object, or None if it is none."""
    if isinstance(env, Env):
        return env.group
    if isinstance(env, type):
        return None
    if isinstance(env, gym.vector.VectorEnv):
        return VectorGroup(env)
    if isinstance(env, gym.Env):
        return GymGroup([env], batched=False)
    if is_torchrl_env(env):
        return TorchRLGroup(env)
    if isinstance(env, TorchEnv):
        return NativeGroup(env)
    return None


def _join(groups: Sequence[EnvGroup]) -> EnvGroup:
    check_equal_spaces(groups)
    if all(isinstance(group, GymGroup) and not group.info for group in groups):
        envs = [env for group in groups for env in group.envs]  # type: ignore[attr-defined]
        return GymGroup(envs, batched=True)
    return JoinedGroup(groups)


class JoinedGroup:
    """Several groups side by side, each writing its own part of the slab."""

    batched = True

    def __init__(self, groups: Sequence[EnvGroup]) -> None:
        self.groups = list(groups)
        ends = np.cumsum([group.num_envs for group in groups]).tolist()
        self.spans = [(end - g.num_envs, end) for end, g in zip(ends, groups, strict=True)]
        self.num_envs = ends[-1]
        self.observation_space = groups[0].observation_space
        self.action_space = groups[0].action_space
        self.info_fields: list[Field] = groups[0].info_fields
        self.skips_rows = any(group.skips_rows for group in groups)
        self.resets_singly = all(group.resets_singly for group in groups)
        self.freezes = all(group.freezes for group in groups)

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`."""
        for group, (start, end) in zip(self.groups, self.spans, strict=True):
            group.seed(seeds[start:end])

    def freeze(self, which: Sequence[int]) -> None:
        """See `EnvGroup`."""
        for group, inside in zip(self.groups, self.share(which), strict=True):
            if inside:
                group.freeze(inside)

    def share(self, which: Sequence[int]) -> list[list[int]]:
        """Return the envs of each group among these, by their number there."""
        return [[int(i) - start for i in which if start <= i < end] for start, end in self.spans]

    def bind(self, slab: Slab) -> _BoundJoined:
        """See `EnvGroup`."""
        parts = [slab.part(start, end) for start, end in self.spans]
        return _BoundJoined(self, [g.bind(p) for g, p in zip(self.groups, parts, strict=True)])

    def snapshot(self) -> list[Any] | None:
        """See `EnvGroup`."""
        snapshots = [group.snapshot() for group in self.groups]
        return None if any(one is None for one in snapshots) else snapshots

    def restore(self, snapshot: list[Any]) -> None:
        """See `EnvGroup`."""
        for group, one in zip(self.groups, snapshot, strict=True):
            group.restore(one)

    def close(self) -> None:
        """See `EnvGroup`."""
        for group in self.groups:
            group.close()


class _BoundJoined:
    def __init__(self, group: JoinedGroup, bound: Sequence[BoundEnvs]) -> None:
        self._group, self._bound = group, bound

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        shares = [None] * len(self._bound) if which is None else self._group.share(which)
        for bound, inside, span in zip(self._bound, shares, self._group.spans, strict=True):
            if inside is None or inside:
                _relocated(lambda b=bound, w=inside: b.reset(t, w), span[0])  # type: ignore[misc]

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        ended: list[int] = []
        for bound, (start, _) in zip(self._bound, self._group.spans, strict=True):
            inside = _relocated(lambda b=bound: b.step(t), start)  # type: ignore[misc]
            ended.extend(start + i for i in inside)
        return ended


def _relocated(call: Callable[[], Any], start: int) -> Any:
    """Make a call; a failure names the env by its number in the whole."""
    try:
        return call()
    except CallFailed as failure:
        if failure.index is not None:
            failure.index += start
        failure.completed = [*range(start), *(i + start for i in failure.completed)]
        raise
