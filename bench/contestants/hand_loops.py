"""Hand loops side by side, one in each of W processes: what W processes can do at best.

Nothing is sent to this process but the counts, so that there is no hand-over to pay for.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.batch import Batch
from bench.contestants.base import Contestant, Summary
from bench.contestants.hand_loop import HandLoop
from bench.works import Work


def serve(pipe: Connection, work: Work) -> None:
    """Collects as it is told, until the other side is gone or says so."""
    torch.set_num_threads(1)
    loop = HandLoop()
    loop.setup(work)
    pipe.send(None)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        method, number = order
        pipe.send(getattr(loop, method)(number))


class HandLoops(Contestant):
    name = "hand loops"
    note = "one hand loop in each worker process, nothing sent to this one"
    placements = frozenset({"sync", "async"})

    def setup(self, work: Work) -> None:
        self.work = work
        self._processes, self._pipes = [], []
        # A fresh server forks them: a fork of this process would keep others' descriptors.
        context = multiprocessing.get_context("forkserver")
        for _ in range(work.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, work.part()), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def _all(self, method: str, number: int) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, number))
        return [pipe.recv() for pipe in self._pipes]

    def rollout(self) -> Any:
        raise NotImplementedError("the rollouts stay in their processes")

    def count(self, data: Any) -> tuple[int, int, float]:
        raise NotImplementedError("the workers count")

    def canonical(self, data: Batch) -> Batch:
        return data

    def collect(self, frames: int) -> Summary:
        """As many rollouts of each as give so many frames."""
        total = Summary()
        for part in self._all("collect", -(-frames // self.work.workers)):
            total.frames += part.frames
            total.episodes += part.episodes
            total.reward += part.reward
        return total

    def streams(self, count: int) -> list[list[Batch]]:
        return self._all("batches", count)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()
