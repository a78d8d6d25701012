"""``python -m bench.chart``: the chart and the tables of speed in README and docs, from JSON.

``python -m bench.chart`` draws them again from the figures in ``docs/figures/speed.json``;
``python -m bench.chart bench/results/results.json`` first takes over the figures of a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
FIGURES = Path("docs/figures/speed.json")
PEERS = ("TorchRL", "hand loop", "hand loops")
"""Those whose ratios are kept; a hand loop in each of two processes is called 'hand loops'."""

CHART = {
    "cartpole-8": "8 CartPoles, one process",
    "pixels-8": "8 pixel envs (4x84x84), one process",
    "cartpole-parallel-8": "8 CartPoles in other processes, policy in yours",
    "cartpole-sync-2x8": "2 workers with 8 CartPoles each",
}
LABELS = {
    "hand loop": "hand-written loop",
    "hand loops": "2 hand-written loops",
    "SyncVectorEnv": "Gymnasium (sync)",
    "AsyncVectorEnv": "Gymnasium (async)",
}
ROWS = {
    "cartpole-1": "1 CartPole, one process",
    "cartpole-8": "8 CartPoles, one process",
    "pixels-8": "8 pixel envs, one process",
    "cartpole-parallel-8": "8 CartPoles, `ParallelEnv`",
    "pixels-parallel-8": "8 pixel envs, `ParallelEnv`",
    "cartpole-sync-2x8": "2 x 8 CartPoles, `MultiSyncCollector`",
    "cartpole-async-2x8": "2 x 8 CartPoles, `MultiAsyncCollector`",
}
"""The table of the README: seven works, and what `other` in the figures adds."""


def taken_over(results: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what `make bench` wrote to medians; what other benches measured stays as it was."""
    works = {name: _work(work) for name, work in results["works"].items()}
    return {
        "machine": results["machine"],
        "rounds": results["plan"]["rounds"],
        "works": {**before.get("works", {}), **works},
        "other": before.get("other", []),
    }


def _work(work: Mapping[str, Any]) -> dict[str, Any]:
    ran = {name: one for name, one in work["contestants"].items() if one["samples"]}
    speeds = {name: round(one["frames_per_second"]) for name, one in ran.items()}
    ratios = {peer: _ratio(ran["swath"], ran[peer]) for peer in PEERS if peer in ran}
    return {"title": work["title"], "placement": work["placement"], "speeds": speeds} | {
        "ratios": ratios
    }


def _ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The median of the ratios within a round, as everywhere in the bench."""
    pairs = zip(ours["samples"], theirs["samples"], strict=True)
    speeds = [[one["frames"] / one["seconds"] for one in pair] for pair in pairs]
    return round(statistics.median(own / other for own, other in speeds), 2)


@dataclass(frozen=True)
class Theme:
    """Colours of one chart."""

    text: str
    faint: str
    ours: str
    others: str


LIGHT = Theme(text="#1f2328", faint="#59636e", ours="#0b7a5e", others="#b6c0ca")
DARK = Theme(text="#e6edf3", faint="#9198a1", ours="#3ecf9c", others="#56606b")
WIDTH, LEFT, RIGHT, BAR, STEP = 560, 146, 62, 15, 21


def drawn(figures: Mapping[str, Any], theme: Theme) -> str:
    """The chart as SVG: a group of bars for each work, ours in colour."""
    works = [(CHART[name], figures["works"][name]) for name in CHART if name in figures["works"]]
    longest = max(max(work["speeds"].values()) for _, work in works)
    parts, top = [], 34
    for title, work in works:
        parts.append(_text(0, top + 12, title, theme.text, "font-weight='600'"))
        top += 22
        for name, speed in _sorted(work["speeds"]):
            width = max(2, (WIDTH - LEFT - RIGHT) * speed / longest)
            parts.extend(_bar(top, name, speed, width, theme))
            top += STEP
        top += 14
    title = _text(0, 16, "Frames per second, higher is better", theme.faint)
    where = _text(0, top + 6, _machine(figures), theme.faint, "font-size='11'")
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top + 16}' "
        f"width='{WIDTH}' height='{top + 16}' role='img' font-size='13' "
        "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'>"
    )
    name = "<title>Frames per second of swath and of other libraries</title>"
    return "\n".join([head, name, title, *parts, where, "</svg>"]) + "\n"


def _sorted(speeds: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """swath first, then the others, the fastest first."""
    others = [name for name in speeds if not name.startswith("swath")]
    names = ["swath", *sorted(others, key=lambda name: -speeds[name])]
    return ((name, speeds[name]) for name in names)


def _bar(top: int, name: str, speed: float, width: float, theme: Theme) -> list[str]:
    ours = name == "swath"
    colour = theme.ours if ours else theme.others
    weight = "font-weight='600'" if ours else ""
    label = LABELS.get(name, name)
    return [
        _text(LEFT - 8, top + 12, label, theme.text, f"text-anchor='end' {weight}"),
        f"<rect x='{LEFT}' y='{top}' width='{width:.1f}' height='{BAR}' rx='2' fill='{colour}'/>",
        _text(LEFT + width + 6, top + 12, f"{speed:,.0f}", theme.text, weight),
    ]


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    gap = " " if more.strip() else ""
    return f"<text x='{x:.0f}' y='{y:.0f}' fill='{colour}'{gap}{more.strip()}>{escape(text)}</text>"


def _machine(figures: Mapping[str, Any]) -> str:
    machine = figures["machine"]
    versions = [f"{name} {machine[name]}" for name in ("torch", "torchrl") if name in machine]
    return ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *versions])


def short_table(figures: Mapping[str, Any]) -> str:
    """The eight rows of the README."""
    lines = [
        "| frames per second | swath | TorchRL | speed-up over TorchRL | over a hand-written loop |"
    ]
    lines.append("|---|---|---|---|---|")
    rows = [(ROWS[name], figures["works"][name]) for name in ROWS if name in figures["works"]]
    rows += [(work["title"], work) for work in figures["other"]]
    for title, work in rows:
        lines.append(_row(title, work))
    return "\n".join(lines)


def _row(title: str, work: Mapping[str, Any]) -> str:
    speeds, ratios = work["speeds"], work["ratios"]
    hand = ratios.get("hand loop", ratios.get("hand loops"))
    by_hand = f"{hand:.2f}x" if hand is not None else ""
    return (
        f"| {title} | {_number(speeds['swath'])} | {_number(speeds['TorchRL'])} | "
        f"**{_times(ratios['TorchRL'])}** | {by_hand} |"
    )


def full_tables(figures: Mapping[str, Any]) -> str:
    """All works with all contestants: one table in one process, one over processes."""
    blocks = []
    for title, inline in (("In one process", True), ("Over processes", False)):
        works = [w for w in figures["works"].values() if (w["placement"] == "inline") is inline]
        names = list(dict.fromkeys(name for work in works for name in work["speeds"]))
        columns = [*names, "speed-up over TorchRL", "over a hand-written loop"]
        lines = [f"### {title}", "", f"| work | {' | '.join(columns)} |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        lines += [_full_row(work, names) for work in works]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _full_row(work: Mapping[str, Any], names: Sequence[str]) -> str:
    speeds, ratios = work["speeds"], work["ratios"]
    cells = [f"{speeds[name]:,.0f}" if name in speeds else "" for name in names]
    hand = ratios.get("hand loop", ratios.get("hand loops"))
    cells.append(_times(ratios["TorchRL"]) if "TorchRL" in ratios else "")
    cells.append(f"{hand:.2f}x" if hand is not None else "")
    return f"| {work['title']} | {' | '.join(cells)} |"


def _number(speed: float) -> str:
    return f"{speed / 1e6:.3g} M" if speed >= 1e6 else f"{speed:,.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def between(text: str, name: str, block: str) -> str:
    """Replace what stands between the two comments that are named."""
    start, end = f"<!-- {name}: written by python -m bench.chart -->", f"<!-- end of {name} -->"
    head, found, rest = text.partition(start)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"the lines {start!r} and {end!r} are missing")
    return f"{head}{start}\n\n{block}\n\n{end}{tail}"


def write(figures: Mapping[str, Any], root: Path) -> list[Path]:
    """Write the figures, both charts and the tables; return the files."""
    folder = root / FIGURES.parent
    files = {
        root / FIGURES: json.dumps(figures, indent=1) + "\n",
        folder / "speed-light.svg": drawn(figures, LIGHT),
        folder / "speed-dark.svg": drawn(figures, DARK),
    }
    for page, name, block in (
        (root / "README.md", "speed", short_table(figures)),
        (root / "docs/benchmarks.md", "tables", full_tables(figures)),
    ):
        files[page] = between(page.read_text(), name, block)
    for path, text in files.items():
        path.write_text(text)
    return list(files)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.chart", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="results.json of a run to take over")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    options = parser.parse_args(arguments)
    figures = json.loads((options.root / FIGURES).read_text())
    if options.results is not None:
        figures = taken_over(json.loads(options.results.read_text()), figures)
    for path in write(figures, options.root):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
