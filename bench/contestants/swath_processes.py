"""swath: MultiSyncCollector and MultiAsyncCollector."""

from __future__ import annotations

import time

from torch import nn

from bench.batch import Batch
from bench.contestants.swath_collector import Swath
from bench.works import Work
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.base import BaseCollector


class SwathSync(Swath):
    note = "swath.collectors.MultiSyncCollector"
    placements = frozenset({"sync"})
    kind: type[BaseCollector] = MultiSyncCollector

    def _make(self, work: Work, policy: nn.Module) -> BaseCollector:
        envs = work.num_envs // work.workers
        source = [work.make] * envs if envs > 1 else work.make
        return self.kind(
            [source] * work.workers,
            policy,
            frames_per_batch=work.frames_per_batch,
            total_frames=-1,
        )


class SwathAsync(SwathSync):
    note = "swath.collectors.MultiAsyncCollector"
    placements = frozenset({"async"})
    kind = MultiAsyncCollector

    def wake(self) -> None:
        for _ in range(4 * self.work.workers):  # two rollouts of each were waiting
            self.rollout()

    def rest(self) -> None:
        time.sleep(0.05)  # each makes two more rollouts, and then waits

    def streams(self, count: int) -> list[list[Batch]]:
        found: dict[int, list] = {}
        while len(found) < self.work.workers or min(map(len, found.values())) < count:
            data = self.rollout()
            worker = int(data["collector", "worker"].flatten()[0])
            found.setdefault(worker, []).append(data)
        return [[self.canonical(data) for data in kept] for kept in found.values()]
