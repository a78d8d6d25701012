"""The hand loop: the fastest plain Python loop we could write for the same data.

What made a difference is in README.md. It has one form for an array and one for a Dict
observation, because a loop over keys costs more than anything else that is left in it.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.batch import Batch
from bench.contestants.arrays import ArrayLoop
from bench.works import Work


class HandLoop(ArrayLoop):
    name = "hand loop"
    note = "envs, policy, rows written, nothing else"

    def setup(self, work: Work) -> None:
        self.work = work
        self._policy = work.policy()
        self._envs = [work.make() for _ in range(work.num_envs)]
        self._steps = [env.step for env in self._envs]
        self._resets = [env.reset for env in self._envs]
        self._last = [env.reset(seed=seed)[0] for seed, env in enumerate(self._envs)]

    @torch.no_grad()
    def rollout(self) -> Batch:
        return self._rollout_dict() if self.work.is_dict else self._rollout_array()

    def _rollout_array(self) -> Batch:
        length, space = self.work.steps, self._envs[0].observation_space
        policy, steps, resets = self._policy, self._steps, self._resets
        obs, next_obs = self.rows(space, length + 1), self.rows(space, length)
        action = self.rows(self._envs[0].action_space, length)
        terminated, truncated = self.flags(), self.flags()
        rewards: list[float] = []
        ends = []
        obs[0] = self._last
        for t, seen in enumerate(torch.from_numpy(obs[:length]).unbind(0)):
            action[t] = chosen = policy(seen).numpy()
            row = obs[t + 1]
            i = 0
            for step, act in zip(steps, chosen):  # noqa: B905 (strict costs time)
                ob, reward, over, cut, _ = step(act)
                rewards.append(reward)
                if over or cut:
                    terminated[t, i], truncated[t, i] = over, cut
                    ends.append((t, i, ob))
                    ob = resets[i]()[0]
                row[i] = ob
                i += 1
            next_obs[t] = row
        for t, i, ob in ends:
            next_obs[t, i] = ob
        self._last = obs[length].copy()  # a view would keep the whole batch alive
        return self.batch(
            {"observation": obs},
            {"observation": next_obs},
            action=action,
            reward=np.array(rewards, np.float32).reshape(length, -1),
            terminated=terminated,
            truncated=truncated,
        )

    def _rollout_dict(self) -> Batch:
        length, space = self.work.steps, self._envs[0].observation_space
        policy, steps, resets = self._policy, self._steps, self._resets
        obs = self.rows(space, length + 1)
        action = self.rows(self._envs[0].action_space, length)
        terminated, truncated = self.flags(), self.flags()
        rewards: list[float] = []
        ends = []
        last = self._last
        for key, rows in obs.items():
            rows[0] = [ob[key] for ob in last]
        read = torch.from_numpy(obs[self.work.policy_key][:length]).unbind(0)
        for t, seen in enumerate(read):
            action[t] = chosen = policy(seen).numpy()
            last = []
            for step, act in zip(steps, chosen):  # noqa: B905 (strict costs time)
                ob, reward, over, cut, _ = step(act)
                rewards.append(reward)
                if over or cut:
                    i = len(last)
                    terminated[t, i], truncated[t, i] = over, cut
                    ends.append((t, i, ob))
                    ob = resets[i]()[0]
                last.append(ob)
            for key, rows in obs.items():
                rows[t + 1] = [ob[key] for ob in last]
        next_obs = {key: rows[1:].copy() for key, rows in obs.items()}
        for t, i, ob in ends:
            for key, rows in next_obs.items():
                rows[t, i] = ob[key]
        self._last = last
        return self.batch(
            obs,
            next_obs,
            action=action,
            reward=np.array(rewards, np.float32).reshape(length, -1),
            terminated=terminated,
            truncated=truncated,
        )

    def close(self) -> None:
        for env in self._envs:
            env.close()
