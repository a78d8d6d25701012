"""What becomes of a worker that failed: events in, decisions out, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swath.errors import SwathError, WorkerError
from swath.links.parcels import shortened, unpack_error
from swath.workers.messages import Died, Failed

__all__ = ["Supervisor"]


@dataclass
class Supervisor:
    """Restarts workers as often as the user allows, and says in words how they ended."""

    restart: bool
    max_restarts: int
    name: Callable[[int], str | None] = lambda worker: None
    """Says in words where a worker runs, if that is worth telling."""
    restarts: int = 0
    lost_rollouts: int = 0
    lost_trajectories: list[int] = field(default_factory=list)

    def forgives(self) -> bool:
        """Return True if another restart is allowed, and count it."""
        if not self.restart or self.restarts >= self.max_restarts:
            return False
        self.restarts += 1
        return True

    def checked(self, answers: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return answers that are no failures; raise the first that is one."""
        for number, answer in answers.items():
            if isinstance(answer, (Failed, Died)):
                raise self.error(number, answer)
        return answers

    def answered(self, answers: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, Died]]:
        """Return the answers of those who live, and how the others have died; raise a failure.

        A failure is the answer to what was asked, and no restart would change it. A death is no
        answer: it is to be forgiven or not as at any other time.
        """
        dead = {number: one for number, one in answers.items() if isinstance(one, Died)}
        given = {number: one for number, one in answers.items() if number not in dead}
        self.checked(given)
        return given, dead

    def error(self, worker: int, event: Failed | Died) -> BaseException:
        """Return what to raise for a failure that is not forgiven."""
        if isinstance(event, Failed):
            error, who = _located(unpack_error(event.error), worker), self.name(worker)
            if who is not None:
                error.args = (f"{error} ({who})",)
            return error
        how = event.how
        if event.late is not None:
            how = f"gave no answer for {event.late:g} s (worker_timeout) and was killed."
        made = f" {self.restarts} restarts were made before." if self.restarts else ""
        return WorkerError(f"worker {worker} ({event.who}) {how}{made}", worker=worker)


def _located(error: BaseException, worker: int) -> BaseException:
    """Return an exception that says which worker it comes from; its own type is the cause."""
    if getattr(error, "worker", None) is not None:
        return error
    if isinstance(error, SwathError):
        error.args = (f"{error} [worker {worker}]",)
        error.worker = worker  # type: ignore[attr-defined]
        return error
    said = f"{type(error).__name__}: {shortened(str(error))}; see the cause above"
    told = WorkerError(said, worker=worker)
    told.__cause__ = error
    return told
