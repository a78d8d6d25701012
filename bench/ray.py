"""Collecting with Ray actors, against TorchRL's RayCollector: `python -m bench.ray`.

Each contestant runs in a process of its own with a cluster of its own on this machine; contestants
take turns, and ratios are taken within a round. RLlib is not among them.

    python -m bench.ray --works cartpole-1 cartpole-8 pixels-4 --rounds 5
    python -m bench.ray --update             # weights are published after every batch
    python -m bench.ray --publish --workers 8   # time to publish 1, 10 and 100 MB
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from bench import machine
from bench.distributed import _end_group, _Heavy, hand_speed, lines, speed
from bench.works import Work, cartpole, pixels

WORKS = {
    "cartpole-1": cartpole(1, 1000),
    "cartpole-1-short": cartpole(1, 200),
    "cartpole-8": cartpole(8, 125),
    "pixels-1": pixels(1),
    "pixels-8": pixels(8),
}
SWATH, PROCESSES = "swath ray", "swath processes"
TORCHRL, TORCHRL_PROCESSES = "torchrl Ray", "torchrl processes"
HANDS = "hand loops"
NAMES = (SWATH, PROCESSES, TORCHRL, TORCHRL_PROCESSES, HANDS)
ENDLESS = 10**9


def lean(cpus: int) -> dict[str, Any]:
    """Return how every contestant starts its cluster."""
    return {
        "address": "local",
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": 512 << 20,
        "logging_level": "error",
        "log_to_driver": False,
    }


def make_swath(name: str, work: Work, sync: bool, workers: int, policy: Any = None) -> Any:
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector
    from swath.collectors.distributed import RayCollector

    makers = [[work.make] * work.num_envs if work.num_envs > 1 else work.make] * workers
    frames = work.frames_per_batch * (workers if sync else 1)
    policy = policy or work.policy()
    if name == PROCESSES:
        kind = MultiSyncCollector if sync else MultiAsyncCollector
        return kind(makers, policy, frames_per_batch=frames)
    return RayCollector(
        makers, policy, sync=sync, frames_per_batch=frames, ray_init_config=lean(workers)
    )


def make_torchrl(name: str, work: Work, sync: bool, workers: int) -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl import collectors

    from bench.contestants.torchrl_collector import hush, make_envs

    hush()
    policy = TensorDictModule(work.policy(), in_keys=[work.policy_key], out_keys=["action"])
    makers = [partial(make_envs, work)] * workers
    frames = work.frames_per_batch * (workers if sync else 1)
    total = ENDLESS // frames // workers * frames * workers
    if name == TORCHRL_PROCESSES:
        names = ("MultiaSyncDataCollector", "MultiSyncDataCollector")
        kind = getattr(collectors, names[sync])
        return kind(makers, policy, frames_per_batch=frames, total_frames=total)
    from torchrl.collectors.distributed import RayCollector

    collector = RayCollector(
        makers,
        policy,
        frames_per_batch=frames,
        total_frames=total,
        sync=sync,
        num_collectors=workers,
        ray_init_config=lean(workers),
        remote_configs={"num_cpus": 1, "num_gpus": 0},
    )
    collector.update_policy_weights_()
    return collector


def one(options: argparse.Namespace) -> None:
    """Be a contestant; print what was measured as the last line."""
    torch.set_num_threads(1)
    name, work, sync = options.one[0], WORKS[options.one[1]], options.one[2] == "sync"
    began = monotonic()
    if name == HANDS:
        found = {"fps": hand_speed(work, options.seconds, options.workers)}
    else:
        make = make_swath if name in (SWATH, PROCESSES) else make_torchrl
        collector = make(name, work, sync, options.workers)
        next(iter(collector))
        first = monotonic() - began
        found = speed(collector, options.seconds, options.update) | {"first_batch": first}
        found["cpu_us_per_frame"] = 1e6 * found["learner_cpu"] / found["fps"]
    print("\n" + json.dumps(found), flush=True)
    if "Ray" in name or name == SWATH:
        import ray

        ray.shutdown()
    os._exit(0)  # not by shutdown: some peers hang there


def run(name: str, work: str, kind: str, options: argparse.Namespace) -> dict | None:
    command = [sys.executable, "-m", "bench.ray", "--one", name, work, kind]
    command += ["--seconds", str(options.seconds), "--workers", str(options.workers)]
    command += ["--update"] * options.update
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=options.patience)
        return json.loads(out.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        return None
    finally:
        _end_group(process)


def races(options: argparse.Namespace) -> dict:
    found: dict[str, Any] = {}
    for work in options.works:
        for kind in options.kinds:
            rounds = [
                {name: run(name, work, kind, options) for name in options.names}
                for _ in range(options.rounds)
            ]
            found[f"{work} {kind}"] = rounds
            print(f"\n{options.workers} workers, {work}, {kind}", flush=True)
            for line in lines(options.names, rounds):
                print(line, flush=True)
            report(rounds)
    return found


def report(rounds: Sequence[dict]) -> None:
    """Print the ratios that there are targets for, and what a frame costs this process."""
    for rival in (TORCHRL, TORCHRL_PROCESSES, HANDS):
        pairs = [(r.get(SWATH), r.get(rival)) for r in rounds]
        ratios = [ours["fps"] / theirs["fps"] for ours, theirs in pairs if ours and theirs]
        if ratios:
            print(f"  {SWATH} / {rival}: {statistics.median(ratios):.2f}", flush=True)
    costs = [r[SWATH]["cpu_us_per_frame"] for r in rounds if r.get(SWATH)]
    if costs:
        print(f"  CPU of this process: {statistics.median(costs):.2f} us a frame", flush=True)


def publishing(options: argparse.Namespace) -> dict:
    """Seconds until publish returns, and until each actor has the weights."""
    found: dict[str, Any] = {}
    for megabytes in (1, 10, 100):
        policy = _Heavy(megabytes)
        work = cartpole(1, 200)
        with make_swath(SWATH, work, True, options.workers, policy) as collector:
            collector.next()
            returns, arrives = [], []
            for _ in range(options.rounds + 1):
                started = perf_counter()
                collector.update_policy_weights_()
                returns.append(perf_counter() - started)
                collector.update_policy_weights_(wait=True)
                started = perf_counter()
                collector.update_policy_weights_(wait=True)
                arrives.append(perf_counter() - started)
        back, there = (statistics.median(times[1:]) for times in (returns, arrives))
        found[f"{megabytes} MB"] = [back, there]
        print(
            f"{megabytes:>4} MB to {options.workers} actors: returns after {back * 1e3:8.2f} ms, "
            f"all have it after {there * 1e3:8.2f} ms",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.ray", description=__doc__)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--kinds", nargs="+", default=["sync", "async"])
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for one contestant")
    parser.add_argument("--update", action="store_true", help="publish after every batch")
    parser.add_argument("--publish", action="store_true", help="only: time to publish weights")
    parser.add_argument("--out", type=Path, help="every raw sample, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(options)
    print(", ".join(f"{name} {fact}" for name, fact in machine.facts().items()), flush=True)
    found = publishing(options) if options.publish else races(options)
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
