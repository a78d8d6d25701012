"""Envs that one call steps: vector envs, torch-native ones, TorchRL's.

Such an object may reset an ended env by itself: in the same step, in the next step, or not at all.
What the loop sees is always the same: row t + 1 holds the true last observation until `reset`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from swath.envs.group import Group, as_array, as_declared
from swath.envs.info import vector_info_writer, warn_unseen
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import BoundEnvs, CallFailed, keys
from swath.tree import Leaf, fetch, key_name

__all__ = ["BatchGroup", "NativeGroup"]


class BatchGroup(Group):
    """The envs of one object; what it is given and gives has N rows, in arrays or tensors."""

    mode = AutoresetMode.DISABLED
    gives_some = False
    """A reset of some envs gives the observations of these alone."""

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        super().__init__(num_envs, observation_space, action_space)
        self.env = env
        self.resetting = np.zeros(num_envs, bool)
        """Envs whose next step is a reset."""

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> BoundEnvs:
        return _BoundBatch(self, slab)

    def reset_envs(self, which: Sequence[int] | None) -> Any:
        """Start new episodes of these envs (None: of all) and return the observations."""
        raise NotImplementedError

    def step_envs(self, actions: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any, Any]:
        """Return observation, reward, terminated, truncated and infos of a step.

        Args:
            actions: The leaves of the action, copies that the envs may keep.
        """
        raise NotImplementedError


class _BoundBatch:
    """A `BatchGroup` that writes into one slab."""

    eager = False

    def __init__(self, group: BatchGroup, slab: Slab) -> None:
        self._group = group
        self._obs = [(leaf, slab.arrays[leaf.key]) for leaf in group.observations]
        self._actions = [slab.arrays[leaf.key] for leaf in group.actions]
        self._reward = slab.arrays[keys.REWARD][:, :, 0]
        self._terminated = slab.arrays[keys.NEXT_TERMINATED][:, :, 0]
        self._truncated = slab.arrays[keys.NEXT_TRUNCATED][:, :, 0]
        self._mask = slab.arrays.get(keys.MASK)
        fields = group.info_fields
        self._info = vector_info_writer(fields, slab, group.unseen) if fields else None
        self._observation: Any = None
        self._renewed: set[int] = set()
        """Envs that reset themselves in the last step; its observation is their first one."""

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        if which is None:
            self._renewed.clear()
            self._reset_envs(t, None)
        elif not self._group.skips_rows:
            renewed = self._renewed.intersection(which)
            if renewed:
                self._renewed -= renewed
                self._write(t, self._observation, [*renewed])
            others = sorted({*which} - renewed)
            if others:
                self._reset_envs(t, others)

    def _reset_envs(self, t: int, which: Sequence[int] | None) -> None:
        try:
            observation = self._group.reset_envs(which)
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        self._write(t, observation, which, self._group.gives_some)

    def step(self, t: int) -> Sequence[int]:
        group = self._group
        try:
            observation, reward, terminated, truncated, infos = group.step_envs(
                [array[t].copy() for array in self._actions]
            )
            self._reward[t] = reward
            self._terminated[t] = terminated
            self._truncated[t] = truncated
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(None, "step()") from error
        self._write(t + 1, observation, group.live if len(group.live) < group.num_envs else None)
        done = self._terminated[t] | self._truncated[t]
        if group.skips_rows:
            assert self._mask is not None
            self._mask[t] = ~group.resetting
            group.resetting[...] = done
            self._mask[t + 1 : t + 2] = ~done  # known before that row is acted on
        ended = done.nonzero()[0].tolist()
        self._observation = observation
        self._renewed = set(ended if group.mode is AutoresetMode.SAME_STEP else ())
        if self._renewed:
            self._take_final(t, infos)
        if self._info is not None:
            self._info(infos, t, np.arange(group.num_envs))
            if self._renewed:  # the infos of these envs are those of the reset
                self._info(infos.get("final_info", {}), t, np.array(ended))
            if group.unseen and ended:
                warn_unseen(group.unseen)
        return ended

    def _take_final(self, t: int, infos: Mapping[str, Any]) -> None:
        """Write the last observations of the episodes that ended into row t + 1."""
        finals = infos.get("final_obs")
        if finals is None:
            raise CallFailed(
                None, "step()", "the vector env resets in the same step but gives no 'final_obs'"
            )
        for i in self._renewed:
            for leaf, array in self._obs:
                array[t + 1, i] = as_declared(finals[i], leaf, leaf.shape, i)

    def _write(
        self, t: int, observation: Any, which: Sequence[int] | np.ndarray | None, some: bool = False
    ) -> None:
        """Write row t of these envs (None: of all), of all or just `some` of which we have rows."""
        for leaf, array in self._obs:
            if which is None:
                array[t] = as_declared(observation, leaf, array.shape[1:])
            elif some:
                array[t, which] = as_declared(observation, leaf, (len(which), *leaf.shape))
            else:
                array[t, which] = as_declared(observation, leaf, array.shape[1:])[which]


class NativeGroup(BatchGroup):
    """The envs of one `TorchEnv`. Envs that ended are stepped with the others, and ignored."""

    kept: tuple[str, ...] = ("env", "live")
    native = True

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        super().__init__(env, num_envs, observation_space, action_space)

    @property
    def device(self) -> torch.device:
        """Where the envs live."""
        return torch.empty(0, device=self.env.device or "cpu").device  # with its index

    def place(self, device: torch.device | None) -> torch.device:
        if device is not None and device != self.device:
            if not hasattr(self.env, "to"):
                raise UsageError(
                    f"env_device is {device}, but the env lives on {self.device} and has no method "
                    "to(device). Make it there."
                )
            self.env = self.env.to(device)
        return self.device

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> BoundEnvs:
        return _BoundBatch(self, slab) if slab.arrays else _BoundNative(self, slab)

    def seed(self, seeds: Sequence[int]) -> None:
        self.env.seed(torch.tensor(list(seeds), dtype=torch.int64, device=self.device))

    def mask(self, which: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Return a bool tensor `[N]` that is True for these envs."""
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[which] = True
        return mask.to(self.device)

    def reset_envs(self, which: Sequence[int] | None) -> Any:
        self.thaw(which)
        return self._reset(None if which is None else self.mask(which))

    def step_envs(self, actions: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any, Any]:
        tensors = [torch.from_numpy(action).to(self.device) for action in actions]
        observation, *outcome = self._step(tensors)
        outcome = [column.reshape(-1) for column in outcome]
        if len(self.live) < self.num_envs:
            outcome = [torch.where(self.mask(self.live), column, 0) for column in outcome]
        reward, terminated, truncated = map(as_array, outcome)
        return observation, reward, terminated, truncated, {}

    def _reset(self, mask: torch.Tensor | None) -> Any:
        return self.env.reset(mask)

    def _step(self, actions: Sequence[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        return self.env.step(self.build_action(actions))

    def close(self, timeout: float | None = None) -> None:
        close = getattr(self.env, "close", None)
        if close is not None and not getattr(self.env, "is_closed", False):
            close()


class _BoundNative:
    """A `NativeGroup` that writes into a slab on its own device, and never asks the device."""

    eager = True

    def __init__(self, group: NativeGroup, slab: Slab) -> None:
        self._env, self._build = group.env, group.build_action
        lead = (group.num_envs,)
        self._actions = [slab.rows(leaf.key, lead) for leaf in group.actions]
        self._obs = [(leaf, slab.rows(leaf.key, lead)) for leaf in group.observations]
        self._next = [slab.rows(keys.following(leaf.key), lead) for leaf in group.observations]
        outcome = (keys.REWARD, keys.NEXT_TERMINATED, keys.NEXT_TRUNCATED)
        self._reward, *self._flags = (slab.tensors[key][..., 0].unbind(0) for key in outcome)

    def reset(self, t: int, which: torch.Tensor | None) -> None:
        try:
            observation = self._env.reset(which)
            for leaf, rows in self._obs:
                rows[t].copy_(_leaf_of(observation, leaf, rows[t]))
        except Exception as error:
            raise CallFailed(None, "reset()") from error

    def step(self, t: int) -> Sequence[int]:
        try:
            action = self._build([rows[t] for rows in self._actions])
            observation, reward, *flags = self._env.step(action)
            rows = [rows[t] for rows in self._next]
            leaves = [leaf for leaf, _ in self._obs]
            seen = [_leaf_of(observation, *pair) for pair in zip(leaves, rows, strict=True)]
            targets = [*rows, self._reward[t], *[column[t] for column in self._flags]]
            for target, value in zip(targets, [*seen, reward, *flags], strict=True):
                target.copy_(value)
        except Exception as error:
            raise CallFailed(None, "step()") from error
        return ()


def _leaf_of(observation: Any, leaf: Leaf, row: torch.Tensor) -> torch.Tensor:
    """Return a leaf of an observation in tensors; torch would broadcast a wrong shape silently."""
    value: torch.Tensor = fetch(observation, leaf.path)
    if value.shape != row.shape:
        raise ValueError(
            f"the observation {key_name(leaf.key)} has shape {tuple(value.shape)}, but the "
            f"observation space declares {tuple(row.shape)}. Fix the env or its space"
        )
    return value
