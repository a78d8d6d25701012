"""swath: Collector over envs in worker processes, the policy in this one."""

from __future__ import annotations

from torch import nn

from bench.contestants.swath_collector import Swath
from bench.works import Work
from swath.collectors import Collector
from swath.collectors.base import BaseCollector
from swath.envs import ParallelEnv


class SwathParallel(Swath):
    note = "swath.collectors.Collector over a ParallelEnv"
    placements = frozenset({"parallel"})

    def _make(self, work: Work, policy: nn.Module) -> BaseCollector:
        env = ParallelEnv(work.num_envs, work.make)
        return Collector(env, policy, frames_per_batch=work.frames_per_batch, total_frames=-1)
