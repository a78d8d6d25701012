"""How long it takes to start and to end worker processes.

`python -m bench.startup`, and a table of `python -m bench`. Each sample is a Python process of its
own, which imports what it needs and then builds a collector twice.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.contestants import SWATH, TORCHRL, load, placed
from bench.works import cartpole

WORKERS = 8
STAGES = {
    "construct": "constructor in a fresh process",
    "batch": "first batch",
    "shutdown": "shutdown",
    "again": "constructor, a second time",
    "end": "shutdown, a second time",
}
Samples = Mapping[str, Sequence[Mapping[str, float]]]


def sample(name: str, workers: int) -> dict[str, float]:
    """Seconds of each stage, in this process."""
    torch.set_num_threads(1)
    work = cartpole(1, 100).placed("sync", workers)
    kind = placed(load()[0], "sync")[name]
    seconds: dict[str, float] = {}

    def timed(stage: str, act: Any) -> None:
        start = time.perf_counter()
        act()
        seconds[stage] = time.perf_counter() - start

    first, second = kind(), kind()
    timed("construct", lambda: first.setup(work))
    timed("batch", first.rollout)
    timed("shutdown", first.close)
    timed("again", lambda: second.setup(work))
    timed("end", second.close)
    return seconds


def run(repeats: int = 3, workers: int = WORKERS) -> dict[str, list[dict[str, float]]]:
    """The samples of each contestant; none where it cannot be imported."""
    known = placed(load()[0], "sync")
    found: dict[str, list[dict[str, float]]] = {n: [] for n in (SWATH, TORCHRL) if n in known}
    for _ in range(repeats):
        for name, kept in found.items():
            kept.append(_in_fresh_process(name, workers))
    return found


def _in_fresh_process(name: str, workers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.startup", "--sample", name, str(workers)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def median(samples: Sequence[Mapping[str, float]], stage: str) -> float:
    return statistics.median(one[stage] for one in samples)


def lines(samples: Samples, workers: int = WORKERS) -> list[str]:
    """The table as text."""
    found = [f"Starting and ending {workers} workers with one env each, seconds (median):"]
    for stage, title in STAGES.items():
        cells = [f"{name} {median(kept, stage):7.3f}" for name, kept in samples.items()]
        found.append(f"  {title:32s} {'   '.join(cells)}")
    return found


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--sample"]:
        print(json.dumps(sample(arguments[1], int(arguments[2]))))
    else:
        print("\n".join(lines(run())))


if __name__ == "__main__":
    main(sys.argv[1:])
