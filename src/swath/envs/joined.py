"""Several groups of envs, of whatever kinds, side by side as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from swath.envs.group import Group, close_all
from swath.envs.gymnasium import GymGroup
from swath.errors import UsageError
from swath.memory import Slab
from swath.policies.choices import joined_masks
from swath.rollout import BoundEnvs, CallFailed, EnvGroup

__all__ = ["JoinedGroup", "check_equal", "join", "parted"]


def join(groups: Sequence[EnvGroup]) -> EnvGroup:
    """Return one batched group of all envs, which must be able to share a slab."""
    for number, group in enumerate(groups):
        check_equal(groups[0], group, number)
    envs = [e for g in groups for e in getattr(g, "envs", [getattr(g, "env", g)])]
    if len({id(e.unwrapped if isinstance(e, gym.Env) else e) for e in envs}) < len(envs):
        raise UsageError(
            "one env object cannot be used for several envs; pass a callable that makes a new one "
            "at each call."
        )
    gyms = [group for group in groups if isinstance(group, GymGroup)]
    return GymGroup.joined(gyms) if len(gyms) == len(groups) else JoinedGroup(groups)


def parted(group: EnvGroup, count: int) -> EnvGroup:
    """Return the envs of a group as `count` groups side by side, which can be stepped in turn."""
    if isinstance(group, JoinedGroup) and len(group.parts) == count:
        return group
    if not isinstance(group, GymGroup) or group.num_envs < count:
        raise UsageError(
            f"env_groups={count} needs that many envs that can be stepped apart; these are "
            f"{group.num_envs}, in a {type(group).__name__}. Pass a SerialEnv, or a list of "
            f"{count} batched envs."
        )
    return JoinedGroup(group.parted(count))


def check_equal(first: Any, other: Any, number: int) -> None:
    """Refuse groups that cannot share a slab."""
    for name, leaves in (("observation_space", "observations"), ("action_space", "actions")):
        ours, theirs = getattr(first, name), getattr(other, name)
        if getattr(first, leaves) != getattr(other, leaves):
            raise UsageError(
                f"env {number} has {name} {theirs}, but the first one has {ours}; all "
                "envs of a collector must have equal spaces."
            )
    if first.outcome != other.outcome:
        raise UsageError(
            f"env {number} has the rewards and flags {other.outcome}, but the first one "
            f"{first.outcome}; all envs of a collector must have the same."
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
        ends = np.cumsum([group.num_envs for group in groups]).tolist()
        super().__init__(ends[-1], groups[0].observation_space, groups[0].action_space)
        self.parts = [(g, end - g.num_envs, end) for g, end in zip(groups, ends, strict=True)]
        self.take_forms(groups[0])
        self.skips_rows = any(group.skips_rows for group in groups)
        self.resets_singly = all(group.resets_singly for group in groups)
        self.freezes = all(group.freezes for group in groups)
        self.needs_shared_memory = any(group.needs_shared_memory for group in groups)
        if any(group.action_masks is not None for group in groups):
            self.action_masks = self._action_masks

    def _action_masks(self) -> list[np.ndarray | None]:
        """Return what the envs of all parts allow just now."""
        masks: list[list[np.ndarray | None]] = []
        for group, _, _ in self.parts:
            each = None if group.action_masks is None else group.action_masks()
            masks.append([None] * len(self.actions) if each is None else list(each))
        return [
            joined_masks(list(one), leaf, [g.num_envs for g, _, _ in self.parts])
            for leaf, one in zip(self.actions, zip(*masks, strict=True), strict=True)
        ]

    def seed(self, seeds: Sequence[int]) -> None:
        for group, start, end in self.parts:
            group.seed(seeds[start:end])

    def place(self, device: torch.device | None) -> torch.device:
        for group, _, _ in self.parts:
            group.place(device)
        return torch.device("cpu")  # as seen from outside: the parts meet in a slab there

    def freeze(self, which: Sequence[int]) -> None:
        for group, start, end in self.parts:
            group.freeze(_inside(which, start, end))

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> _BoundJoined:
        return _BoundJoined([(g.bind(slab.part(*span)), *span) for g, *span in self.parts])

    def snapshot(self) -> list[Any] | None:
        snapshots = [group.snapshot() for group, _, _ in self.parts]
        return None if any(one is None for one in snapshots) else snapshots

    def restore(self, snapshot: list[Any]) -> None:
        self.restores += 1
        for (group, _, _), one in zip(self.parts, snapshot, strict=True):
            group.restore(one)

    def close(self, timeout: float | None = None) -> None:
        close_all((group for group, _, _ in self.parts), timeout)


class _BoundJoined:
    eager = False

    def __init__(self, parts: Sequence[tuple[BoundEnvs, int, int]]) -> None:
        self._parts = parts

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        for bound, start, end in self._parts:
            inside = None if which is None else _inside(which, start, end)
            if inside != []:
                try:
                    bound.reset(t, inside)
                except CallFailed as failure:
                    raise _located(failure, start) from failure.__cause__

    def step(self, t: int) -> Sequence[int]:
        ended: list[int] = []
        for bound, start, _ in self._parts:
            try:
                ended.extend(start + i for i in bound.step(t))
            except CallFailed as failure:
                failure.completed = [*range(start), *(start + i for i in failure.completed)]
                raise _located(failure, start) from failure.__cause__
        return ended


def _inside(which: Sequence[int], start: int, end: int) -> list[int]:
    """Return those of these envs that a part has, by their number there."""
    return [int(i) - start for i in which if start <= i < end]


def _located(failure: CallFailed, start: int) -> CallFailed:
    """Return a failure that names its env by the number in the whole."""
    if failure.index is not None:
        failure.index += start
    return failure
