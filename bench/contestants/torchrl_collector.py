"""TorchRL: Collector over its SerialEnv, with its default options."""

from __future__ import annotations

import logging
import warnings
from functools import partial

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.collectors._base import BaseCollector
from torchrl.envs import EnvBase, GymWrapper, SerialEnv

from bench.batch import Batch, from_tensordict
from bench.contestants.base import Contestant
from bench.works import Work


def hush() -> None:
    """Spares the reader what TorchRL has to say in this process."""
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torchrl|tensordict)\b")


def make_env(work: Work) -> EnvBase:
    return GymWrapper(work.make(), categorical_action_encoding=True)


def make_envs(work: Work) -> EnvBase:
    """The envs of a work, in one process."""
    one = partial(make_env, work)
    return SerialEnv(work.num_envs, one) if work.num_envs > 1 else one()


class TorchRL(Contestant):
    name = "TorchRL"
    note = "torchrl.collectors.Collector, SerialEnv for more than one env"

    def setup(self, work: Work) -> None:
        hush()
        self.work = work
        policy = TensorDictModule(work.policy(), in_keys=[work.policy_key], out_keys=["action"])
        self._collector = self._make(work, policy)
        self._iterator = iter(self._collector)

    def _make(self, work: Work, policy: TensorDictModule) -> BaseCollector:
        env = make_envs(work)
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
