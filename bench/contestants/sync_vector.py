"""Gymnasium's own vector envs, in the loop that its users write around it."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from bench.batch import Batch
from bench.contestants.arrays import ArrayLoop
from bench.works import Work


class SyncVector(ArrayLoop):
    name = "SyncVectorEnv"
    note = "gymnasium.vector, same-step autoreset, copy=False, the hand loop's storage"

    def setup(self, work: Work) -> None:
        self.work = work
        self._policy = work.policy()
        self._env = self._make(work)
        self._last = self._as_dict(self._env.reset(seed=0)[0])

    def _make(self, work: Work) -> VectorEnv:
        mode = AutoresetMode.SAME_STEP
        return SyncVectorEnv([work.make] * work.num_envs, copy=False, autoreset_mode=mode)

    def _as_dict(self, observation):
        return observation if self.work.is_dict else {"observation": observation}

    @torch.no_grad()
    def rollout(self) -> Batch:
        env, policy, length = self._env, self._policy, self.work.steps
        space = env.single_observation_space
        obs = self._as_dict(self.rows(space, length + 1))
        next_obs = self._as_dict(self.rows(space, length))
        action = self.rows(env.single_action_space, length)
        terminated, truncated = self.flags(), self.flags()
        reward = np.empty((length, self.work.num_envs), np.float32)
        for key, rows in obs.items():
            rows[0] = self._last[key]
        read = torch.from_numpy(obs[self.work.policy_key][:length]).unbind(0)
        for t, seen in enumerate(read):
            action[t] = chosen = policy(seen).numpy()
            observed, reward[t], terminated[t], truncated[t], info = env.step(chosen)
            observed = self._as_dict(observed)
            for key, rows in obs.items():
                rows[t + 1] = next_obs[key][t] = observed[key]
            if "final_obs" in info:
                for i in info["_final_obs"].nonzero()[0]:
                    for key, ob in self._as_dict(info["final_obs"][i]).items():
                        next_obs[key][t, i] = ob
        self._last = {key: rows[length].copy() for key, rows in obs.items()}
        return self.batch(
            obs,
            next_obs,
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )

    def close(self) -> None:
        self._env.close()


class AsyncVector(SyncVector):
    name = "AsyncVectorEnv"
    note = "gymnasium.vector, one process for each env, shared memory, otherwise as SyncVectorEnv"
    placements = frozenset({"parallel"})

    def _make(self, work: Work) -> VectorEnv:
        return AsyncVectorEnv(
            [work.make] * work.num_envs,
            copy=False,
            autoreset_mode=AutoresetMode.SAME_STEP,
            context="forkserver",  # a fork would keep the descriptors of the other contestants
        )
