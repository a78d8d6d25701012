"""Do more workers bring more frames? `python -m bench.workers_scaling`.

MultiSync and MultiAsync with 1, 2, 4, 8, 14 workers x 8 CartPole envs, as many as there are cores,
beside TorchRL where it is installed and beside as many hand loops, whose efficiency is what the
machine itself allows. Contestants take turns as in `python -m bench`; the data is checked.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench import machine
from bench.contestants import HANDS, SWATH, TORCHRL, load
from bench.measure import Plan, Result, race
from bench.works import cartpole

COUNTS = (1, 2, 4, 8, 14)
WHO = (SWATH, TORCHRL, HANDS)
Table = Mapping[int, Mapping[str, Result]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.workers_scaling", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", metavar="W", help="instead of 1 to 14")
    parser.add_argument("--kinds", nargs="+", default=["sync", "async"], metavar="KIND")
    parser.add_argument("--who", nargs="+", default=list(WHO), metavar="NAME", help=f"of {WHO}")
    parser.add_argument("--rounds", type=int, default=7, metavar="K")
    parser.add_argument("--slice", type=float, default=0.5, metavar="S", help="seconds of a turn")
    parser.add_argument("--out", type=Path, metavar="FILE", help="every raw sample, as JSON")
    return parser.parse_args(arguments)


def grow(placement: str, counts: Sequence[int], options: argparse.Namespace) -> Table:
    """Races with more and more workers."""
    kinds = [kind for kind in load()[0] if kind.name in options.who]
    plan = Plan(options.rounds, options.slice, whole_episodes=False)
    found: dict[int, Mapping[str, Result]] = {}
    for count in counts:
        found[count] = race(cartpole(8, 125).placed(placement, count), kinds, plan)
        print(f"{placement}, {count} workers: {_speeds(found[count])}", flush=True)
    return found


def _speeds(results: Mapping[str, Result]) -> str:
    return ", ".join(f"{n} {r.speed:,.0f}" for n, r in results.items() if r.samples)


def efficiency(table: Table, count: int, name: str) -> float | None:
    """Frames per second and worker, relative to the fewest workers."""
    fewest = min(table)
    pair = [table[number].get(name) for number in (count, fewest)]
    if not all(result and result.samples for result in pair):
        return None
    return pair[0].speed / count / (pair[1].speed / fewest)


def lines(placement: str, table: Table) -> list[str]:
    """Frames per second, and in brackets the efficiency."""
    names = [name for name in WHO if any(name in results for results in table.values())]
    found = [f"\n{placement}, x 8 envs: frames/s (efficiency against {min(table)} worker)"]
    found.append(f"{'workers':>8}" + "".join(f"{name:>22}" for name in names))
    found[-1] += f"{'vs ' + TORCHRL:>12}{'vs ' + HANDS:>14}"
    for count, results in table.items():
        cells = [_cell(results.get(name), efficiency(table, count, name)) for name in names]
        own = results.get(SWATH, Result())
        ratios = [own.ratio(results.get(peer, Result())) for peer in (TORCHRL, HANDS)]
        ends = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        row = "".join(f"{cell:>22}" for cell in cells)
        found.append(f"{count:>8}{row}{ends[0]:>12}{ends[1]:>14}")
        for name, result in results.items():
            found += [f"FAILED, {name}, {count} workers: {one}" for one in result.problems]
    return found


def _cell(result: Result | None, share: float | None) -> str:
    if result is None or not result.samples or share is None:
        return "-"
    return f"{result.speed:,.0f} ({share:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    cores = len(os.sched_getaffinity(0))
    counts = options.workers or [count for count in COUNTS if count <= cores]
    torch.set_num_threads(1)
    facts = machine.facts()
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    for name, why in load()[1].items():
        print(f"{name}: not available ({why})")
    gc.freeze()
    tables = {kind: grow(kind, counts, options) for kind in options.kinds}
    for kind, table in tables.items():
        print("\n".join(lines(kind, table)))
    if options.out:
        options.out.write_text(json.dumps({"machine": facts, "tables": _plain(tables)}, indent=1))
    found = [r for table in tables.values() for row in table.values() for r in row.values()]
    return int(any(result.problems for result in found))


def _plain(tables: Mapping[str, Table]) -> dict:
    return {
        kind: {c: {n: r.as_json() for n, r in row.items()} for c, row in table.items()}
        for kind, table in tables.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
