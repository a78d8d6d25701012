"""Pixels with every observation stored once: swath's and TorchRL's `compact_obs`.

Run `python -m bench.compact`. Contestants alternate in one run; medians, and medians of the ratios
within a round. swath's compact batches are checked against the full ones of the same seed.
"""

from __future__ import annotations

import statistics
import time
import warnings

import torch
from tensordict.nn import TensorDictModule

from bench.works import WORKS
from swath.collectors import Collector
from swath.collectors.utils import restore_next
from swath.envs import SerialEnv

ROUNDS = 15


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import GymWrapper
    from torchrl.envs import SerialEnv as TheirSerialEnv

    work = next(w for w in WORKS if w.name == "pixels-8")
    frames, n = work.frames_per_batch, work.num_envs

    def ours(compact: bool) -> Collector:
        env = SerialEnv(n, work.make)
        return Collector(env, work.policy(), frames_per_batch=frames, compact_obs=compact, seed=0)

    def theirs(compact: bool) -> TheirCollector:
        env = TheirSerialEnv(n, lambda: GymWrapper(work.make(), categorical_action_encoding=True))
        policy = TensorDictModule(work.policy(), ["observation"], ["action"])
        return TheirCollector(env, policy, frames_per_batch=frames, compact_obs=compact)

    collectors = {
        "swath, compact": ours(True),
        "swath": ours(False),
        "TorchRL, compact": theirs(True),
        "TorchRL": theirs(False),
    }
    compact, full = collectors["swath, compact"].next(), collectors["swath"].next()
    restored = restore_next(compact)["next", "observation"]
    assert torch.equal(restored, full["next", "observation"])
    del compact, full, restored
    speeds: dict[str, list[float]] = {name: [] for name in collectors}
    for collector in collectors.values():
        collector.next()
    for _ in range(ROUNDS):
        for name, collector in collectors.items():
            batches = 10 if name.startswith("swath") else 1
            start = time.perf_counter()
            for _ in range(batches):
                collector.next()
            speeds[name].append(batches * frames / (time.perf_counter() - start))
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(values, speeds["TorchRL, compact"], strict=True)]
        print(
            f"{name:18s} {statistics.median(values):10,.0f} frames/s"
            f"   {statistics.median(ratios):5.1f}x TorchRL, compact"
        )
    for collector in collectors.values():
        collector.shutdown()


if __name__ == "__main__":
    main()
