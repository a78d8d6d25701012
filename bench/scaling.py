"""Does the cost of a frame grow with anything but the work? swath beside the hand loop."""

from __future__ import annotations

from dataclasses import dataclass

from bench.contestants import HAND, SWATH, Kinds
from bench.measure import Plan, Result, race
from bench.works import Work, framed

WHO = (SWATH, HAND)


@dataclass(frozen=True)
class Point:
    """One size of one thing that grows."""

    series: str
    value: int
    work: Work


def _floats(num_envs: int, steps: int, floats: int) -> Work:
    name = f"scaling {num_envs} envs, {steps} steps, {floats} floats"
    return framed(name, name, num_envs, steps, (floats,), "float32")


def points(quick: bool) -> list[Point]:
    """Envs, frames per batch and observation size, each grown alone."""
    series = {
        "envs": {n: _floats(n, max(1000 // n, 16), 4) for n in (1, 4, 16, 64, 256)},
        "frames per batch (8 envs)": {
            frames: _floats(8, -(-frames // 8), 4) for frames in (100, 1_000, 10_000, 100_000)
        },
        "floats per observation (8 envs)": {
            floats: _floats(8, 32, floats) for floats in (4, 64, 1_024, 16_384, 65_536)
        },
    }
    found = []
    for title, works in series.items():
        values = list(works)[: 2 if quick else None]
        found += [Point(title, value, works[value]) for value in values]
    return found


def run(kinds: Kinds, plan: Plan, quick: bool) -> list[tuple[Point, dict[str, Result]]]:
    """Races swath and the hand loop at each point."""
    racers = [kind for kind in kinds if kind.name in WHO]
    return [(point, race(point.work, racers, plan)) for point in points(quick)]
