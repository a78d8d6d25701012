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

    kept: tuple[str, ...] = ("env", "frozen")

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        if env.device is not None and torch.device(env.device).type != "cpu":
            raise UsageError(
                f"the env lives on {env.device}; this version of swath collects on the CPU only."
            )
        super().__init__(env, num_envs, observation_space, action_space)
        self.frozen = np.zeros(num_envs, bool)

    def seed(self, seeds: Sequence[int]) -> None:
        self.env.seed(torch.tensor(list(seeds), dtype=torch.int64))

    def freeze(self, which: Sequence[int]) -> None:
        self.frozen[list(which)] = True

    @property
    def live(self) -> np.ndarray | None:
        return np.flatnonzero(~self.frozen) if self.frozen.any() else None

    def reset_envs(self, which: np.ndarray | None) -> Any:
        self.frozen[slice(None) if which is None else which] = False
        mask = None
        if which is not None:
            mask = torch.zeros(self.num_envs, dtype=torch.bool)
            mask[which] = True
        return self._reset(mask)

    def step_envs(self, actions: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any, Any]:
        observation, *outcome = self._step([torch.from_numpy(action) for action in actions])
        reward, terminated, truncated = (
            np.where(self.frozen, 0, to_array(column).reshape(-1)) for column in outcome
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
