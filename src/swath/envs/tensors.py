"""Torch-native envs as a group, and what they share with every env that speaks in tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from swath.envs.gymnasium import pickled
from swath.envs.native import TorchEnv
from swath.errors import UsageError
from swath.memory import Field, Slab
from swath.rollout import CallFailed, keys
from swath.tree import action_leaves, builder, fetch, observation_leaves

__all__ = ["BoundTensors", "NativeGroup", "TensorGroup"]


class TensorGroup:
    """What the two kinds share: everything is reset by mask, and envs that ended are ignored."""

    skips_rows = False
    resets_singly = True
    freezes = True
    num_envs: int
    env: Any

    def __init__(self) -> None:
        self.info_fields: list[Field] = []
        self.frozen = torch.zeros(self.num_envs, dtype=torch.bool)

    def freeze(self, which: Sequence[int]) -> None:
        """See `EnvGroup`."""
        self.frozen[list(which)] = True

    def mask(self, which: Sequence[int] | None) -> torch.Tensor:
        """Return a bool mask of the envs to reset."""
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[slice(None) if which is None else list(which)] = True
        return mask

    def snapshot(self) -> bytes | None:
        """See `EnvGroup`."""
        return pickled((self.env, self.frozen))

    def restore(self, snapshot: bytes) -> None:
        """See `EnvGroup`."""
        self.env, self.frozen = pickle.loads(snapshot)


class BoundTensors:
    """Writes tensors of N envs into one slab."""

    def __init__(self, group: Any, slab: Slab) -> None:
        self._group = group
        self._obs = [(leaf, slab.tensors[leaf.key]) for leaf in group.observations]
        self._actions = [slab.tensors[leaf.key] for leaf in group.actions]
        self._build = builder(group.action_space, group.actions)
        self._reward = slab.tensors[keys.REWARD]
        self._flags = [slab.tensors[keys.NEXT_TERMINATED], slab.tensors[keys.NEXT_TRUNCATED]]

    def _write(self, t: int, observation: Any, only: torch.Tensor | None = None) -> None:
        for leaf, tensor in self._obs:
            value = fetch(observation, leaf.path)
            if value.shape != tensor[t].shape:
                raise CallFailed(
                    None,
                    "step()",
                    f"the observation {leaf.key} has shape {tuple(value.shape)}; "
                    f"{tuple(tensor[t].shape)} was expected",
                )
            if only is None:
                tensor[t].copy_(value)
            else:
                tensor[t, only] = value[only].to(tensor.dtype)

    def _outcome(self, t: int, reward: torch.Tensor, *flags: torch.Tensor) -> Sequence[int]:
        """Write reward and flags of the envs that still run, and return those that ended."""
        live = ~self._group.frozen
        n = self._group.num_envs
        self._reward[t].copy_(torch.where(live[:, None], reward.reshape(n, 1), 0))
        done = torch.zeros(n, dtype=torch.bool)
        for column, flag in zip(self._flags, flags, strict=True):
            flag = flag.reshape(n) & live
            column[t].copy_(flag[:, None])
            done |= flag
        return done.nonzero()[:, 0].tolist() if done.any() else []


class NativeGroup(TensorGroup):
    """The envs of one `TorchEnv`; see `swath.rollout.env.EnvGroup`."""

    batched = True

    def __init__(self, env: TorchEnv) -> None:
        self.env: Any = env
        self.num_envs = env.num_envs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.observations = observation_leaves(self.observation_space)
        self.actions = action_leaves(self.action_space)
        if torch.device(env.device).type != "cpu":
            raise UsageError(
                f"the env lives on {env.device}; this version of swath collects on the CPU only."
            )
        super().__init__()

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`."""
        self.env.seed(torch.tensor(list(seeds), dtype=torch.int64))

    def bind(self, slab: Slab) -> _BoundNative:
        """See `EnvGroup`."""
        return _BoundNative(self, slab)

    def close(self) -> None:
        """See `EnvGroup`."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


class _BoundNative(BoundTensors):
    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        mask = self._group.mask(which)
        self._group.frozen &= ~mask
        try:
            observation = self._group.env.reset(None if which is None else mask)
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        self._write(t, observation, None if which is None else mask)

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        try:
            action = self._build([tensor[t].clone() for tensor in self._actions])
            observation, reward, terminated, truncated = self._group.env.step(action)
        except Exception as error:
            raise CallFailed(None, "step()") from error
        frozen = self._group.frozen
        self._write(t + 1, observation, ~frozen if frozen.any() else None)
        return self._outcome(t, reward, terminated, truncated)
