"""Timing: contestants take turns in one process, round after round."""

from __future__ import annotations

import gc
import resource
import statistics
import time
import traceback
from dataclasses import asdict, dataclass, field

from bench.checks import batches_needed, problems
from bench.contestants import Kinds, placed
from bench.contestants.base import Contestant
from bench.works import Work

LEAST_ROUNDS = {"async": 4}
STRETCH = {"async": 2.0}
"""Turns are longer where they end in the middle of somebody's rollout."""


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    slice_s: float
    """Wall time aimed at for one contestant in one round."""
    whole_episodes: bool = True
    """Check so many batches that an episode is seen from reset to end, not only two."""


@dataclass(frozen=True)
class Sample:
    """One contestant's turn in one round."""

    round: int
    turn: int
    frames: int
    seconds: float
    cpu_seconds: float
    page_faults: int

    @property
    def speed(self) -> float:
        return self.frames / self.seconds


@dataclass
class Result:
    """One contestant on one work. Without samples, ``reason`` says why."""

    samples: list[Sample] = field(default_factory=list)
    episodes: int = 0
    frames_checked: int = 0
    problems: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def speeds(self) -> list[float]:
        return [sample.speed for sample in self.samples]

    @property
    def speed(self) -> float:
        """Median of frames per second over the rounds."""
        return statistics.median(self.speeds)

    def ratios(self, peer: Result) -> list[float]:
        """This contestant's speed by the peer's, round by round; empty where one did not run."""
        if not self.samples or not peer.samples:
            return []
        pairs = zip(self.speeds, peer.speeds, strict=True)
        return [own / other for own, other in pairs]

    def ratio(self, peer: Result) -> float | None:
        """Median of the ratios."""
        ratios = self.ratios(peer)
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> dict:
        summary = {"frames_per_second": round(self.speed, 1)} if self.samples else {}
        return summary | asdict(self)


@dataclass
class _Runner:
    contestant: Contestant
    result: Result
    is_set_up: bool = False
    frames: int = 0


def race(work: Work, kinds: Kinds, plan: Plan) -> dict[str, Result]:
    """Times every contestant that knows the work's placement, then checks what each delivers.

    The first round warms up and sets how many frames fill a slice; it is not counted. Turns
    rotate from round to round, so that nobody always follows the same neighbour.
    """
    contestants = placed(kinds, work.placement)
    results = {name: Result() for name in contestants}
    runners = []
    for name, kind in contestants.items():
        results[name].reason = kind.why_not(work) or ""
        if not results[name].reason:
            runners.append(_Runner(kind(), results[name]))
    try:
        for runner in runners:
            _guard(runner, lambda runner=runner: _warm_up(work, runner, plan))
        for number in range(plan.rounds):
            for turn in range(len(runners)):
                runner = runners[(turn + number) % len(runners)]
                _guard(runner, lambda r=runner, n=number, t=turn: _take_turn(r, n, t))
        for runner in runners:
            _guard(runner, lambda runner=runner: _check(work, runner, plan))
    finally:
        for runner in runners:
            if runner.is_set_up:
                _guard(runner, runner.contestant.close, always=True)
    return results


def _guard(runner: _Runner, act, always: bool = False) -> None:
    """An exception ends this contestant's part in the work, as a problem, and nobody else's."""
    if runner.result.problems and not always:
        return
    try:
        act()
    except Exception as error:
        traceback.print_exc()
        runner.result.samples.clear()
        runner.result.problems.append(f"{type(error).__name__}: {error}")


def _warm_up(work: Work, runner: _Runner, plan: Plan) -> None:
    runner.contestant.setup(work)
    runner.is_set_up = True
    end = time.perf_counter() + plan.slice_s
    seconds: list[float] = []
    # The first batches touch new memory, which would make a slice far too short.
    while time.perf_counter() < end or len(seconds) < 5:
        start = time.perf_counter()
        runner.contestant.collect(work.frames_per_round)
        seconds.append(time.perf_counter() - start)
    slice_s = plan.slice_s * STRETCH.get(work.placement, 1.0)
    rounds = round(slice_s / statistics.median(seconds))
    runner.frames = work.frames_per_round * max(LEAST_ROUNDS.get(work.placement, 1), rounds)
    runner.contestant.rest()


def _take_turn(runner: _Runner, number: int, turn: int) -> None:
    gc.collect()
    runner.contestant.wake()
    faults, cpu, start = _page_faults(), time.process_time(), time.perf_counter()
    summary = runner.contestant.collect(runner.frames)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    spent = (seconds, cpu_seconds, _page_faults() - faults)
    runner.contestant.rest()
    sample = Sample(number, turn, summary.frames, *spent)
    runner.result.samples.append(sample)
    runner.result.episodes += summary.episodes


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _check(work: Work, runner: _Runner, plan: Plan) -> None:
    contestant, result = runner.contestant, runner.result
    contestant.wake()
    streams = contestant.streams(batches_needed(work) if plan.whole_episodes else 2)
    contestant.rest()
    if work.placement == "async" and len(streams) != work.workers:
        result.problems.append(f"batches of {len(streams)} workers, not of {work.workers}")
    asked = work if len(streams) == 1 else work.part()
    for batches in streams:
        result.frames_checked += sum(batch.reward.size for batch in batches)
        result.episodes += sum(int(batch.done.sum()) for batch in batches)
        result.problems += problems(asked, batches, own_policy=contestant.own_policy)
    frames = result.frames_checked + sum(sample.frames for sample in result.samples)
    steps = frames // work.num_envs
    if not result.episodes and steps >= work.rules.time_limit:
        result.problems.append(f"no episode ended in {steps} steps")
