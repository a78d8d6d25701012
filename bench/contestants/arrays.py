"""Storage of the hand-written loops: numpy rows, fresh for each batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from bench.batch import Batch, Rows
from bench.contestants.base import Contestant
from bench.works import Work


class ArrayLoop(Contestant):
    """A loop that delivers a Batch as it is."""

    work: Work

    def count(self, data: Batch) -> tuple[int, int, float]:
        return data.reward.size, int(data.done.sum()), float(data.reward.sum())

    def canonical(self, data: Batch) -> Batch:
        return data

    def rows(self, space: gym.Space, steps: int) -> Any:
        """Unset rows for an observation or action space; a dict of them for a Dict space."""
        if isinstance(space, gym.spaces.Dict):
            return {key: self.rows(part, steps) for key, part in space.items()}
        return np.empty((steps, self.work.num_envs, *space.shape), space.dtype)

    def flags(self) -> np.ndarray:
        return np.zeros((self.work.steps, self.work.num_envs), bool)

    def batch(self, obs: Rows, next_obs: Rows, **rest: np.ndarray) -> Batch:
        """Observations have one row more than the batch: the first of the next batch."""
        steps = self.work.steps
        return Batch(
            obs={key: rows[:steps] for key, rows in obs.items()},
            next_obs=next_obs,
            known=np.broadcast_to(True, (steps, self.work.num_envs)),
            **rest,
        )
