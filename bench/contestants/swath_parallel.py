"""swath: Collector over envs in worker processes, the policy in this one."""

from __future__ import annotations

import os

from torch import nn

from bench.contestants import KEPT
from bench.contestants.swath_collector import Swath
from bench.works import Work
from swath.collectors import Collector
from swath.collectors.base import BaseCollector
from swath.envs import ParallelEnv


class SwathParallel(Swath):
    note = "swath.collectors.Collector over a ParallelEnv"
    placements = frozenset({"parallel"})
    workers: int | None = None

    def _make(self, work: Work, policy: nn.Module) -> BaseCollector:
        env = ParallelEnv(work.num_envs, work.make, self.workers)
        return Collector(env, policy, frames_per_batch=work.frames_per_batch, total_frames=-1)


class SwathParallelKept(SwathParallel):
    name = KEPT
    note = "the same with num_workers=cores - 1: this process has a core to itself"
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
