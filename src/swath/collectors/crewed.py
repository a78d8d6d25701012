"""Collectors with workers: how these are started, replaced when they fail, added and removed.

```
              launch             Built            Ready
   number ---------> starting ---------> Begin ---------> up: takes orders
                        ^                                  |  Failed, Died, or no place for it
                        '----------------------------------'  if the supervisor forgives
```

Starting a worker never blocks the others. Its start-up messages arrive in the same queue as
rollouts, and it gets orders after `Ready`. Each start has random streams and trajectory ids that
were never used before.
"""

from __future__ import annotations

import abc
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from swath.collectors.base import BaseCollector
from swath.collectors.jobs import check_equal, jobs_of, sources_of, split
from swath.collectors.options import Options, Scope
from swath.collectors.single import plan_of
from swath.collectors.storing import Storing
from swath.errors import UsageError
from swath.links import in_words
from swath.memory import Layout
from swath.memory.weights import WeightBlock
from swath.observe import Episodes, Shares
from swath.rollout import Plan, Transfer
from swath.system import check_can_start_workers
from swath.workers.crew import Crew
from swath.workers.messages import Begin, Built, Died, Failed, Ready, Rolled
from swath.workers.place import Place
from swath.workers.supervisor import Supervisor

__all__ = ["CrewedCollector", "Row"]

_IDS_PER_WORKER = 1 << 40


@dataclass
class Row:
    """What one worker has done."""

    frames: int = 0
    version: int = 0
    """Of its last rollout."""
    restarts: int = 0
    loaded: int = 0
    """Of the frames, those of a state that was loaded."""


class CrewedCollector(BaseCollector):
    """Workers that come, fail, are replaced and go; subclasses say what they do."""

    _scope: Scope = "workers"
    _without: Mapping[str, str] = {}
    """Options that make no sense here, and why."""
    _refreshes = False
    """New weights are taken between any two forward passes."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        check_can_start_workers()
        parsed = Options.parse(type(self), options, self._scope, self._without)
        self._policy, self._version, self._create_env_fn = policy, 0, create_env_fn
        sources = sources_of(create_env_fn, parsed.num_workers)
        sources = [one for one in sources for _ in range(parsed.num_workers_per_collector)]
        jobs = jobs_of(sources, policy, parsed, self._refreshes)
        super().__init__(parsed)
        self._numbers, self._starting = list(range(len(jobs))), set[int]()
        self._first_workers = len(jobs)
        restarts = parsed.on_worker_failure == "restart"
        self._supervisor = Supervisor(restarts, parsed.max_restarts, self._name)
        self._incarnations = itertools.count(len(jobs))
        self._held: deque[tuple[Any, int]] = deque()
        self._broken_rollouts: deque[tuple[TensorDict, int]] = deque()
        self._open_ids: dict[int, Sequence[int]] = {}
        self._envs: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        self._next_env, self._seed = 0, parsed.seed
        self._plans: dict[int, Plan] = {}
        self._rows = {number: Row() for number in self._numbers}
        self._episodes, self._shares = Episodes(0), Shares()
        self._unplaced: dict[int, Died] = {}  # those who look for a place, and why they have none
        with in_words("no workers can be started"):
            self._crew = Crew(jobs, parsed.worker_timeout, self._place(len(jobs)))
        self._shield = self._crew.shield
        self._slabs = self._crew.place.slabs(self._crew)
        self._storing = Storing(parsed, self._output.finishing, self._crew, self._supervisor)
        self._ender = weakref.finalize(self, self._crew.close, 0.0)
        try:
            self._start()
        except BaseException:
            self._ender.detach()
            self._crew.close(0.0)
            raise

    # -- construction ---------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Number of workers, including those that are being started."""
        return len(self._numbers)

    def _start(self) -> None:
        numbers = self._numbers
        self._crew.launch(numbers)
        built = self._supervisor.checked(self._crew.answers(numbers))
        for number in numbers:
            self._envs[number] = built[number].num_envs
            self._firsts[number] = self._streams(number)
        self._plans = self._plan()
        plans = {number: Begin(self._plans[number]) for number in numbers}
        ready = self._supervisor.checked(self._crew.call(plans))
        self._forms: Ready = ready[0]
        for number in numbers:
            check_equal(self._forms, ready[number], number)
        self._told = {number: ready[number] for number in numbers}
        self._check_publishing()
        spec = self._forms.weights
        if len({ready[number].weights.gpu for number in numbers}) > 1:
            spec = replace(spec, gpu=None)  # no one GPU sees them all
        self._spec, self._block = spec, self._crew.place.weights(self._crew, spec)
        for number in numbers:
            self._block.begin(number)

    def _check_publishing(self) -> None:
        """Refuse to publish at each batch what only the workers have."""
        options = self.options
        automatic = options.publishes_every > 0
        # What factories make is known only now: that may be functions, which have no weights.
        if automatic and self._policy is None and self._forms.weights.shapes:
            name = "update_at_each_batch"
            name = name if options.update_at_each_batch else "max_weight_update_interval"
            raise UsageError(
                f"{name} and policy_factory do not go together: the workers make their policies, "
                f"so there is nothing here to publish. Leave {name} out and pass the weights "
                "yourself, update_policy_weights_(policy), or give policy instead."
            )

    def _streams(self, worker: int) -> int:
        """Return the first of as many random streams as a worker has envs; nobody had them yet."""
        first, self._next_env = self._next_env, self._next_env + self._envs[worker]
        return first

    def _plan(self) -> dict[int, Plan]:
        """Return what each worker is to do."""
        firsts, envs = list(self._firsts.values()), list(self._envs.values())
        quotas = split(self.options.init_random_frames, firsts, envs)
        return {
            number: replace(
                plan_of(self.options, steps, number),
                init_random_frames=quota if self.options.init_random_frames else None,
                first_env=self._firsts[number],
                first_traj_id=number * _IDS_PER_WORKER,
                worker=number,
                marks_worker=self._refreshes,
                masked=self.options.preemptive_threshold is not None,
            )
            for number, steps, quota in zip(self._numbers, self._steps(), quotas, strict=True)
        }

    def _transfer(self, layout: Layout, worker: int) -> Transfer | None:
        """Return what brings the rollouts of a worker to where batches are stored."""
        storing = self.options.devices(worker).storing
        if storing is None or storing.type == "cpu":
            return None
        return Transfer(layout, torch.device("cpu"), torch.empty(0, device=storing).device)

    def describe(self) -> str:
        """Return the device plan: what lives where in each worker, what is copied when."""
        parts, spec = [], self._spec
        for text in dict.fromkeys(ready.devices for ready in self._told.values()):
            who = [str(number) for number, one in self._told.items() if one.devices == text]
            parts.append(f"workers {', '.join(who)}\n{text}")
        by_ipc = spec.gpu is not None and isinstance(self._block, WeightBlock)
        how = f"from {spec.gpu} by CUDA IPC" if by_ipc else "through memory of the host"
        stored = {str(self.options.devices(number).storing or "cpu") for number in self._numbers}
        parts.append(f"weights      {how}, {spec.nbytes:,} bytes an update")
        return "\n".join([*parts, f"batches      {', '.join(sorted(stored))}"])

    def _place(self, count: int) -> Place | None:
        """Return where so many workers run; None for processes of this machine."""
        return None

    @abc.abstractmethod
    def _steps(self) -> list[int]:
        """Return how many steps a rollout of each worker has."""

    def _name(self, worker: int) -> str | None:
        """Return in words where a worker runs, if that is not here."""
        link = self._crew.links.get(worker)
        return None if link is None or link.shares_memory else link.name

    def _wake(self) -> None:
        self._crew.close(0.0)

    # -- reports --------------------------------------------------------------------------------

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait for all rollouts that are under way, and hold them."""

    def _count(self, worker: int, rolled: Rolled) -> None:
        """Take over what a worker tells of a rollout."""
        self._episodes.record(rolled.episodes)
        self._shares.add(rolled.shares)
        self._open_ids[worker] = rolled.open_ids
        self._rows[worker].frames += rolled.frames
        self._rows[worker].version = rolled.version

    def _listen(self) -> None:
        """Take the next report of any worker."""
        worker, report = self._crew.next()
        if isinstance(report, Rolled):
            self._count(worker, report)
            self._rolled(worker, report)
            if self._storing.prepare(worker, report):
                self._share(worker)
        elif isinstance(report, Built):
            self._envs.setdefault(worker, report.num_envs)
            self._crew.order(worker, Begin(self._plan_anew(worker)))
        elif isinstance(report, Ready):
            check_equal(self._forms, report, worker)
            self._told[worker] = report
            self._storing.forget(worker)
            if self._storing.on and not self._share(worker):
                return  # it was still starting when it died, and does so again
            self._starting.discard(worker)
            self._unplaced.pop(worker, None)
            self._block.begin(worker)
            self._joined(worker)
        else:
            self._mend(worker, report)

    def _share(self, *workers: int) -> bool:
        """Let workers write to the replay buffer; tell whether all of them live to do so."""
        return self._mend_all(self._storing.share(*workers))

    def _mend_all(self, dead: Mapping[int, Died]) -> bool:
        """Mend what died of a question, or raise; tell whether there was nothing to mend."""
        for worker, event in dead.items():
            self._mend(worker, event)
        return not dead

    def _ask_all(self, message_for: Callable[[int], Any]) -> dict[int, Any]:
        """Ask all workers between two rollouts; again those who died of it and were restarted."""
        answers: dict[int, Any] = {}
        while left := [number for number in self._numbers if number not in answers]:
            self._calm(everyone=True)
            told = self._crew.call({number: message_for(number) for number in left})
            given, dead = self._supervisor.answered(told)
            answers.update(given)
            self._mend_all(dead)
        return answers

    @abc.abstractmethod
    def _rolled(self, worker: int, rolled: Rolled) -> None:
        """Take a rollout."""

    @abc.abstractmethod
    def _joined(self, worker: int) -> None:
        """Let a worker take part that was started again, or is new."""

    @abc.abstractmethod
    def _mend(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed and order again what it owes; otherwise raise."""

    def _recovered(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed, or raise what happened."""
        patient = isinstance(event, Died) and event.unplaced and bool(self._up())
        storing = isinstance(event, Failed) and event.storing  # it is not the worker that failed
        if storing or not (patient or self._supervisor.forgives()):
            raise self._supervisor.error(worker, event)
        self._lose(worker)
        self._supervisor.lost_rollouts += worker not in self._starting
        self._rows[worker].restarts += not patient
        self._starting.discard(worker)
        self._crew.dismiss(worker)
        if isinstance(event, Died) and patient:
            self._unplaced[worker] = event
        self._crew.launch([worker])
        self._starting.add(worker)

    def _lose(self, worker: int) -> None:
        """Note the trajectories that a worker leaves unfinished."""
        lost = self._open_ids.pop(worker, ())
        self._supervisor.lost_trajectories.extend(lost)
        if self._assembler is not None:
            self._assembler.discard_open(self._supervisor.lost_trajectories)

    def _plan_anew(self, worker: int) -> Plan:
        """Return the plan of a worker that comes later: with streams and ids that are fresh."""
        plan, made = self._plans[worker], self._rows[worker].frames
        quota, stream = plan.init_random_frames, self._streams(worker)
        return replace(
            plan,
            seed=self._seed,
            first_env=self._firsts.setdefault(worker, stream),
            first_stream=stream,
            first_traj_id=next(self._incarnations) * _IDS_PER_WORKER,
            init_random_frames=None if quota is None else max(0, quota - made),
        )

    def _up(self) -> list[int]:
        """Return the workers that can be ordered."""
        return [number for number in self._numbers if number not in self._starting]

    def _calm(self, everyone: bool = False) -> None:
        """Wait until no worker is busy or starting; those that Ray has not placed are skipped.

        With `everyone=True`, those that are not placed in time raise an error.
        """
        self._settle()
        known = dict(self._unplaced)
        while any(everyone or self._has_place(number) for number in self._starting):
            self._listen()
            self._settle()
            late = [one for one, why in self._unplaced.items() if why is not known.get(one)]
            if everyone and late:
                raise self._supervisor.error(late[0], self._unplaced[late[0]])

    def _has_place(self, worker: int) -> bool:
        link = self._crew.links.get(worker)
        return link is None or link.pid is not None  # None: it has ended, as a report will say

    # -- more and fewer workers -----------------------------------------------------------------

    def _hire(self, count: int) -> None:
        """Start more workers, like those at first; each takes part once it is there.

        They begin with the weights that the oldest worker has.
        """
        with self._shield:
            for _ in range(count):
                like = len(self._crew) % self._first_workers
                number = self._crew.hire(like)
                self._crew.launch([number])
                plan, quota = self._plans[like], 0 if self.options.init_random_frames else None
                plan = replace(plan, worker=number, init_random_frames=quota)
                self._plans[number], self._rows[number] = plan, Row()
                self._block.follow(number, self._numbers[0])
                self._numbers.append(number)
                self._starting.add(number)

    def _retire(self, numbers: Sequence[int], timeout: float) -> None:
        """End workers between two batches; what they have collected is delivered."""
        self._settle()
        with self._shield:
            for number in numbers:
                self._numbers.remove(number)
                self._starting.discard(number)
                self._unplaced.pop(number, None)
                self._crew.retire(number, timeout)
                self._lose(number)
                self._left(number)

    def _left(self, worker: int) -> None:
        """Keep nothing for a worker that does not come again."""
        self._block.forget(worker)
        self._slabs.forget(worker)
        self._told.pop(worker, None)
