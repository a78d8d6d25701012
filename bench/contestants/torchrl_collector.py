"""TorchRL: Collector over its SerialEnv, with its default options."""

from __future__ import annotations

import logging
import warnings

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, SerialEnv

from bench.batch import Batch, from_tensordict
from bench.contestants.base import Contestant
from bench.works import Work


class TorchRL(Contestant):
    name = "TorchRL"
    note = "torchrl.collectors.Collector, SerialEnv for more than one env"

    def setup(self, work: Work) -> None:
        logging.getLogger("torchrl").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"(torchrl|tensordict)\b")
        self.work = work

        def make():
            return GymWrapper(work.make(), categorical_action_encoding=True)

        policy = TensorDictModule(work.policy(), in_keys=[work.policy_key], out_keys=["action"])
        self._collector = Collector(
            SerialEnv(work.num_envs, make) if work.num_envs > 1 else make(),
            policy,
            frames_per_batch=work.frames_per_batch,
            total_frames=-1,
        )
        self._iterator = iter(self._collector)

    def rollout(self) -> TensorDictBase:
        return next(self._iterator)

    def count(self, data: TensorDictBase) -> tuple[int, int, float]:
        done, reward = data["next", "done"], data["next", "reward"]
        return data.numel(), int(done.sum()), float(reward.sum())

    def canonical(self, data: TensorDictBase) -> Batch:
        return from_tensordict(data, self.work.keys)

    def close(self) -> None:
        self._collector.shutdown()
