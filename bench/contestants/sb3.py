"""Stable-Baselines3: the rollout collection of its on-policy algorithms."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from torch import nn

from bench.batch import Batch
from bench.contestants.base import Contestant
from bench.works import Work


class StableBaselines(Contestant):
    name = "Stable-Baselines3"
    note = "A2C.collect_rollouts: own policy, also values, log-probs, advantages; no next obs"
    own_policy = True
    vec_env: ClassVar[type[VecEnv]] = DummyVecEnv

    @classmethod
    def why_not(cls, work: Work) -> str | None:
        if work.policy_key != "observation" or len(work.make().observation_space.shape) != 1:
            return "its policy classes would do other work"
        return None

    def setup(self, work: Work) -> None:
        self.work = work
        layers = {"pi": [64, 64], "vf": [64, 64]}
        self._model = A2C(
            "MlpPolicy",
            self.vec_env([work.make] * work.num_envs),
            n_steps=work.steps,
            device="cpu",
            seed=0,
            policy_kwargs={"net_arch": layers, "activation_fn": nn.Tanh},
        )
        _, self._callback = self._model._setup_learn(total_timesteps=1 << 40)

    def rollout(self) -> dict[str, np.ndarray]:
        model = self._model
        buffer = model.rollout_buffer
        model.collect_rollouts(model.env, self._callback, buffer, model.n_steps)
        return {
            "obs": buffer.observations,
            "action": buffer.actions,
            "reward": buffer.rewards,
            "starts": buffer.episode_starts,
            "done": model._last_episode_starts,
        }

    def count(self, data: dict[str, np.ndarray]) -> tuple[int, int, float]:
        episodes = int(data["starts"][1:].sum() + data["done"].sum())
        return data["reward"].size, episodes, float(data["reward"].sum())

    def canonical(self, data: dict[str, np.ndarray]) -> Batch:
        """Next observations are the following rows; unknown where an episode or the batch ends."""
        obs, action = data["obs"], data["action"]
        done = np.concatenate([data["starts"][1:], data["done"][None]]).astype(bool)
        known = ~done
        known[-1] = False
        discrete = np.issubdtype(self._model.action_space.dtype, np.integer)
        return Batch(
            obs={"observation": obs},
            next_obs={"observation": np.concatenate([obs[1:], obs[-1:]])},
            action=action[..., 0].astype(np.int64) if discrete else action,
            reward=data["reward"],
            terminated=done,
            truncated=np.zeros_like(done),
            known=known,
        )

    def close(self) -> None:
        self._model.env.close()


class StableBaselinesProcesses(StableBaselines):
    note = "A2C.collect_rollouts on a SubprocVecEnv, one process for each env"
    placements = frozenset({"parallel"})
    vec_env = SubprocVecEnv
