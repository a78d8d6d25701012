"""``python -m bench``: measure, print, and leave results.json and results.png."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import machine, report, scaling, store, targets
from bench.contestants import load
from bench.measure import Plan, race
from bench.works import WORKS

RESULTS = Path(__file__).parent / "results"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="several minutes (the default)")
    length.add_argument("--quick", action="store_true", help="a smoke test of about half a minute")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="works whose name contains NAME, or 'scaling'; may be repeated",
    )
    parser.add_argument("--rounds", type=int, metavar="K", help="rounds that count")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where to write")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed")
    return options


def plans(options: argparse.Namespace) -> tuple[Plan, Plan]:
    """How long to measure the works, and the scaling."""
    if options.quick:
        rounds = options.rounds or 2
        return Plan(rounds, 0.1, whole_episodes=False), Plan(rounds, 0.05, whole_episodes=False)
    return Plan(options.rounds or 18, 0.25), Plan(options.rounds or 9, 0.12, whole_episodes=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a contestant failed or delivered wrong data; missed targets do not count."""
    options = parse(arguments)
    names = [work.name for work in WORKS] + ["scaling"]
    wanted = [n for n in names if not options.only or any(only in n for only in options.only)]
    console = Console()
    console.width = max(console.width, 110)
    if not wanted:
        console.print(f"--only {options.only}: no such work; there are {', '.join(names)}")
        return 2
    torch.set_num_threads(1)
    facts = machine.facts()
    plan, scaling_plan = plans(options)
    contestants, missing = load()
    gc.freeze()  # what was imported is not garbage; looking at it again is nobody's cost
    report.header(console, facts, plan, missing)

    races = []
    for work in WORKS:
        if work.name in wanted:
            races.append((work, race(work, contestants, plan)))
            report.race_table(console, *races[-1])
    report.notes(console, contestants)
    grown = []
    if "scaling" in wanted:
        grown = scaling.run(contestants, scaling_plan, options.quick)
        report.scaling_table(console, grown)
    verdicts = targets.verdicts({work.name: results for work, results in races})
    report.target_table(console, verdicts)

    options.out.mkdir(parents=True, exist_ok=True)
    rest = {"scaling": grown, "verdicts": verdicts}
    store.write_json(options.out / "results.json", facts, plan, races, **rest)
    if races:
        store.draw(options.out / "results.png", facts, races)
    console.print(f"Wrote {options.out / 'results.json'}")
    failed = any(r.problems for _, results in [*races, *grown] for r in results.values())
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
