"""Collecting with Ray actors, against TorchRL and RLlib: `python -m bench.ray`.

Each contestant runs in a process of its own with a cluster of its own on this machine, within
`--patience` seconds; contestants take turns, and ratios are taken within a round. One that fails is
left out of the table, which says why. RLlib needs the extra `bench-ray`.

    python -m bench.ray --works cartpole-1 cartpole-8 pixels-8 --rounds 5
    python -m bench.ray --update             # weights are published after every batch
    python -m bench.ray --update --frames 10000 # a run of so many frames, from its first batch on
    python -m bench.ray --publish --workers 8   # time to publish 1, 10 and 100 MB
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from bench import machine
from bench.distributed import _end_group, _Heavy, count, hand_speed, speed
from bench.works import Work, cartpole, pixels

WORKS = {
    "cartpole-1": cartpole(1, 1000),
    "cartpole-1-short": cartpole(1, 200),
    "cartpole-8": cartpole(8, 125),
    "pixels-1": pixels(1),
    "pixels-8": pixels(8),
}
SWATH, PROCESSES = "swath ray", "swath processes"
ELSEWHERE = "swath elsewhere"
"""Actors that find no door of the driver's, as on other machines: all goes through Ray."""
TORCHRL, TORCHRL_PROCESSES = "torchrl Ray", "torchrl processes"
RLLIB = "rllib env runners"
HANDS = "hand loops"
NAMES = (SWATH, ELSEWHERE, PROCESSES, TORCHRL, TORCHRL_PROCESSES, RLLIB, HANDS)
PUBLISHERS = (SWATH, ELSEWHERE, TORCHRL, RLLIB)
MEGABYTES = (1, 10, 100)
PUBLISHES = 10
Round = dict[str, dict[str, Any]]
"""What each contestant measured, or why it failed."""
Columns = dict[str, tuple[str, str, int]]
"""Title: key of what was measured, format, 1 if more is better and -1 if less is."""
RACE: Columns = {
    "frames/s": ("fps", ",.0f", 1),
    "driver us/frame": ("cpu_us_per_frame", ",.1f", -1),
    "first batch s": ("first_batch", ".1f", -1),
}
PUBLISH: Columns = {
    "all have it ms": ("arrives_ms", ",.1f", -1),
    "returns ms": ("returns_ms", ",.1f", -1),
}
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


class _NoDoor:
    name = None

    def close(self) -> None:
        pass


def make_swath(name: str, work: Work, sync: bool, workers: int, ready: bool = True) -> Any:
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector
    from swath.collectors.distributed import RayCollector
    from swath.workers import ray as place

    makers = [[work.make] * work.num_envs if work.num_envs > 1 else work.make] * workers
    frames = work.frames_per_batch * (workers if sync else 1)
    if name == PROCESSES:
        kind = MultiSyncCollector if sync else MultiAsyncCollector
        return kind(makers, work.policy(), frames_per_batch=frames)
    if name == ELSEWHERE:
        place.Door = _NoDoor
    return RayCollector(
        makers, work.policy(), sync=sync, frames_per_batch=frames, ray_init_config=lean(workers)
    )


def make_torchrl(name: str, work: Work, sync: bool, workers: int, ready: bool = True) -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl import collectors

    from bench.contestants.torchrl_collector import hush, make_envs

    hush()
    policy = TensorDictModule(work.policy(), in_keys=[work.policy_key], out_keys=["action"])
    makers = [partial(make_envs, work)] * workers
    frames = work.frames_per_batch * (workers if sync else 1)
    total = ENDLESS // frames // workers * frames * workers
    if name == TORCHRL_PROCESSES:
        kind = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
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
    if ready:  # it connects its actors for weights with the first that are published
        collector.update_policy_weights_()
    return collector


def make_rllib(name: str, work: Work, sync: bool, workers: int, ready: bool = True) -> Any:
    import ray
    from bench.rllib import EnvRunners

    ray.init(**lean(workers))
    return EnvRunners(work, sync, workers)


def make(name: str, work: Work, sync: bool, workers: int, ready: bool = True) -> Any:
    """Make a collector; it is `ready` if what is done once only, at first, has been done."""
    kinds = dict.fromkeys((SWATH, ELSEWHERE, PROCESSES), make_swath) | {RLLIB: make_rllib}
    return kinds.get(name, make_torchrl)(name, work, sync, workers, ready)


# -- one contestant, in a process of its own ------------------------------------------------------


def one(options: argparse.Namespace) -> None:
    """Be a contestant; print what was measured, or why nothing was, as the last line."""
    torch.set_num_threads(1)
    name, what, kind = options.one
    try:
        if kind == "publish":
            found = publishing(name, int(what), options)
        else:
            found = collecting(name, WORKS[what], kind == "sync", options)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
    print("\n" + json.dumps(found), flush=True)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os._exit(0)  # not by shutdown: some peers hang there


def collecting(name: str, work: Work, sync: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Frames per second, CPU of this process for a frame, seconds to the first batch."""
    began = monotonic()
    if name == HANDS:
        return {"fps": hand_speed(work, options.seconds, options.workers)}
    most = options.frames or math.inf
    collector = make(name, work, sync, options.workers, ready=most == math.inf)
    batches = iter(collector)
    next(batches)
    first = monotonic() - began
    counts = sys.modules["bench.rllib"].count if name == RLLIB else count
    seconds = options.seconds if most == math.inf else math.inf
    found = speed(collector, batches, seconds, options.update, counts, most)
    found["cpu_us_per_frame"] = 1e6 * found["learner_cpu"] / found["fps"]
    return found | {"first_batch": first}


def publishing(name: str, megabytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds until publish returns, and until each actor has the weights."""
    work = replace(cartpole(1, 200), policy=partial(_Heavy, megabytes))
    collector = make(name, work, True, options.workers)
    batches = iter(collector)
    next(batches)
    update = collector.update_policy_weights_
    settle = update if name == TORCHRL else partial(update, wait=True)  # TorchRL's always waits
    returns, arrives = [], []
    for _ in range(1 + PUBLISHES):
        returns.append(_milliseconds(update))
        settle()
        arrives.append(_milliseconds(settle))
    back, there = (statistics.median(times[1:]) for times in (returns, arrives))
    return {"returns_ms": back, "arrives_ms": there}


def _milliseconds(act: Callable[[], Any]) -> float:
    started = perf_counter()
    act()
    return 1e3 * (perf_counter() - started)


# -- all of them ----------------------------------------------------------------------------------


def run(name: str, what: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.ray", "--one", name, what, kind]
    command += ["--seconds", str(options.seconds), "--workers", str(options.workers)]
    command += ["--update"] * options.update + ["--frames", str(options.frames)]
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
    except subprocess.TimeoutExpired:
        _end_group(process)
        sleep(5)  # Ray's workers are in groups of their own, and end when their node is gone
        return {"failed": f"nothing within {options.patience:.0f} s"}
    except (IndexError, json.JSONDecodeError):
        return {"failed": f"it ended with code {process.returncode} and told nothing"}
    finally:
        _end_group(process)


def rounds_of(
    names: Sequence[str], what: str, kind: str, options: argparse.Namespace
) -> list[Round]:
    """Let contestants take turns; who is first changes from round to round."""
    rounds = []
    for number in range(options.rounds):
        order = [names[(turn + number) % len(names)] for turn in range(len(names))]
        rounds.append({name: run(name, what, kind, options) for name in order})
    return rounds


def races(options: argparse.Namespace) -> dict[str, list[Round]]:
    found = {}
    names = options.names or NAMES
    for work in options.works:
        for kind in options.kinds:
            rounds = found[f"{work} {kind}"] = rounds_of(names, work, kind, options)
            print(f"\n{options.workers} workers, {work}, {kind}", flush=True)
            for line in table(names, rounds, RACE):
                print(line, flush=True)
    return found


def weights(options: argparse.Namespace) -> dict[str, list[Round]]:
    found = {}
    names = [name for name in PUBLISHERS if name in (options.names or PUBLISHERS)]
    for megabytes in MEGABYTES:
        rounds = found[f"{megabytes} MB"] = rounds_of(names, str(megabytes), "publish", options)
        print(f"\n{megabytes} MB of weights to {options.workers} workers", flush=True)
        for line in table(names, rounds, PUBLISH):
            print(line, flush=True)
    return found


def table(names: Sequence[str], rounds: Sequence[Round], columns: Columns) -> Iterator[str]:
    """Medians; the last column is how many times as fast swath was, within a round."""
    yield f"{'':20}" + "".join(f"{title:>17}" for title in (*columns, f"{SWATH} is"))
    for name in names:
        ran = [r for r in rounds if "failed" not in r[name]]
        if not ran:
            yield f"{name:20} failed: {rounds[-1][name]['failed']}"
            continue
        cells = [
            _middle([r[name][key] for r in ran if key in r[name]], form)
            for key, form, _ in columns.values()
        ]
        key, _, power = next(iter(columns.values()))
        pairs = [(r[SWATH][key], r[name][key]) for r in ran if key in r.get(SWATH, {})]
        gain = _middle([(ours / theirs) ** power for ours, theirs in pairs], ".2f")
        cells.append(gain and gain + "x")
        yield f"{name:20}" + "".join(f"{cell:>17}" for cell in cells)


def _middle(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}}" if values else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.ray", description=__doc__)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--kinds", nargs="+", default=["sync", "async"])
    parser.add_argument("--names", nargs="+", choices=NAMES, help="only these contestants")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--frames", type=int, default=0, help="of a run, instead of seconds")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for one contestant")
    parser.add_argument("--update", action="store_true", help="publish after every batch")
    parser.add_argument("--publish", action="store_true", help="only: time to publish weights")
    parser.add_argument("--out", type=Path, help="every raw sample, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(options)
    print(", ".join(f"{name} {fact}" for name, fact in machine.facts().items()), flush=True)
    found = weights(options) if options.publish else races(options)
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
