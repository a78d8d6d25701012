"""Collecting into a replay buffer in the background while a learner samples and trains.

Run `python -m bench.background`. Two workers of eight CartPole envs write to a buffer that they and
this process see; this process draws batches, trains a Q network at a given pace, and publishes its
weights. Contestants take turns in one run; medians of the frames that come in during a turn are
shown beside the updates that the learner made: at equal updates, more frames are better.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.contestants.torchrl_collector import make_envs
from bench.policies import Greedy
from bench.works import WORKS

CAPACITY, BATCH, FRAMES, WORKERS = 100_000, 256, 1600, 2
WORK = next(one for one in WORKS if one.name == "cartpole-8")


class Contestant(NamedTuple):
    start: Callable[[], object]
    stop: Callable[[], object]
    sample: Callable[[], Any]
    frames: Callable[[], int]
    publish: Callable[[], object]
    policy: Greedy


def ours() -> Contestant:
    from swath.collectors import MultiAsyncCollector
    from swath.data import ReplayBuffer

    policy = Greedy(4, 2, 0)
    buffer = ReplayBuffer(CAPACITY, storage="shared", batch_size=BATCH, min_size=BATCH)
    envs = [WORK.make] * WORK.num_envs
    collector = MultiAsyncCollector(
        [envs] * WORKERS, policy, frames_per_batch=FRAMES // WORKERS, replay_buffer=buffer
    )

    def stop() -> None:
        writer = collector.stats()["replay"]["writer"]
        collector.async_shutdown()
        buffer.close()
        assert writer == "workers", writer

    return Contestant(
        collector.start,
        stop,
        buffer.sample,
        lambda: int(buffer.stats()["frames"]),
        collector.update_policy_weights_,
        policy,
    )


def flat(batch: Any) -> Any:
    return batch.reshape(-1)


def torchrls() -> Contestant:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector, MultiAsyncCollector
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    policy = Greedy(4, 2, 0)
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(CAPACITY), batch_size=BATCH, shared=True
    )
    first = Collector(make_envs(WORK), module, frames_per_batch=FRAMES // WORKERS, total_frames=-1)
    buffer.extend(flat(next(iter(first))))  # or its storage becomes one of [N, T] batches
    buffer.empty()
    first.shutdown()
    collector = MultiAsyncCollector(
        [partial(make_envs, WORK)] * WORKERS,
        module,
        frames_per_batch=FRAMES // WORKERS,
        total_frames=-1,
        replay_buffer=buffer,
        extend_buffer=True,
        postproc=flat,  # it takes no [N, T] batch into a flat storage
    )
    return Contestant(
        collector.start,
        partial(collector.async_shutdown, timeout=20),
        buffer.sample,
        lambda: int(buffer.write_count),
        collector.update_policy_weights_,
        policy,
    )


def learner(contestant: Contestant) -> Callable[[], None]:
    net = contestant.policy.net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)

    def update() -> None:
        batch = contestant.sample()
        following = batch["next"]
        with torch.no_grad():
            best = net(following["observation"]).amax(-1, keepdim=True)
            target = following["reward"] + 0.99 * best * ~following["terminated"]
        action = batch["action"].reshape(BATCH, -1)
        if action.shape[-1] > 1:
            action = action.long().argmax(-1, keepdim=True)
        value = net(batch["observation"]).gather(-1, action.long())
        optimizer.zero_grad()
        nn.functional.mse_loss(value, target).backward()
        optimizer.step()

    return update


def turn(contestant: Contestant, seconds: float, pace: float) -> tuple[float, float]:
    """Train for some seconds at `pace` updates a second; return frames and updates per second."""
    update = learner(contestant)
    start, before, updates = time.perf_counter(), contestant.frames(), 0
    while (now := time.perf_counter() - start) < seconds:
        if updates > now * pace:
            time.sleep(min(1 / pace, seconds - now))
            continue
        update()
        updates += 1
        if updates % 10 == 0:
            contestant.publish()
    spent = time.perf_counter() - start
    return (contestant.frames() - before) / spent, updates / spent


def measure(make: Callable[[], Contestant], turns: int, seconds: float, pace: float) -> Any:
    """Return frames and updates a second of each turn; alone, since its workers never rest."""
    contestant = make()
    try:
        contestant.start()
        deadline = time.monotonic() + 60
        while contestant.frames() < 4 * FRAMES:
            assert time.monotonic() < deadline, "no frames came"
            time.sleep(0.05)
        return [turn(contestant, seconds, pace) for _ in range(turns)]
    finally:
        contestant.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.background", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--pace", type=float, default=100.0, help="updates a second")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, list[tuple[float, float]]] = {"swath": [], "TorchRL": []}
    for _ in range(options.rounds):
        for name, make in (("swath", ours), ("TorchRL", torchrls)):
            found[name] += measure(make, 2, options.seconds, options.pace)
    medians = {
        name: [statistics.median(values) for values in zip(*turns, strict=True)]
        for name, turns in found.items()
    }
    for name, (frames, updates) in medians.items():
        ratio = f"   {frames / medians['TorchRL'][0]:5.1f}x frames" if name == "swath" else ""
        print(f"  {name:10s} {frames:10,.0f} frames/s {updates:7.1f} updates/s{ratio}")


if __name__ == "__main__":
    main()
