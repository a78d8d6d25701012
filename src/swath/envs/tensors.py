"""Torch-native envs as a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.batch import BatchGroup
from swath.errors import UsageError
from swath.policies import to_array

__all__ = ["NativeGroup"]


class NativeGroup(BatchGroup):
    """The envs of one `TorchEnv`. Envs that ended are stepped with the others, and ignored."""

    kept: tuple[str, ...] = ("env", "live")

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        if env.device is not None and torch.device(env.device).type != "cpu":
            raise UsageError(
                f"the env lives on {env.device}; this version of swath collects on the CPU only."
            )
        super().__init__(env, num_envs, observation_space, action_space)

    def seed(self, seeds: Sequence[int]) -> None:
        self.env.seed(torch.tensor(list(seeds), dtype=torch.int64))

    def mask(self, which: Sequence[int]) -> torch.Tensor:
        """Return a bool tensor `[N]` that is True for these envs."""
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[which] = True
        return mask

    def reset_envs(self, which: Sequence[int] | None) -> Any:
        self.thaw(which)
        return self._reset(None if which is None else self.mask(which))

    def step_envs(self, actions: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any, Any]:
        observation, *outcome = self._step([torch.from_numpy(action) for action in actions])
        live = self.mask(self.live)
        reward, terminated, truncated = (
            to_array(torch.where(live, column.reshape(-1), 0)) for column in outcome
        )
        return observation, reward, terminated, truncated, {}

    def _reset(self, mask: torch.Tensor | None) -> Any:
        return self.env.reset(mask)

    def _step(self, actions: Sequence[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        return self.env.step(self.build_action(actions))

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None and not getattr(self.env, "is_closed", False):
            close()
