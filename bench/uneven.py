"""Envs that take their time, one worker's three times as long: who waits for whom?

`python -m bench.uneven`, and a table of `python -m bench`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import partial

from bench import rules
from bench.batch import from_tensordict
from bench.checks import problems
from bench.envs import FramesEnv
from bench.policies import Glance
from bench.works import Work
from swath.collectors import MultiAsyncCollector, MultiSyncCollector
from swath.collectors.base import BaseCollector

SLOWER = 3
CASES = ((0.001, 100), (0.010, 20))  # seconds per step of the fast worker, steps of a rollout
KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


class SlowEnv(FramesEnv):
    """Sleeps at each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__((4,), "float32")
        self._seconds = seconds

    def step(self, action):
        time.sleep(self._seconds)
        return super().step(action)


@dataclass
class Uneven:
    """What came of one step time."""

    step_s: float
    ideal: dict[str, float]
    """Frames per second if nothing but the sleep took time."""
    speeds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    problems: list[str] = field(default_factory=list)

    def speed(self, kind: str) -> float:
        return statistics.median(self.speeds[kind])

    @property
    def gain(self) -> float:
        """async by sync, the median of the rounds."""
        pairs = zip(self.speeds["async"], self.speeds["sync"], strict=True)
        return statistics.median(one / other for one, other in pairs)


def run(rounds: int, slice_s: float) -> list[Uneven]:
    """Each case with both collectors in turn."""
    return [_case(step_s, steps, rounds, slice_s) for step_s, steps in CASES]


def _work(steps: int) -> Work:
    shape, dtype = (4,), "float32"
    policy, rule = partial(Glance, 1), rules.Frames(shape, dtype)
    return Work("uneven", "", 1, steps, partial(FramesEnv, shape, dtype), policy, rule)


def _case(step_s: float, steps: int, rounds: int, slice_s: float) -> Uneven:
    work = _work(steps)
    makers = [partial(SlowEnv, step_s), partial(SlowEnv, SLOWER * step_s)]
    case = Uneven(step_s, {"sync": 2 / SLOWER / step_s, "async": (1 + 1 / SLOWER) / step_s})
    frames = {"sync": 2 * steps, "async": steps}
    collectors = {
        name: kind(makers, work.policy(), frames_per_batch=frames[name], total_frames=-1)
        for name, kind in KINDS.items()
    }
    try:
        for _ in range(rounds):
            for name, collector in collectors.items():
                case.speeds[name].append(_speed(collector, slice_s))
        for name, collector in collectors.items():
            case.problems += [f"{name}: {one}" for one in _problems(work, collector)]
    finally:
        for collector in collectors.values():
            collector.shutdown()
    return case


def _speed(collector: BaseCollector, slice_s: float) -> float:
    if isinstance(collector, MultiAsyncCollector):
        for _ in range(6):  # up to four rollouts were made while the other one was timed
            collector.next()
    frames, start = 0, time.perf_counter()
    while time.perf_counter() - start < slice_s:
        frames += collector.next().numel()
    return frames / (time.perf_counter() - start)


def _problems(work: Work, collector: BaseCollector) -> list[str]:
    """Checks every frame of some batches, worker by worker."""
    streams: dict[int, list] = {0: [], 1: []}
    for _ in range(6):
        data = collector.next()
        if data.ndim == 2:
            parts = enumerate(data.unbind(0))
        else:
            parts = [(int(data["collector", "worker"][0]), data)]
        for worker, part in parts:
            streams[worker].append(from_tensordict(part, work.keys))
    found = [one for kept in streams.values() if kept for one in problems(work, kept)]
    return found + [f"nothing of worker {worker}" for worker, kept in streams.items() if not kept]


def lines(cases: list[Uneven]) -> list[str]:
    """The table as text."""
    found = [f"Two workers, one env each, one {SLOWER}x slower: frames/s (and without overhead)"]
    for case in cases:
        cells = [f"{kind} {case.speed(kind):,.0f} ({case.ideal[kind]:,.0f})" for kind in KINDS]
        found.append(
            f"{1e3 * case.step_s:3.0f} ms: {', '.join(cells)}, async/sync {case.gain:.2f}x"
        )
        found += [f"FAILED: {problem}" for problem in case.problems]
    return found


def main() -> int:
    cases = run(rounds=5, slice_s=2.0)
    print("\n".join(lines(cases)))
    return int(any(case.problems for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
