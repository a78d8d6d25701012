"""Does anything grow? `python -m bench.soak [--frames N]` collects and looks at itself.

Half of the frames come from MultiAsyncCollector, half from MultiSyncCollector, 2 workers x 8
CartPole envs, weights published now and then. Memory, threads, descriptors and /dev/shm are printed
at intervals; the exit code is 1 if one of them is larger in the last quarter than in the second, or
if something is left after shutdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.works import Work, cartpole
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.multi import MultiCollector

WORKERS = 2
SAMPLES = 24
PUBLISH_EVERY = 50  # batches
SLACK_BYTES = 2 << 20  # what memory may move by itself


@dataclass(frozen=True)
class Sample:
    """What a collector holds at one time, its workers included."""

    frames: int
    rss: int
    worker_rss: int
    threads: int
    descriptors: int
    shm: int

    def __str__(self) -> str:
        return (
            f"{self.frames:>12,} frames   rss {self.rss / 2**20:8.1f} MiB + workers "
            f"{self.worker_rss / 2**20:8.1f} MiB   threads {self.threads}   "
            f"descriptors {self.descriptors}   /dev/shm {self.shm}"
        )


def take(frames: int, workers: Sequence[int]) -> Sample:
    """Looks at this process and at the workers."""
    own = os.getpid()
    everyone = [own, *workers]
    return Sample(
        frames=frames,
        rss=_status(own, "VmRSS") * 1024,
        worker_rss=sum(_status(pid, "VmRSS") for pid in workers) * 1024,
        threads=sum(_status(pid, "Threads") for pid in everyone),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in everyone),
        shm=len(os.listdir("/dev/shm")),
    )


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def run(kind: type[MultiCollector], frames: int) -> list[Sample]:
    """Collects so many frames, printing what is held."""
    work = cartpole(8, 125).placed("sync", WORKERS)
    source, policy = [work.make] * 8, work.policy()
    collector = kind([source] * WORKERS, policy, frames_per_batch=_batch(kind, work))
    samples: list[Sample] = []
    with collector:
        workers = [worker["pid"] for worker in collector.stats()["per_worker"]]
        start, collected, batches = time.perf_counter(), 0, 0
        while collected < frames:
            collected += collector.next().numel()
            batches += 1
            if batches % PUBLISH_EVERY == 0:
                collector.update_policy_weights_()
            if collected * SAMPLES >= frames * (len(samples) + 1):
                gc.collect()
                samples.append(take(collected, workers))
                print(samples[-1], flush=True)
        speed = collected / (time.perf_counter() - start)
    print(f"{kind.__name__}: {collected:,} frames, {speed:,.0f} frames/s", flush=True)
    return samples


def _batch(kind: type[MultiCollector], work: Work) -> int:
    return work.frames_per_batch // (WORKERS if kind is MultiAsyncCollector else 1)


def growth(samples: Sequence[Sample]) -> list[str]:
    """What is larger at the end than after a quarter of the way."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found = []
    for key in ("rss", "worker_rss"):
        before, after = (
            statistics.median(getattr(one, key) for one in part) for part in (early, late)
        )
        if after > before + SLACK_BYTES:
            found.append(f"{key} grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB")
    for key in ("threads", "descriptors", "shm"):
        before, after = (max(getattr(one, key) for one in part) for part in (early, late))
        if after > before:
            found.append(f"{key} grew from {before} to {after}")
    return found


def left_over(before: Sample, after: Sample) -> list[str]:
    """What a collector left behind."""
    keys = ("threads", "descriptors", "shm")
    return [
        f"{key}: {getattr(before, key)} before, {getattr(after, key)} after shutdown"
        for key in keys
        if getattr(after, key) > getattr(before, key)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000, metavar="N", help="in all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kinds = (MultiAsyncCollector, MultiSyncCollector)
    for kind in kinds:  # what stays for the next collector, a fork server say, is no growth
        run(kind, 100_000)
    found = []
    for kind in kinds:
        print(f"\n{kind.__name__}, {WORKERS} workers x 8 envs")
        gc.collect()
        before = take(0, [])
        samples = run(kind, options.frames // len(kinds))
        gc.collect()
        problems = growth(samples) + left_over(before, take(0, []))
        found += [f"{kind.__name__}: {problem}" for problem in problems]
    print("\n".join(["", *found]) if found else "\nNothing grew.")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
