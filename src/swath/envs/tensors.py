"""Torch-native envs as a group, and what they share with every env that speaks in tensors."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from swath.envs.native import TorchEnv
from swath.envs.pickling import pickled
from swath.errors import UsageError
from swath.memory import Field, Slab
from swath.rollout import CallFailed, keys
from swath.tree import action_leaves, builder, fetch, key_name, observation_leaves

__all__ = ["BoundTensors", "NativeGroup", "TensorGroup", "calling"]


class TensorGroup:
    """What the two kinds share: everything is reset by mask, and envs that ended are ignored."""

    skips_rows = False
    resets_singly = True
    freezes = True
    time_limits = None
    batched: bool
    num_envs: int

    def __init__(self, env: Any, observation_space: Any, action_space: Any) -> None:
        self.env = env
        if env.device is not None and torch.device(env.device).type != "cpu":
            raise UsageError(
                f"the env lives on {env.device}; this version of swath collects on the CPU only."
            )
        self.observation_space, self.action_space = observation_space, action_space
        self.observations = observation_leaves(observation_space)
        self.actions = action_leaves(action_space)
        self.info_fields: list[Field] = []
        self.frozen = torch.zeros(self.num_envs, dtype=torch.bool)
        self.state: Any = None
        """What the env must be given at its next step, where it keeps no state itself."""

    def freeze(self, which: Sequence[int]) -> None:
        """See `EnvGroup`."""
        self.frozen[list(which)] = True

    def thaw(self, which: Sequence[int] | None) -> torch.Tensor:
        """Return a bool mask of the envs to reset; they are stepped again from now on."""
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[slice(None) if which is None else list(which)] = True
        self.frozen &= ~mask
        return mask

    def snapshot(self) -> bytes | None:
        """See `EnvGroup`."""
        return pickled((self.env, self.frozen, self.state))

    def restore(self, snapshot: bytes) -> None:
        """See `EnvGroup`."""
        state = pickle.loads(snapshot)
        self.close()
        self.env, self.frozen, self.state = state

    def close(self) -> None:
        """See `EnvGroup`."""
        close = getattr(self.env, "close", None)
        if close is not None and not getattr(self.env, "is_closed", False):
            close()


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Say of whatever is raised inside that it comes from this call into the env."""
    try:
        yield
    except CallFailed:
        raise
    except Exception as error:
        raise CallFailed(None, name) from error


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
        """Write the observations of row t, of these envs only if a mask says so."""
        for leaf, tensor in self._obs:
            value, row = fetch(observation, leaf.path), tensor[t]
            if value.shape != row.shape or not torch.can_cast(value.dtype, row.dtype):
                raise CallFailed(
                    None,
                    "step()",
                    f"the observation {key_name(leaf.key)} has shape {tuple(value.shape)} and "
                    f"{value.dtype}, but its space asks for {tuple(row.shape)} and {row.dtype}",
                )
            row.copy_(value if only is None else torch.where(_wide(only, row), value, row))

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


def _wide(mask: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1, *[1] * (row.dim() - 1))


class NativeGroup(TensorGroup):
    """The envs of one `TorchEnv`; see `swath.rollout.env.EnvGroup`."""

    batched = True

    def __init__(self, env: TorchEnv) -> None:
        self.num_envs = env.num_envs
        super().__init__(env, env.observation_space, env.action_space)

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`."""
        self.env.seed(torch.tensor(list(seeds), dtype=torch.int64))

    def bind(self, slab: Slab, *, bare: bool = False) -> _BoundNative:
        """See `EnvGroup`."""
        return _BoundNative(self, slab)


class _BoundNative(BoundTensors):
    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        mask = self._group.thaw(which)
        only = None if which is None else mask
        with calling("reset()"):
            self._write(t, self._group.env.reset(only), only)

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        group = self._group
        action = self._build([tensor[t].clone() for tensor in self._actions])
        with calling("step()"):
            observation, reward, terminated, truncated = group.env.step(action)
            self._write(t + 1, observation, ~group.frozen if group.frozen.any() else None)
            return self._outcome(t, reward, terminated, truncated)
