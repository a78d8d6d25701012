"""What the order in memory costs: writing a rollout, and reading a batch as training does.

Run `python -m bench.memory_order`. The two orders alternate in one run; medians are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.works import WORKS
from swath.collectors import Collector
from swath.envs import SerialEnv, TorchCartPole

ROUNDS = 7


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def readers(batch) -> dict[str, Callable[[], object]]:
    key = "observation"
    obs, reward, done = batch[key], batch["next", "reward"], batch["next", "done"]
    index = torch.randint(batch.numel(), (256,))
    flat = batch.reshape(-1)[key]

    def returns() -> torch.Tensor:  # one pass backwards over time, as advantage estimates do
        total = torch.zeros_like(reward[..., 0, :])
        for t in range(reward.shape[-2] - 1, -1, -1):
            total = reward[..., t, :] + 0.99 * total * (~done[..., t, :])
        return total

    return {
        "reshape(-1) of the whole batch": lambda: batch.reshape(-1),
        "256 random frames": lambda: flat[index],
        "mean over all": lambda: obs.float().mean(),
        "returns, backwards over time": returns,
    }


def main() -> None:
    torch.set_num_threads(1)
    works = {work.name: work for work in WORKS}
    for name in ("cartpole-8", "pixels-8", "1,024 CartPoles in torch"):
        collectors = {}
        for order in ("time", "batch"):
            if name in works:
                env = SerialEnv(works[name].num_envs, works[name].make)
                policy, frames = works[name].policy(), works[name].frames_per_batch
            else:
                env, policy, frames = TorchCartPole(1024), works["cartpole-8"].policy(), 1024 * 64
            collectors[order] = Collector(env, policy, frames_per_batch=frames, memory_order=order)
        results: dict[str, dict[str, list[float]]] = {}
        for _ in range(ROUNDS):
            for order, collector in collectors.items():
                cost = results.setdefault("collect a batch", {}).setdefault(order, [])
                cost.append(min(timed(collector.next) for _ in range(5)))
                for what, read in readers(collector.next()).items():
                    cost = results.setdefault(what, {}).setdefault(order, [])
                    cost.append(min(timed(read) for _ in range(20)))
        print(f"{name}: us, [T, N] in memory against [N, T]")
        for what, cost in results.items():
            first, second = (statistics.median(cost[o]) * 1e6 for o in ("time", "batch"))
            print(f"  {what:34s} {first:10.1f} {second:10.1f}   {second / first:5.2f}")
        for collector in collectors.values():
            collector.shutdown()


if __name__ == "__main__":
    main()
