"""Many random cases: run them for some time, group what goes wrong, and make it smaller."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cases_kit import KNOWN, Case, without_one
from fuzz_kit import Hangs, run, sentence_of

__all__ = ["SECONDS", "Findings", "cause_of", "explore", "smaller"]

SECONDS = float(os.environ.get("SWATH_FUZZ_SECONDS", "0"))
"""For how long each random tester goes on; 0 for the few seconds of the normal suite."""
_Judge = Callable[[Case, Counter[str]], Any]


@dataclass
class Findings:
    """What a random tester found."""

    seen: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    skipped: int = 0
    seconds: float = 0.0
    faults: dict[str, list[tuple[Case, str]]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return each kind of fault, with the smallest case that shows it."""
        rate = self.cases / max(self.seconds, 1e-9)
        lines = [
            f"{self.cases} cases ({rate:.1f} per second), {self.seen['frames']} frames, "
            f"{self.skipped} left out as known, {len(self.faults)} kinds of faults"
        ]
        refused = [(n, said) for said, n in self.seen.items() if said.startswith("refused")]
        lines += [f"{n} {said}" for n, said in sorted(refused, reverse=True)]
        for cause, cases in self.faults.items():
            numbers = " ".join(str(case.number) for case, _ in cases[:10])
            lines += [f"\n{cause}\n  {len(cases)} cases; SWATH_FUZZ_SEED={numbers}", cases[0][1]]
        return "\n".join(lines)


def cause_of(error: BaseException) -> str:
    """Return what kind of fault this is."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    inner = "" if root is error else f" <- {type(root).__name__}: {sentence_of(root)}"
    return f"{type(error).__name__}: {sentence_of(error)}{inner}"


def failure_of(case: Case, seen: Counter[str], judge: _Judge = run) -> BaseException | None:
    """Run a case and return what went wrong."""
    try:
        judge(case, seen)
    except (Exception, Hangs) as error:
        return error
    return None


def smaller(case: Case, cause: str, seconds: float, judge: _Judge = run) -> Case:
    """Leave out operations and options one by one while the same fault shows."""
    until = time.monotonic() + seconds
    shrinks = True
    while shrinks:
        shrinks = False
        for one in without_one(case):
            if time.monotonic() > until:
                return case
            failure = failure_of(one, Counter(), judge)
            if failure is not None and cause_of(failure)[:60] == cause[:60]:
                case, shrinks = one, True
                break
    return case


def explore(
    draw: Callable[[int], Case],
    seconds: float,
    judge: _Judge = run,
) -> Findings:
    """Run random cases for some time, or the one that SWATH_FUZZ_SEED names."""
    found, started = Findings(), time.monotonic()
    only = os.environ.get("SWATH_FUZZ_SEED")
    # The normal suite runs the same cases every time, a long run others than the last one.
    number = int(only) if only else int(time.time()) * 1000 if SECONDS else 0
    while True:
        case = draw(number)
        number += 1
        if not only and any(shows(case) for shows in KNOWN.values()):
            found.skipped += 1
        else:
            found.cases += 1
            failure = failure_of(case, found.seen, judge)
            if failure is not None:
                _note(found, case, failure, judge)
        found.seconds = time.monotonic() - started
        if only or found.seconds > seconds:
            return found


def _note(found: Findings, case: Case, failure: BaseException, judge: _Judge) -> None:
    cause = cause_of(failure)
    if cause not in found.faults:
        small = smaller(case, cause, min(20.0, SECONDS / 10), judge)
        found.faults[cause] = [(case, f"{str(failure)[:1000]}\n{small}")]
    else:
        found.faults[cause].append((case, ""))
