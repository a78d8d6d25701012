"""What it costs to write frames into a replay buffer and to draw them, beside TorchRL's.

Run `python -m bench.replay`. Contestants alternate in one run, in one thread; medians are shown.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from bench.works import WORKS
from swath.collectors import Collector
from swath.data import PrioritizedSampler, ReplayBuffer, SliceSampler
from swath.envs import SerialEnv

SLICE = 16


class Work(NamedTuple):
    name: str
    frames_per_batch: int
    capacity: int
    sample: int
    calls: int


class Contestant(NamedTuple):
    extend: Callable[[TensorDict], object]
    sample: Callable[[], object]


# Capacities are such that the frames do not fit the processor's caches.
RUNS = [Work("cartpole-8", 1000, 200_000, 256, 20), Work("pixels-8", 128, 5_000, 256, 2)]
SAMPLERS = ["uniform", "prioritized", "slices"]


def ours(work: Work, sampler: str, storage: str = "memory") -> Contestant:
    chosen: Any = {
        "uniform": "uniform",
        "prioritized": PrioritizedSampler(alpha=0.6, beta=0.4),
        "slices": SliceSampler(slice_len=SLICE),
    }[sampler]
    buffer = ReplayBuffer(
        work.capacity, storage=storage, sampler=chosen, batch_size=work.sample, seed=0
    )
    return Contestant(buffer.extend, buffer.sample)


def torchrls(work: Work, sampler: str) -> Contestant | None:
    """None where it does not run: its compiled part does not load with every torch."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data import SliceSampler as TorchRLSlices
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritized

    try:
        chosen = {
            "uniform": lambda: None,
            "prioritized": lambda: TorchRLPrioritized(work.capacity, alpha=0.6, beta=0.4),
            "slices": lambda: TorchRLSlices(
                slice_len=SLICE, traj_key=("collector", "traj_ids"), strict_length=False
            ),
        }[sampler]()
    except RuntimeError as error:
        print(f"  TorchRL has no {sampler} sampler here: {error}")
        return None
    options = {} if chosen is None else {"sampler": chosen}
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(work.capacity), batch_size=work.sample, **options
    )
    # It takes no [N, T] batch into a flat storage: its users reshape.
    return Contestant(lambda batch: buffer.extend(batch.reshape(-1)), buffer.sample)


def timed(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def batches(work: Work) -> list[TensorDict]:
    kind = next(one for one in WORKS if one.name == work.name)
    env = SerialEnv(kind.num_envs, kind.make)
    with Collector(env, frames_per_batch=work.frames_per_batch, seed=0) as collector:
        return [collector.next() for _ in range(8)]


def race(work: Work, sampler: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of one extend and of one sample, by contestant."""
    data: Iterator[TensorDict] = cycle(batches(work))
    made = {"swath": ours(work, sampler), "swath shared": ours(work, sampler, "shared")}
    if (other := torchrls(work, sampler)) is not None:
        made["TorchRL"] = other
    for contestant in made.values():  # rings that have gone round once
        for _ in range(work.capacity // work.frames_per_batch + 1):
            contestant.extend(next(data))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in made}
    for _ in range(rounds):
        for name, contestant in made.items():
            writing, drawing = times[name]
            batch = next(data)
            writing.append(timed(lambda c=contestant, b=batch: c.extend(b), work.calls))
            drawing.append(timed(contestant.sample, work.calls))
    return {name: tuple(map(statistics.median, both)) for name, both in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="works or samplers whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for work in RUNS:
        for sampler in SAMPLERS:
            if options.only not in f"{work.name} {sampler}":
                continue
            print(f"{work.name}, {sampler}: {work.frames_per_batch} frames in, {work.sample} out")
            gc.collect()
            results = race(work, sampler, options.rounds)
            base = results.get("TorchRL")
            for name, (extend, sample) in results.items():
                ratios = (
                    f"   {base[0] / extend:5.1f}x extend, {base[1] / sample:5.1f}x sample"
                    if base is not None and name != "TorchRL"
                    else ""
                )
                print(f"  {name:14s} {extend * 1e6:9.1f} us {sample * 1e6:9.1f} us{ratios}")


if __name__ == "__main__":
    main()
