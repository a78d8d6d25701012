"""What a run leaves behind: every raw sample as JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Plan, Result
from bench.scaling import Point
from bench.targets import Verdict
from bench.works import Work

COLOURS = {
    "swath": "#1b7f5c",
    "TorchRL": "#c8553d",
    "hand loop": "#3d5a80",
    "hand loops": "#3d5a80",
    "SyncVectorEnv": "#98c1d9",
    "AsyncVectorEnv": "#98c1d9",
    "Stable-Baselines3": "#e0a458",
}
Races = Sequence[tuple[Work, Mapping[str, Result]]]
Scaling = Sequence[tuple[Point, Mapping[str, Result]]]


def write_json(path: Path, machine: Mapping, plan: Plan, races: Races, **rest: Any) -> None:
    """Everything measured, so that other statistics can be computed later."""
    scaling: Scaling = rest["scaling"]
    verdicts: Sequence[Verdict] = rest["verdicts"]
    content = {
        "machine": dict(machine),
        "plan": asdict(plan),
        "works": {
            work.name: {
                "title": work.title,
                "placement": work.placement,
                "workers": work.workers,
                "envs": work.num_envs,
                "frames_per_batch": work.frames_per_batch,
                "contestants": _plain(results),
            }
            for work, results in races
        },
        "scaling": [
            {"series": point.series, "value": point.value, "contestants": _plain(results)}
            for point, results in scaling
        ],
        "uneven": [asdict(case) for case in rest["uneven"]],
        "startup": rest["startup"],
        "targets": [
            {
                **asdict(verdict.target),
                "ratio": verdict.ratio,
                "ratios": verdict.ratios,
                "verdict": verdict.word,
            }
            for verdict in verdicts
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _plain(results: Mapping[str, Result]) -> dict:
    return {name: result.as_json() for name, result in results.items()}


def draw(path: Path, machine: Mapping, races: Races, where: str) -> None:
    """Bars of frames per second for each work, one colour per contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for _, results in races for name in results))
    figure, axes = plt.subplots(figsize=(max(7.0, 2.4 * len(races)), 5.2), layout="constrained")
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        at, speeds, errors = [], [], ([], [])
        for place, (_, results) in enumerate(races):
            result = results.get(name)
            if result and result.samples:
                at.append(place + (index - (len(names) - 1) / 2) * width)
                speeds.append(result.speed)
                errors[0].append(result.speed - min(result.speeds))
                errors[1].append(max(result.speeds) - result.speed)
        bars = axes.bar(
            at, speeds, width * 0.92, label=name, color=COLOURS.get(name), yerr=errors,
            error_kw={"lw": 0.8, "ecolor": "#00000080"},
        )  # fmt: skip
        axes.bar_label(bars, [_short(speed) for speed in speeds], fontsize=8, padding=2)
    axes.set_yscale("log")
    axes.set_xlim(-0.55, len(races) - 0.45)
    axes.set_ylabel("frames per second (log scale)")
    axes.set_xticks(range(len(races)), [_label(work) for work, _ in races])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(
        f"Collecting {where}, {machine['cpu']}, torch {machine['torch']}\n"
        "median of the rounds; whiskers: slowest and fastest round",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _label(work: Work) -> str:
    return work.title.replace(", ", "\n")


def _short(speed: float) -> str:
    return f"{speed / 1000:.0f}k" if speed >= 10_000 else f"{speed / 1000:.1f}k"
