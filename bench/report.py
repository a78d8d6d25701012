"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.contestants import HAND, HANDS, SWATH, TORCHRL, Kinds
from bench.measure import Plan, Result
from bench.scaling import WHO, Point
from bench.targets import Limit, Verdict
from bench.works import Work

WORK_RULES = (
    "Same envs (gymnasium.make(id, disable_env_checker=True), or made directly where the bench "
    "has its own), same policy module, torch with 1 thread."
)


def times(ratio: float | None) -> str:
    """A ratio, with as many digits as it deserves."""
    if ratio is None:
        return "-"
    return f"{ratio:.1f}x" if ratio >= 3 else f"{ratio:.2f}x"


def header(console: Console, machine: Mapping, plan: Plan, missing: Mapping[str, str]) -> None:
    skipped = ("time", "torch_threads")
    console.print(
        ", ".join(f"{key} {value}" for key, value in machine.items() if key not in skipped)
    )
    console.print(WORK_RULES)
    console.print(
        f"{plan.rounds} rounds of about {plan.slice_s:g} s for each, in turn, after a warm-up; "
        "medians; ratios are medians of the ratios within a round."
    )
    for name, why in missing.items():
        console.print(f"[yellow]{name}: not available ({why})[/]")


def race_table(console: Console, work: Work, results: Mapping[str, Result]) -> None:
    title = f"{work.title} ({work.name}), {work.frames_per_batch:,} frames per batch"
    table = Table(title=title, title_justify="left")
    table.add_column("", min_width=18)
    hand = HANDS if work.workers else HAND
    for column in ("frames/s", "min .. max", f"vs {TORCHRL}", f"vs {hand}", "checked"):
        table.add_column(column, justify="right")
    nobody = Result()
    for name, result in results.items():
        peers = [results.get(peer, nobody) for peer in (TORCHRL, hand)]
        table.add_row(name, *_cells(result, peers))
    console.print(table)
    for name, result in results.items():
        if result.reason:
            console.print(f"{name}: left out, {result.reason}")
        for problem in result.problems:
            console.print(f"[red]{name} FAILED: {problem}[/]")


def _cells(result: Result, peers: Sequence[Result]) -> list[str]:
    if not result.samples:
        return ["-", "-", "-", "-", "FAILED" if result.problems else "-"]
    checked = "FAILED" if result.problems else f"{result.frames_checked:,} frames"
    return [
        f"{result.speed:,.0f}",
        f"{min(result.speeds):,.0f} .. {max(result.speeds):,.0f}",
        *[times(result.ratio(peer)) for peer in peers],
        checked,
    ]


def scaling_table(console: Console, rows: Sequence[tuple[Point, Mapping[str, Result]]]) -> None:
    table = Table(title="Cost of a frame as the work grows, in us", title_justify="left")
    table.add_column("what grows")
    for column in ("to", *WHO, f"{SWATH} by {HAND}"):
        table.add_column(column, justify="right")
    previous = ""
    for point, results in rows:
        if previous and point.series != previous:
            table.add_section()
        costs = [_cost(results.get(name)) for name in WHO]
        label = point.series if point.series != previous else ""
        table.add_row(label, f"{point.value:,}", *costs, cost_ratio(results))
        previous = point.series
    console.print(table)
    for point, results in rows:
        for name, result in results.items():
            for problem in result.problems:
                console.print(f"[red]{name}, {point.work.name}, FAILED: {problem}[/]")


def _cost(result: Result | None) -> str:
    return f"{1e6 / result.speed:.2f}" if result and result.samples else "-"


def cost_ratio(results: Mapping[str, Result]) -> str:
    """swath's cost by the hand loop's: the speeds, the other way round."""
    pair = [results.get(name) for name in (HAND, SWATH)]
    return times(pair[0].ratio(pair[1]) if all(pair) else None)


def notes(console: Console, kinds: Kinds, races: Sequence[tuple[Work, Mapping]]) -> None:
    """Says of everyone who took part what it is."""
    placements = {work.placement for work, _ in races}
    for kind in kinds:
        if placements & kind.placements:
            console.print(f"{kind.name} ({', '.join(sorted(kind.placements))}): {kind.note}.")


def lines(console: Console, found: Sequence[str]) -> None:
    console.print()
    for line in found:
        console.print(f"[red]{line}[/]" if line.startswith("FAILED") else line)


def _amount(verdict: Verdict, number: float | None) -> str:
    if isinstance(verdict.target, Limit):
        return "-" if number is None else f"{number:.2f} s"
    return times(number)


def target_table(console: Console, verdicts: Sequence[Verdict]) -> None:
    table = Table(title="Targets", title_justify="left")
    for column in ("work", "against", "wanted", "measured", "middle half of rounds", ""):
        table.add_column(column)
    for verdict in verdicts:
        target = verdict.target
        colour = {"met": "green", "NOT met": "red"}.get(verdict.word, "yellow")
        word = f"[{colour}]{verdict.word}[/]"
        spread = " .. ".join(_amount(verdict, one) for one in verdict.middle_half or [])
        measured = _amount(verdict, verdict.ratio)
        table.add_row(target.title, target.peer, target.wanted, measured, spread, word)
    console.print(table)
