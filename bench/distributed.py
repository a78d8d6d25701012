"""Collecting over machines, against TorchRL's same classes: `python -m bench.distributed`.

Workers are processes of this machine that share no memory: what differs from a cluster is the
network. Each contestant runs in a process of its own (one RPC world per process is all that torch
allows), contestants take turns, and ratios are taken within a round.

    python -m bench.distributed --works cartpole-1 cartpole-8 pixels-4 --rounds 5
    python -m bench.distributed --publish            # time to publish 1, 10 and 100 MB
    python -m bench.distributed --ranks 1 2 4 8      # frames/s as ranks are added
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from bench import machine
from bench.contestants.hand_loops import HandLoops
from bench.works import Work, cartpole, pixels

WORKS = {"cartpole-1": cartpole(1, 200), "cartpole-8": cartpole(8, 125), "pixels-4": pixels(4)}
ENDLESS = 10**9
SWATH = {
    "swath gloo": {},
    "swath rpc": {"backend": "rpc"},
    "swath processes": None,
}
PEERS = {
    "sync": ("torchrl DistributedCollector", "torchrl DistributedSync", "torchrl RPC"),
    "async": ("torchrl DistributedCollector", "torchrl RPC"),
}
RIVAL = {"swath gloo": "torchrl DistributedCollector", "swath rpc": "torchrl RPC"}
HANDS = "hand loops"


# -- one contestant, in a process of its own ------------------------------------------------------


def swath_collector(name: str, work: Work, sync: bool, workers: int, **options: Any) -> Any:
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector
    from swath.collectors.distributed import DistributedCollector

    makers = [[work.make] * work.num_envs if work.num_envs > 1 else work.make] * workers
    frames = work.frames_per_batch * (workers if sync else 1)
    if SWATH[name] is None:
        kind = MultiSyncCollector if sync else MultiAsyncCollector
        return kind(makers, work.policy(), frames_per_batch=frames, **options)
    options = {**SWATH[name], **options}
    return DistributedCollector(
        makers, work.policy(), sync=sync, launcher="mp", frames_per_batch=frames, **options
    )


def torchrl_collector(name: str, work: Work, sync: bool, workers: int, **options: Any) -> Any:
    from functools import partial

    from tensordict.nn import TensorDictModule
    from torchrl.collectors import distributed

    from bench.contestants.torchrl_collector import hush, make_envs

    hush()
    policy = TensorDictModule(work.policy(), in_keys=[work.policy_key], out_keys=["action"])
    kind = {
        "torchrl DistributedCollector": distributed.DistributedCollector,
        "torchrl DistributedSync": distributed.DistributedSyncCollector,
        "torchrl RPC": distributed.RPCCollector,
    }[name]
    if kind is not distributed.DistributedSyncCollector:
        options |= {"sync": sync}
    frames = work.frames_per_batch * (workers if sync else 1)
    total = ENDLESS // frames // workers * frames * workers
    return kind(
        [partial(make_envs, work)] * workers,
        policy,
        frames_per_batch=frames,
        total_frames=total,
        launcher="mp",
        **options,
    )


def hand_speed(work: Work, seconds: float, workers: int) -> float:
    loops = HandLoops()
    loops.setup(work.placed("sync", workers))
    try:
        loops.collect(2 * work.frames_per_batch * workers)
        started, frames = perf_counter(), 0
        while perf_counter() - started < seconds:
            frames += loops.collect(4 * work.frames_per_batch * workers).frames
        return frames / (perf_counter() - started)
    finally:
        loops.close()


def count(data: Any) -> int:
    """Frames of a batch, whose rewards are summed."""
    float(data["next", "reward"].sum())
    return data.numel()


def speed(
    collector: Any,
    batches: Iterator[Any],
    seconds: float,
    publish: bool,
    counts: Callable[[Any], int] = count,
    most: float = math.inf,
) -> dict[str, float]:
    """Collect for some seconds, each batch counted; the first four are for warming up.

    If `most` frames are given, it ends with them, and nothing is done to warm up.
    """
    for _ in range(4 if most == math.inf else 0):
        next(batches)
    started, used, frames = perf_counter(), _own_cpu(), 0
    while perf_counter() - started < seconds and frames < most:
        frames += counts(next(batches))
        if publish:
            collector.update_policy_weights_()
    took = perf_counter() - started
    return {"fps": frames / took, "learner_cpu": (_own_cpu() - used) / took}


def _own_cpu() -> float:
    import resource

    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def one(options: argparse.Namespace) -> None:
    """Be a contestant; print what was measured as the last line."""
    torch.set_num_threads(1)
    work, sync = WORKS[options.one[1]], options.one[2] == "sync"
    name, began = options.one[0], monotonic()
    if name == HANDS:
        found = {"fps": hand_speed(work, options.seconds, options.workers)}
    else:
        make = swath_collector if name in SWATH else torchrl_collector
        collector = make(name, work, sync, options.workers)
        batches = iter(collector)
        next(batches)
        first = monotonic() - began
        found = speed(collector, batches, options.seconds, options.update) | {"first_batch": first}
    print("\n" + json.dumps(found), flush=True)
    sys.stdout.flush()
    # Not by shutdown: some peers hang there, and their processes end with this one's group.
    import os

    os._exit(0)


# -- all of them ----------------------------------------------------------------------------------


def run(name: str, work: str, kind: str, options: argparse.Namespace, workers: int) -> dict | None:
    command = [sys.executable, "-m", "bench.distributed", "--one", name, work, kind]
    command += ["--seconds", str(options.seconds), "--workers", str(workers)]
    command += ["--update"] * options.update
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=120)
        return json.loads(out.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    import os
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def races(options: argparse.Namespace) -> dict:
    found: dict[str, Any] = {}
    for work in options.works:
        for kind in options.kinds:
            names = options.names or [*SWATH, *PEERS[kind], HANDS]
            rounds = [
                {name: run(name, work, kind, options, options.workers) for name in names}
                for _ in range(options.rounds)
            ]
            found[f"{work} {kind}"] = rounds
            print(f"\n{options.workers} workers, {work}, {kind}", flush=True)
            for line in lines(names, rounds):
                print(line, flush=True)
    return found


def lines(names: Sequence[str], rounds: Sequence[Mapping[str, dict | None]]) -> list[str]:
    head = (
        f"{'':30}{'frames/s':>10}{'vs rival':>10}{'vs hands':>10}{'learner CPU':>13}{'first s':>9}"
    )
    found = [head]
    for name in names:
        ours = [r[name] for r in rounds if r[name]]
        if not ours:
            found.append(f"{name:30}{'failed':>10}")
            continue
        cells = [f"{statistics.median(o['fps'] for o in ours):>10,.0f}"]
        cells += [_ratio(rounds, name, peer) for peer in (RIVAL.get(name), HANDS)]
        cpu = [o["learner_cpu"] for o in ours if "learner_cpu" in o]
        cells.append(f"{statistics.median(cpu):>13.0%}" if cpu else f"{'':>13}")
        first = [o["first_batch"] for o in ours if "first_batch" in o]
        cells.append(f"{statistics.median(first):>9.1f}" if first else "")
        found.append(f"{name:30}" + "".join(cells))
    return found


def _ratio(rounds: Sequence[Mapping[str, dict | None]], name: str, peer: str | None) -> str:
    pairs = [(r[name], r[peer]) for r in rounds if peer and r.get(name) and r.get(peer)]
    ratios = [ours["fps"] / theirs["fps"] for ours, theirs in pairs]
    return f"{statistics.median(ratios):>9.2f}x" if ratios else f"{'':>10}"


# -- weights, ranks, bytes ------------------------------------------------------------------------


class _Heavy(torch.nn.Module):
    """A policy with so many megabytes of weights that are not used."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.inner = WORKS["cartpole-1"].policy()
        self.ballast = torch.nn.Parameter(torch.ones(megabytes * 250_000))  # zeros may cost nothing

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.inner(observation)


def publishing(options: argparse.Namespace) -> dict:
    """Seconds until publish returns, and until each worker has the weights."""
    from swath.collectors import MultiSyncCollector
    from swath.collectors.distributed import DistributedCollector

    makers = [WORKS["cartpole-1"].make] * options.workers
    kinds: dict[str, Callable[..., Any]] = {
        "gloo": lambda p: DistributedCollector(
            makers, p, sync=True, launcher="mp", frames_per_batch=200 * options.workers
        ),
        "processes": lambda p: MultiSyncCollector(
            makers, p, frames_per_batch=200 * options.workers
        ),
    }
    found: dict[str, Any] = {}
    for name, make in kinds.items():
        for megabytes in (1, 10, 100):
            policy = _Heavy(megabytes)
            with make(policy) as collector:
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
            found[f"{name} {megabytes} MB"] = [
                statistics.median(times[1:]) for times in (returns, arrives)
            ]
            back, there = found[f"{name} {megabytes} MB"]
            print(
                f"{name:>10}, {megabytes:>4} MB to {options.workers} workers: returns after "
                f"{back * 1e3:8.2f} ms, all have it after {there * 1e3:8.2f} ms",
                flush=True,
            )
    return found


def growing(options: argparse.Namespace) -> dict:
    found: dict[str, Any] = {}
    for work in options.works:
        for kind in options.kinds:
            for ranks in options.ranks:
                for name in ("swath gloo", HANDS):
                    got = [run(name, work, kind, options, ranks) for _ in range(options.rounds)]
                    speeds = [one["fps"] for one in got if one]
                    found[f"{work} {kind} {ranks} {name}"] = speeds
                    middle = statistics.median(speeds) if speeds else 0
                    print(f"{work}, {kind}, {ranks:>2} ranks, {name}: {middle:,.0f}", flush=True)
    return found


def on_the_wire() -> None:
    """Bytes of a frame on the wire, and of its values alone."""
    from swath.collectors import Collector

    for name, work in WORKS.items():
        makers = [work.make] * work.num_envs
        with Collector(makers, work.policy(), frames_per_batch=work.frames_per_batch) as collector:
            layout = collector._runner.layout
            batch = collector.next()
        values = sum(v.numel() * v.element_size() for v in batch.values(True, True))
        frames = work.frames_per_batch
        print(
            f"{name:12} {layout.nbytes / frames:12,.1f} bytes a frame, "
            f"{layout.nbytes / values:.3f} times its values",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.distributed", description=__doc__)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--kinds", nargs="+", default=["sync", "async"])
    parser.add_argument("--names", nargs="+", help="only these contestants")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--update", action="store_true", help="publish after every batch")
    parser.add_argument("--publish", action="store_true", help="only: time to publish weights")
    parser.add_argument("--ranks", type=int, nargs="+", help="only: frames/s with so many ranks")
    parser.add_argument("--wire", action="store_true", help="only: bytes of a frame")
    parser.add_argument("--out", type=Path, help="every raw sample, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(options)
    print(", ".join(f"{name} {fact}" for name, fact in machine.facts().items()), flush=True)
    if options.wire:
        on_the_wire()
        return
    if options.publish:
        found = publishing(options)
    else:
        found = growing(options) if options.ranks else races(options)
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
