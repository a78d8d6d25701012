"""Wall clock of the PPO example, on swath's collector and on TorchRL's: `python -m bench.ppo`.

Same envs, network, frames and learner (`examples/ppo_cartpole.py`), two workers each; only the
collector differs. Contestants take turns. A run is all of it, from making the collector to its end;
the start is until the first batch is there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule

from bench.contestants.torchrl_collector import hush
from examples import ppo_cartpole as ppo
from swath.collectors import MultiSyncCollector


def swaths(network: torch.nn.Module, **options: Any) -> Any:
    envs = [[partial(make, ppo.ENV)] * ppo.ENVS_PER_WORKER] * ppo.WORKERS
    return MultiSyncCollector(envs, network, **options)


def torchrls(network: torch.nn.Module, **options: Any) -> Any:
    from torchrl.collectors import MultiSyncCollector as TorchRLCollector

    policy = TensorDictModule(network, ["observation"], ["action", "log_prob", "value"])
    return TorchRLCollector([torchrl_envs] * ppo.WORKERS, policy, **options)


def torchrl_envs() -> Any:
    from torchrl.envs import GymWrapper, SerialEnv

    def one() -> Any:
        return GymWrapper(make(ppo.ENV), categorical_action_encoding=True)

    return SerialEnv(ppo.ENVS_PER_WORKER, one)


def make(name: str) -> gym.Env:
    return gym.make(name, disable_env_checker=True)


class Tupled(ppo.ActorCritic):
    """The same network, with outputs in the order of TorchRL's `out_keys`."""

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(super().forward(observation).values())


class Run(NamedTuple):
    """Seconds of one training, and how long episodes were at its end."""

    whole: float
    start: float
    learning: float
    episode: float

    @property
    def collecting(self) -> float:
        return self.whole - self.start - self.learning

    def __str__(self) -> str:
        return (
            f"{self.whole:6.1f} s: start {self.start:5.1f}, collecting {self.collecting:6.1f}, "
            f"learning {self.learning:5.1f}; at the end episodes of {self.episode:.0f} frames"
        )


def train(make_collector: Callable[..., Any], seed: int, frames: int) -> Run:
    torch.set_num_threads(1)  # TorchRL's collector leaves another number behind
    torch.manual_seed(seed)
    network = Tupled()
    optimizer = torch.optim.Adam(network.parameters(), ppo.LEARNING_RATE, fused=True)
    first, learning, episode = 0.0, 0.0, 0.0
    start = time.perf_counter()
    collector = make_collector(network, frames_per_batch=ppo.FRAMES_PER_BATCH, total_frames=frames)
    try:
        for batch in collector:
            began = time.perf_counter()
            first = first or began - start
            ppo.learn(network, optimizer, batch)
            learning += time.perf_counter() - began
            collector.update_policy_weights_()
            episode = batch.numel() / max(int(batch["next", "done"].sum()), 1)
    finally:
        collector.shutdown()
    return Run(time.perf_counter() - start, first, learning, episode)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.ppo", description=__doc__)
    parser.add_argument("--frames", type=int, default=100 * ppo.FRAMES_PER_BATCH)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    hush()
    print(f"{options.frames:,} frames, load average {os.getloadavg()[0]:.1f}")
    contestants = {"swath": swaths, "TorchRL": torchrls}
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for seed in range(options.rounds):
        for name, make_collector in contestants.items():
            runs[name].append(train(make_collector, seed, options.frames))
            print(f"  {name:8s}{runs[name][-1]}")
    for what in ("whole", "start", "collecting"):
        pairs = zip(runs["TorchRL"], runs["swath"], strict=True)
        ratio = statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)
        print(f"{what}: swath is {ratio:.1f}x as fast (median of the rounds)")


if __name__ == "__main__":
    main()
