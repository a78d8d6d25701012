"""TorchRL: Collector over its ParallelEnv, MultiSyncCollector, MultiAsyncCollector."""

from __future__ import annotations

import os
import signal
from functools import partial

from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors._base import BaseCollector
from torchrl.envs import ParallelEnv

from bench.batch import Batch
from bench.checks import follows
from bench.contestants.torchrl_collector import TorchRL, make_env, make_envs
from bench.works import Work


class TorchRLParallel(TorchRL):
    note = "torchrl.collectors.Collector over a ParallelEnv, one process for each env"
    placements = frozenset({"parallel"})

    def _make(self, work: Work, policy: TensorDictModule) -> BaseCollector:
        env = ParallelEnv(work.num_envs, partial(make_env, work))
        return Collector(env, policy, frames_per_batch=work.frames_per_batch, total_frames=-1)


class TorchRLSync(TorchRL):
    note = "torchrl.collectors.MultiSyncCollector, SerialEnv for more than one env in a worker"
    placements = frozenset({"sync"})
    kind: type[BaseCollector] = MultiSyncCollector

    def _make(self, work: Work, policy: TensorDictModule) -> BaseCollector:
        return self.kind(
            [partial(make_envs, work.part())] * work.workers,
            policy,
            frames_per_batch=work.frames_per_batch,
            total_frames=-1,
        )


class TorchRLAsync(TorchRLSync):
    """Its workers drop a batch that nobody takes for a second and make another, so they are
    stopped while others are timed."""

    note = "torchrl.collectors.MultiAsyncCollector, its workers stopped between its turns"
    placements = frozenset({"async"})
    kind = MultiAsyncCollector

    def _signal(self, number: signal.Signals) -> None:
        for process in self._collector.procs:
            os.kill(process.pid, number)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)
        for _ in range(2 * self.work.workers):  # one of each may be stale
            self.rollout()

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        super().close()

    def streams(self, count: int) -> list[list[Batch]]:
        """Its batches do not say whose they are: each is put behind the one that it continues."""
        found: list[list[Batch]] = []
        for _ in range(4):  # some workers may be slow
            for batch in self.batches(count * self.work.workers):
                self._put(found, batch)
            if len(found) >= self.work.workers:
                break
        return found

    def _put(self, streams: list[list[Batch]], batch: Batch) -> None:
        # Those in the middle of an episode first: any first observation could follow an end.
        for stream in sorted(streams, key=lambda stream: stream[-1].done[-1].sum()):
            if follows(self.work, batch, stream[-1]):
                stream.append(batch)
                return
        streams.append([batch])
