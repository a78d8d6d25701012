"""swath: Collector, the envs stepped in process."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from bench.batch import Batch, from_tensordict
from bench.contestants.base import Contestant
from bench.works import Work
from swath.collectors import Collector
from swath.collectors.base import BaseCollector
from swath.envs import SerialEnv


class Swath(Contestant):
    name = "swath"
    note = "swath.collectors.Collector, SerialEnv for more than one env"

    def setup(self, work: Work) -> None:
        self.work = work
        policy = work.policy()
        if work.is_dict:
            policy = TensorDictModule(policy, in_keys=[work.policy_key], out_keys=["action"])
        self._collector = self._make(work, policy)
        self._iterator = iter(self._collector)

    def _make(self, work: Work, policy: nn.Module) -> BaseCollector:
        env = SerialEnv(work.num_envs, work.make) if work.num_envs > 1 else work.make
        return Collector(env, policy, frames_per_batch=work.frames_per_batch, total_frames=-1)

    def rollout(self) -> TensorDictBase:
        return next(self._iterator)

    def count(self, data: TensorDictBase) -> tuple[int, int, float]:
        done, reward = data["next", "done"], data["next", "reward"]
        return data.numel(), int(done.sum()), float(reward.sum())

    def canonical(self, data: TensorDictBase) -> Batch:
        return from_tensordict(data, self.work.keys)

    def close(self) -> None:
        self._collector.shutdown()
