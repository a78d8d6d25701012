"""Many workers, each with its policy, against one process with one batched policy on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.hybrid import Swath, cartpole
from bench.gpu.turns import Turn
from bench.policies import Greedy
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import ParallelEnv

WORKERS, ENVS, STEPS = 14, 8, 64


class Workers:
    """`MultiSyncCollector`, the policy of each worker on the CPU or on the GPU."""

    def __init__(self, device: str) -> None:
        self.collector = MultiSyncCollector(
            [[cartpole] * ENVS] * WORKERS,
            Greedy(4, 2, 3),
            frames_per_batch=WORKERS * ENVS * STEPS,
            policy_device=device,
        )

    def __call__(self) -> int:
        return self.collector.next().numel()

    def close(self) -> None:
        self.collector.shutdown()


class Batched(Workers):
    """Envs in as many processes, one policy for all of them."""

    def __init__(self, **options: Any) -> None:
        self.collector = Collector(
            ParallelEnv(WORKERS * ENVS, cartpole, num_workers=WORKERS),
            Greedy(4, 2, 3),
            frames_per_batch=WORKERS * ENVS * STEPS,
            **options,
        )


def contestants() -> dict[str, Callable[[], Turn]]:
    gpu = {"policy_device": torch.device("cuda", 0)}
    return {
        "14 workers, policies on the CPU": lambda: Workers("cpu"),
        "14 workers, policies on the GPU": lambda: Workers("cuda"),
        "ParallelEnv, one policy on the CPU": lambda: Batched(),
        "ParallelEnv, one policy on the GPU": lambda: Batched(**gpu),
        "ParallelEnv, one graph on the GPU": lambda: Batched(**gpu, cudagraph_policy=True),
        "one process, policy on the GPU": lambda: Swath(
            cartpole, Greedy(4, 2, 3), WORKERS * ENVS, cudagraph_policy=True
        ),
    }
