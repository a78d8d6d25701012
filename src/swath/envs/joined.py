"""Several groups of envs, of whatever kinds, side by side as one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from swath.envs.group import Group
from swath.envs.gymnasium import GymGroup
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import CallFailed, EnvGroup
from swath.tree import action_leaves, observation_leaves

__all__ = ["JoinedGroup", "join"]


def join(groups: Sequence[EnvGroup]) -> EnvGroup:
    """Return one batched group of all envs, which must be able to share a slab."""
    for number, group in enumerate(groups):
        _check_equal(groups[0], group, number)
    envs = [e for g in groups for e in getattr(g, "envs", [getattr(g, "env", g)])]
    if len({id(e.unwrapped if isinstance(e, gym.Env) else e) for e in envs}) < len(envs):
        raise UsageError(
            "one env object cannot be used for several envs; pass a callable that makes a new one "
            "at each call."
        )
    gyms = [group for group in groups if isinstance(group, GymGroup)]
    return GymGroup.joined(gyms) if len(gyms) == len(groups) else JoinedGroup(groups)


def _check_equal(first: EnvGroup, other: EnvGroup, number: int) -> None:
    for name, leaves in (
        ("observation_space", observation_leaves),
        ("action_space", action_leaves),
    ):
        ours, theirs = getattr(first, name), getattr(other, name)
        if leaves(ours) != leaves(theirs):
            raise UsageError(
                f"env {number} has {name} {theirs}, but the first one has {ours}; all "
                "envs of a collector must have equal spaces."
            )
    if first.info_fields != other.info_fields:
        raise UsageError(
            f"env {number} stores the info entries "
            f"{[field.key[-1] for field in other.info_fields]}, but the first one "
            f"{[field.key[-1] for field in first.info_fields]}; give all the same info_keys."
        )


class JoinedGroup(Group):
    """Groups side by side, each writing its own part of the slab."""

    def __init__(self, groups: Sequence[EnvGroup]) -> None:
        self.groups = list(groups)
        ends = np.cumsum([group.num_envs for group in groups]).tolist()
        self.spans = [(end - g.num_envs, end) for end, g in zip(ends, groups, strict=True)]
        super().__init__(ends[-1], groups[0].observation_space, groups[0].action_space)
        self.info_fields = groups[0].info_fields
        self.skips_rows = any(group.skips_rows for group in groups)
        self.resets_singly = all(group.resets_singly for group in groups)
        self.freezes = all(group.freezes for group in groups)

    def seed(self, seeds: Sequence[int]) -> None:
        for group, (start, end) in zip(self.groups, self.spans, strict=True):
            group.seed(seeds[start:end])

    def freeze(self, which: Sequence[int]) -> None:
        for group, inside in zip(self.groups, self.share(which), strict=True):
            group.freeze(inside)

    def share(self, which: Sequence[int]) -> list[list[int]]:
        """Return the envs of each group among these, by their number there."""
        return [[int(i) - start for i in which if start <= i < end] for start, end in self.spans]

    def bind(self, slab: Slab, *, bare: bool = False) -> _BoundJoined:
        return _BoundJoined(self, slab)

    def snapshot(self) -> list[Any] | None:
        snapshots = [group.snapshot() for group in self.groups]
        return None if any(one is None for one in snapshots) else snapshots

    def restore(self, snapshot: list[Any]) -> None:
        for group, one in zip(self.groups, snapshot, strict=True):
            group.restore(one)

    def close(self) -> None:
        """Close all, though closing one may fail."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.close)


class _BoundJoined:
    def __init__(self, group: JoinedGroup, slab: Slab) -> None:
        self._share = group.share
        self._parts = [
            (part.bind(slab.part(start, end)), start)
            for part, (start, end) in zip(group.groups, group.spans, strict=True)
        ]

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        shares = [None] * len(self._parts) if which is None else self._share(which)
        for (bound, start), inside in zip(self._parts, shares, strict=True):
            if inside is None or inside:
                try:
                    bound.reset(t, inside)
                except CallFailed as failure:
                    raise _located(failure, start) from failure.__cause__

    def step(self, t: int) -> Sequence[int]:
        ended: list[int] = []
        for bound, start in self._parts:
            try:
                ended.extend(start + i for i in bound.step(t))
            except CallFailed as failure:
                failure.completed = [*range(start), *(start + i for i in failure.completed)]
                raise _located(failure, start) from failure.__cause__
        return ended


def _located(failure: CallFailed, start: int) -> CallFailed:
    """Return a failure that names its env by the number in the whole."""
    if failure.index is not None:
        failure.index += start
    return failure
