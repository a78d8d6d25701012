"""Several groups of envs, of whatever kinds, side by side as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swath.envs.gymnasium import GymGroup
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import BoundEnvs, CallFailed, EnvGroup
from swath.tree import Leaf, action_leaves, observation_leaves

__all__ = ["JoinedGroup", "join"]


def join(groups: Sequence[EnvGroup]) -> EnvGroup:
    """Return one batched group of all envs, which must have equal spaces."""
    for number, group in enumerate(groups[1:], 1):
        _check_equal(groups[0], group, number)
    _refuse_doubles(groups)
    gyms = [group for group in groups if isinstance(group, GymGroup)]
    return GymGroup.joined(gyms) if len(gyms) == len(groups) else JoinedGroup(groups)


def _refuse_doubles(groups: Sequence[EnvGroup]) -> None:
    envs: list[Any] = []
    for group in groups:
        if isinstance(group, GymGroup):
            envs += [env.unwrapped for env in group.envs]
        else:
            envs.append(getattr(group, "env", group))
    if len({id(env) for env in envs}) < len(envs):
        raise UsageError(
            "one env object cannot be used for several envs; pass a callable that makes a new one "
            "at each call."
        )


def _check_equal(first: EnvGroup, other: EnvGroup, number: int) -> None:
    """Refuse groups that cannot share a slab."""
    for name, leaves in (
        ("observation_space", observation_leaves),
        ("action_space", action_leaves),
    ):
        ours, theirs = getattr(first, name), getattr(other, name)
        if _forms(leaves(ours)) != _forms(leaves(theirs)):
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


def _forms(leaves: Sequence[Leaf]) -> list[Any]:
    """Return what must be equal: a lone Box and a Dict with `"observation"` are one form."""
    return [(leaf.key, leaf.shape, leaf.dtype, leaf.space) for leaf in leaves]


class JoinedGroup:
    """Groups side by side, each writing its own part of the slab; see `EnvGroup`."""

    batched = True
    time_limits = None

    def __init__(self, groups: Sequence[EnvGroup]) -> None:
        self.groups = list(groups)
        ends = np.cumsum([group.num_envs for group in groups]).tolist()
        self.spans = [(end - g.num_envs, end) for end, g in zip(ends, groups, strict=True)]
        self.num_envs = ends[-1]
        self.observation_space = groups[0].observation_space
        self.action_space = groups[0].action_space
        self.info_fields = groups[0].info_fields
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
            group.freeze(inside)

    def share(self, which: Sequence[int]) -> list[list[int]]:
        """Return the envs of each group among these, by their number there."""
        return [[int(i) - start for i in which if start <= i < end] for start, end in self.spans]

    def bind(self, slab: Slab, *, bare: bool = False) -> _BoundJoined:
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
        """See `EnvGroup`; closes all, though closing one may fail."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.callback(group.close)


class _BoundJoined:
    def __init__(self, group: JoinedGroup, bound: Sequence[BoundEnvs]) -> None:
        self._group = group
        self._parts = [(b, start) for b, (start, _) in zip(bound, group.spans, strict=True)]

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        shares = [None] * len(self._parts) if which is None else self._group.share(which)
        for (bound, start), inside in zip(self._parts, shares, strict=True):
            if inside is None or inside:
                _located(bound.reset, start, t, inside)

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        ended: list[int] = []
        for bound, start in self._parts:
            try:
                inside = _located(bound.step, start, t)
            except CallFailed as failure:
                failure.completed = [*range(start), *(i + start for i in failure.completed)]
                raise
            ended.extend(start + i for i in inside)
        return ended


def _located(call: Callable[..., Any], start: int, *args: Any) -> Any:
    """Make a call; a failure names envs by their number in the whole."""
    try:
        return call(*args)
    except CallFailed as failure:
        if failure.index is not None:
            failure.index += start
        raise
