"""`python -m bench.gpu`: the GPU tables of docs/benchmarks.md, and all samples as JSON."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from bench.gpu import hybrid, memory, native, workers
from bench.gpu.turns import race, summary

SIZES = (1024, 4096, 16384, 65536, 262144)


def native_rows(rounds: int, seconds: float, sizes: tuple[int, ...]) -> dict[str, Any]:
    rows = {}
    for fused, envs in itertools.product((False, True), sizes):
        name = f"CartPole{', fused' if fused else ''}, {envs} envs"
        speeds = race(native.contestants(envs, fused), rounds, seconds)
        row = summary(speeds, {"swath graph": "TorchRL"})
        row.update(summary(speeds, {"swath graph": "bare graph"}))
        rows[name] = {"speeds": speeds, "summary": row}
        show(name, row)
    return rows


def hybrid_rows(rounds: int, seconds: float) -> dict[str, Any]:
    rows = {}
    for work in hybrid.WORKS:
        for envs in (8, 64, 256):
            speeds = race(hybrid.contestants(work, envs), rounds, seconds)
            row = summary(speeds, {"swath, 2 groups, graph": "TorchRL", "swath": "bare loop"})
            rows[f"{work}, {envs} envs"] = {"speeds": speeds, "summary": row}
            show(f"{work}, {envs} envs", row)
    return rows


def worker_rows(rounds: int, seconds: float) -> dict[str, Any]:
    speeds = race(workers.contestants(), rounds, seconds)
    row = summary(speeds, {})
    show("112 CartPoles", row)
    return {"112 CartPoles": {"speeds": speeds, "summary": row}}


def memory_rows() -> dict[str, Any]:
    rows = {"memory over 1,000 rollouts": memory.flat(), "bytes of a frame": memory.moved()}
    for name, row in rows.items():
        show(name, row)
    return rows


def show(name: str, row: dict[str, float]) -> None:
    cells = [
        f"{key}: {value:.2f}" if " / " in key else f"{key}: {value:,.0f}"
        for key, value in row.items()
    ]
    print(f"{name:32} " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="native,hybrid,workers,memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    rows: dict[str, Any] = {}
    sizes = tuple(int(size) for size in given.sizes.split(","))
    if "native" in given.only:
        rows.update(native_rows(given.rounds, given.seconds, sizes))
    if "hybrid" in given.only:
        rows.update(hybrid_rows(given.rounds, given.seconds))
    if "workers" in given.only:
        rows.update(worker_rows(given.rounds, given.seconds))
    if "memory" in given.only:
        rows.update(memory_rows())
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
