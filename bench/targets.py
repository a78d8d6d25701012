"""The speeds that swath is meant to reach, as ratios in one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.contestants import HAND, HANDS, KEPT, SWATH, TORCHRL
from bench.measure import Result


@dataclass(frozen=True)
class Target:
    """``swath / peer`` on a work is to be at least so much."""

    title: str
    work: str
    peer: str
    at_least: float
    ours: str = SWATH

    @property
    def wanted(self) -> str:
        return f">= {self.at_least:g}x"

    def met_by(self, ratio: float) -> bool:
        return ratio >= self.at_least


@dataclass(frozen=True)
class Limit:
    """A time that is not to be exceeded."""

    title: str
    at_most: float
    peer: str = "(seconds)"

    @property
    def wanted(self) -> str:
        return f"<= {self.at_most:g} s"

    def met_by(self, seconds: float) -> bool:
        return seconds <= self.at_most


TARGETS = (
    Target("Collector, 1 env", "cartpole-1", TORCHRL, 9.0),
    Target("Collector, 1 env", "cartpole-1", HAND, 0.90),
    Target("Collector, 8 envs in process", "cartpole-8", TORCHRL, 16.0),
    Target("Collector, 8 envs in process", "cartpole-8", HAND, 0.95),
    Target("Collector, 8 pixel envs", "pixels-8", TORCHRL, 35.0),
    Target("Collector, 8 pixel envs", "pixels-8", HAND, 0.90),
    Target("ParallelEnv, 8 envs", "cartpole-parallel-8", TORCHRL, 30.0),
    Target("ParallelEnv, a core kept", "cartpole-parallel-8", TORCHRL, 30.0, KEPT),
    Target("MultiSync, 2 workers x 8 envs", "cartpole-sync-2x8", TORCHRL, 15.0),
    Target("MultiSync, 2 workers x 8 envs", "cartpole-sync-2x8", HANDS, 0.85),
    Target("MultiAsync, 2 workers x 8 envs", "cartpole-async-2x8", TORCHRL, 15.0),
    Target("MultiAsync, 2 workers x 8 envs", "cartpole-async-2x8", HANDS, 0.90),
)
START = Limit("construct 8 process workers", 3.0)


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured round by round; nothing where it was not measured."""

    target: Target | Limit
    ratios: list[float]
    """Ratios, or the seconds of a limit."""

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def middle_half(self) -> tuple[float, float] | None:
        """First and third quartile: how sure the median is."""
        if len(self.ratios) < 4:
            return None
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return low, high

    @property
    def word(self) -> str:
        if self.ratio is None:
            return "not measured"
        return "met" if self.target.met_by(self.ratio) else "NOT met"


def verdicts(
    results: Mapping[str, Mapping[str, Result]], start_seconds: list[float]
) -> list[Verdict]:
    """Each target against the results of a run."""
    found = []
    for target in TARGETS:
        work = results.get(target.work, {})
        pair = work.get(target.ours), work.get(target.peer)
        found.append(Verdict(target, pair[0].ratios(pair[1]) if all(pair) else []))
    return [*found, Verdict(START, start_seconds)]
