"""What a contestant is: a way to collect a work, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from bench.batch import Batch
from bench.works import Work


@dataclass
class Summary:
    """What a user would count while batches come in."""

    frames: int = 0
    episodes: int = 0
    reward: float = 0.0


class Contestant(ABC):
    """One way to collect. ``rollout`` gives a batch in the contestant's own form."""

    name: ClassVar[str]
    note: ClassVar[str] = ""
    own_policy: ClassVar[bool] = False
    placements: ClassVar[frozenset[str]] = frozenset({"inline"})

    @classmethod
    def why_not(cls, work: Work) -> str | None:
        """Why this contestant cannot do a work of a placement that it knows, or None."""
        return None

    @abstractmethod
    def setup(self, work: Work) -> None:
        """Makes envs and policy, ready to collect."""

    @abstractmethod
    def rollout(self) -> Any:
        """The next batch, which stays as it is for as long as the caller holds it."""

    @abstractmethod
    def count(self, data: Any) -> tuple[int, int, float]:
        """Frames, episodes ended and summed reward of a batch."""

    @abstractmethod
    def canonical(self, data: Any) -> Batch:
        """The batch in the form that the checks read."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the envs."""

    def wake(self) -> None:  # noqa: B027
        """Before a turn: gets going, and past what was collected while others were timed."""

    def rest(self) -> None:  # noqa: B027
        """After a turn: leaves the cores to the others."""

    def collect(self, frames: int) -> Summary:
        """At least so many frames, in whole batches, each held until the next has come."""
        summary = Summary()
        while summary.frames < frames:
            data = self.rollout()
            got, episodes, reward = self.count(data)
            summary.frames += got
            summary.episodes += episodes
            summary.reward += reward
        return summary

    def batches(self, count: int) -> list[Batch]:
        """Consecutive batches, all kept until the last has come."""
        kept = [self.rollout() for _ in range(count)]
        return [self.canonical(data) for data in kept]

    def streams(self, count: int) -> list[list[Batch]]:
        """At least so many batches, those in one list following one another."""
        return [self.batches(count)]
