"""``python -m bench``: measure, print, and leave results.json and pictures."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import machine, report, scaling, startup, store, targets, uneven
from bench.contestants import SWATH, Kinds, load
from bench.measure import Plan, race
from bench.works import QUICK, WORKS

RESULTS = Path(__file__).parent / "results"
EXTRAS = {"scaling": "inline", "uneven": "processes", "startup": "processes"}
PICTURES = {"inline": "in one process", "processes": "over processes"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="several minutes (the default)")
    length.add_argument("--quick", action="store_true", help="a smoke test of about two minutes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="works whose name contains NAME, 'scaling', 'uneven', 'startup', or all of a kind: "
        "'inline', 'processes'; may be repeated",
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


def wanted(options: argparse.Namespace) -> list[str]:
    """The names of what is to be measured."""
    groups = {work.name: work.group for work in WORKS} | EXTRAS
    if options.only:
        asked = options.only
        return [n for n, group in groups.items() if any(o in n or o == group for o in asked)]
    if options.quick:
        return [n for n, group in groups.items() if group == "inline" or n in QUICK]
    return list(groups)


def extras(console: Console, kinds: Kinds, names: list[str], options: argparse.Namespace) -> dict:
    """What is no race."""
    found: dict = {"scaling": [], "uneven": [], "startup": {}}
    if "scaling" in names:
        found["scaling"] = scaling.run(kinds, plans(options)[1], options.quick)
        report.scaling_table(console, found["scaling"])
    if "uneven" in names:
        found["uneven"] = uneven.run(2 if options.quick else 5, 1.0 if options.quick else 2.0)
        report.lines(console, uneven.lines(found["uneven"]))
    if "startup" in names:
        found["startup"] = startup.run(1 if options.quick else 3)
        report.lines(console, startup.lines(found["startup"]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where a contestant failed or delivered wrong data; missed targets do not count."""
    options = parse(arguments)
    names = wanted(options)
    console = Console()
    console.width = max(console.width, 110)
    if not names:
        known = ", ".join([*(work.name for work in WORKS), *EXTRAS, *PICTURES])
        console.print(f"--only {options.only}: no such work; there are {known}")
        return 2
    torch.set_num_threads(1)
    facts = machine.facts()
    plan, _ = plans(options)
    kinds, missing = load()
    gc.freeze()  # what was imported is not garbage; looking at it again is nobody's cost
    report.header(console, facts, plan, missing)

    races = []
    for work in WORKS:
        if work.name in names:
            races.append((work, race(work, kinds, plan)))
            report.race_table(console, *races[-1])
    report.notes(console, kinds, races)
    rest = extras(console, kinds, names, options)
    start_seconds = [one["construct"] for one in rest["startup"].get(SWATH, [])]
    verdicts = targets.verdicts({work.name: found for work, found in races}, start_seconds)
    report.target_table(console, verdicts)

    options.out.mkdir(parents=True, exist_ok=True)
    store.write_json(options.out / "results.json", facts, plan, races, verdicts=verdicts, **rest)
    draw(options.out, facts, races)
    console.print(f"Wrote {options.out / 'results.json'}")
    failed = any(r.problems for _, found in [*races, *rest["scaling"]] for r in found.values())
    return int(failed or any(case.problems for case in rest["uneven"]))


def draw(folder: Path, facts: dict, races: list) -> None:
    """One picture for each kind of work."""
    for group, where in PICTURES.items():
        shown = [(work, found) for work, found in races if work.group == group]
        if shown:
            name = "results.png" if group == "inline" else f"results-{group}.png"
            store.draw(folder / name, facts, shown, where)


if __name__ == "__main__":
    raise SystemExit(main())
