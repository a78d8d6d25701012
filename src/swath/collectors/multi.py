"""Collectors over worker processes: what they share.

```
  _collect --> orders --> Crew ==> workers write into shared slabs ==> reports --> batch (views)
```

Your process owns the slabs and says which worker writes where; a worker never chooses. So nothing
is dropped and nothing collected twice: a rollout is ordered once, and kept until it is delivered.
"""

from __future__ import annotations

import abc
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict

from swath.collectors.base import BaseCollector
from swath.collectors.jobs import check_equal, jobs_of, sources_of, split
from swath.collectors.options import Options, Scope
from swath.collectors.single import checked_seed, plan_of
from swath.errors import UsageError
from swath.links import pack, unpack
from swath.observe import Episodes, Shares
from swath.policies import policy_module
from swath.rollout import Plan
from swath.workers.crew import Crew
from swath.workers.messages import (
    Acknowledge,
    Begin,
    Built,
    Call,
    Died,
    Failed,
    PutState,
    Ready,
    Reset,
    Rolled,
    SetSeed,
    TakeState,
)
from swath.workers.place import Place
from swath.workers.supervisor import Supervisor

__all__ = ["MultiCollector"]

_IDS_PER_WORKER = 1 << 40


@dataclass
class _Row:
    """What one worker has done."""

    frames: int = 0
    version: int = 0
    """Of its last rollout."""
    restarts: int = 0


class MultiCollector(BaseCollector):
    """Workers, their weights and their state; subclasses say which rollouts make a batch."""

    _scope: Scope = "workers"
    _without: tuple[str, ...] = ()
    _refreshes = False
    """New weights are taken between any two forward passes."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        parsed = Options.parse(type(self).__name__, options, self._scope, self._without)
        parsed.check_policy(policy)
        self._policy, self._version = policy, 0
        sources = sources_of(create_env_fn, parsed.num_workers)
        sources = [one for one in sources for _ in range(parsed.num_workers_per_collector)]
        jobs = jobs_of(sources, policy, parsed, self._refreshes)
        if not self._delivers:
            sink = pack(parsed.replay_buffer, "replay_buffer")
            jobs = [replace(job, sink=sink) for job in jobs]
        super().__init__(parsed)
        self._numbers, self._starting = list(range(len(jobs))), set[int]()
        self._first_workers = len(jobs)
        self._supervisor = Supervisor(parsed.on_worker_failure == "restart", parsed.max_restarts)
        self._incarnations = itertools.count(len(jobs))
        self._held: deque[tuple[TensorDict, int]] = deque()
        self._broken_rollouts: deque[tuple[TensorDict, int]] = deque()
        self._open_ids: dict[int, Sequence[int]] = {}
        self._envs: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        self._next_env, self._seed = 0, parsed.seed
        self._plans: dict[int, Plan] = {}
        self._rows = {number: _Row() for number in self._numbers}
        self._episodes, self._shares = Episodes(0), Shares()
        self._first_collect: float | None = None
        self._crew = Crew(jobs, parsed.worker_timeout, self._place(len(jobs)))
        self._slabs = self._crew.place.slabs(self._crew)
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
        """How many workers there are, those that are being started included."""
        return len(self._numbers)

    def _start(self) -> None:
        numbers = self._numbers
        self._crew.launch(numbers)
        built = self._checked(self._crew.answers(numbers))
        for number in numbers:
            self._envs[number] = built[number].num_envs
            self._firsts[number] = self._streams(number)
        self._plans = self._plan()
        ready = self._checked(self._crew.call({n: Begin(self._plans[n]) for n in numbers}))
        self._forms: Ready = ready[0]
        for number in numbers:
            check_equal(self._forms, ready[number], number)
        self._block = self._crew.place.weights(self._crew, self._forms.weights)
        for number in numbers:
            self._block.begin(number)

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
                plan_of(self.options, steps),
                init_random_frames=quota,
                first_env=self._firsts[number],
                first_traj_id=number * _IDS_PER_WORKER,
                worker=number,
                marks_worker=self._refreshes,
                masked=self.options.preemptive_threshold is not None,
            )
            for number, steps, quota in zip(self._numbers, self._steps(), quotas, strict=True)
        }

    def _place(self, count: int) -> Place | None:
        """Return where so many workers run; None for processes of this machine."""
        return None

    @abc.abstractmethod
    def _steps(self) -> list[int]:
        """Return how many steps a rollout of each worker has."""

    def _checked(self, answers: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return answers that are no failures; raise the first that is one."""
        for number, answer in answers.items():
            if isinstance(answer, (Failed, Died)):
                raise self._error(number, answer)
        return answers

    def _error(self, worker: int, event: Failed | Died) -> BaseException:
        link = self._crew.links.get(worker)
        who = None if link is None or link.shares_memory else link.name
        return self._supervisor.error(worker, event, who)

    # -- rollouts -------------------------------------------------------------------------------

    def _collect(self, frames_left: float) -> tuple[TensorDict, int] | None:
        if self._first_collect is None:
            self._first_collect = perf_counter()
        with self._crew.shield:  # Ctrl-C finds the batch held, or still in the making
            if not self._held:
                self._slabs.tidy()
                answer = self._gather(frames_left)
                if answer is None:
                    return None
                if not self._delivers:  # what was collected is in the replay buffer
                    answer = TensorDict({}, [0]), answer[1]
                self._held.append(answer)
        return self._held.popleft()

    @abc.abstractmethod
    def _gather(self, frames_left: float) -> tuple[TensorDict, int] | None:
        """Return the next rollout; None if there is nothing more to collect."""

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
        elif isinstance(report, Built):
            self._envs.setdefault(worker, report.num_envs)
            self._crew.order(worker, Begin(self._plan_anew(worker)))
        elif isinstance(report, Ready):
            check_equal(self._forms, report, worker)
            self._starting.discard(worker)
            self._block.begin(worker)
            self._joined(worker)
        else:
            self._mend(worker, report)

    @abc.abstractmethod
    def _rolled(self, worker: int, rolled: Rolled) -> None:
        """Take a rollout."""

    @abc.abstractmethod
    def _joined(self, worker: int) -> None:
        """Let a worker take part that was started again, or is new."""

    @abc.abstractmethod
    def _mend(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed and order again what it owes; otherwise raise."""

    @abc.abstractmethod
    def _needs(self, worker: int) -> bool:
        """Tell whether nothing can be delivered before this worker is there."""

    def _recovered(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed, or raise what happened."""
        patient = isinstance(event, Died) and event.unplaced and not self._needs(worker)
        if not patient and not self._supervisor.forgives():
            raise self._error(worker, event)
        self._lose(worker)
        self._supervisor.lost_rollouts += worker not in self._starting
        self._rows[worker].restarts += not patient
        self._starting.discard(worker)
        self._crew.dismiss(worker)
        self._crew.launch([worker])
        self._starting.add(worker)

    def _lose(self, worker: int) -> None:
        """Note the trajectories that a worker leaves unfinished."""
        lost = self._open_ids.pop(worker, ())
        self._supervisor.lost_trajectories.extend(lost)
        if self._assembler is not None:
            self._assembler.discard_open(lost)

    def _plan_anew(self, worker: int) -> Plan:
        """Return the plan of a worker that comes later: with streams and ids that are fresh."""
        plan, made = self._plans[worker], self._rows[worker].frames
        stream = self._streams(worker)
        return replace(
            plan,
            seed=self._seed,
            first_env=self._firsts.setdefault(worker, stream),
            first_stream=stream,
            first_traj_id=next(self._incarnations) * _IDS_PER_WORKER,
            init_random_frames=max(0, plan.init_random_frames - made),
        )

    def _up(self) -> list[int]:
        """Return the workers that can be ordered."""
        return [number for number in self._numbers if number not in self._starting]

    def _rest(self, everyone: bool = False) -> None:
        """Wait until all rest: those that are being started, too, if they have found a place."""
        self._settle()
        links = self._crew.links
        while any(everyone or links[number].pid is not None for number in self._starting):
            self._listen()
            self._settle()

    # -- more and fewer workers -----------------------------------------------------------------

    def _hire(self, count: int) -> None:
        """Start more workers, like those at first; each takes part once it is there."""
        for _ in range(count):
            like = len(self._crew) % self._first_workers
            number = self._crew.hire(like)
            plan = replace(self._plans[like], worker=number, init_random_frames=0)
            self._plans[number], self._rows[number] = plan, _Row()
            self._numbers.append(number)
            self._starting.add(number)
            self._crew.launch([number])

    def _retire(self, numbers: Sequence[int], timeout: float) -> None:
        """End workers between two batches; what they have collected is delivered."""
        self._settle()
        for number in numbers:
            self._numbers.remove(number)
            self._starting.discard(number)
            self._crew.retire(number, timeout)
            self._lose(number)

    def _broken(self) -> TensorDict | None:
        if not self._broken_rollouts:
            return None
        rollout, frames = self._broken_rollouts.popleft()
        self._frames += frames
        return rollout

    # -- weights --------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return self._version

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        wait: bool = False,
    ) -> int:
        """Publish weights to the workers and return their version.

        The weights are copied once, into memory that all workers see; your tensors are only read.

        Args:
            policy_or_weights: A module, a state dict or a TensorDict of parameters; the policy
                that the collector was made with by default.
            worker_ids: Only these workers; all by default.
            wait: Return when each of them has taken the weights.
        """
        self._check_open()
        source = self._module() if policy_or_weights is None else policy_or_weights
        if source is None and self._forms.weights.shapes:
            raise UsageError(
                "the workers made their policies with policy_factory, so there is nothing here to "
                "publish; pass the weights: update_policy_weights_(policy)."
            )
        numbers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        numbers = list(self._numbers if numbers is None else numbers)
        unknown = [number for number in numbers if number not in self._numbers]
        if unknown:
            raise UsageError(f"worker_ids {unknown} do not exist; workers are {self._numbers}.")
        block, later = self._block, self._publishes_later()
        block.publish({} if source is None else source, self._version + 1, numbers, later)
        self._version += 1
        if wait:
            with self.pause():
                self._acknowledge(numbers, later)
        return self._version

    def _acknowledge(self, numbers: Sequence[int], later: bool) -> None:
        if later:
            self._settle()
        there = [number for number in numbers if number not in self._starting]
        for number, answer in self._crew.call(dict.fromkeys(there, Acknowledge())).items():
            if isinstance(answer, (Failed, Died)):
                self._mend(number, answer)

    def _publishes_later(self) -> bool:
        """Tell whether there are rollouts under way that are not to see new weights."""
        return False

    def _module(self) -> torch.nn.Module | None:
        return policy_module(self._policy)

    # -- the rest -------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> int:
        """Restart every random stream from this seed, beginning with the next batch.

        Rollouts that were collected ahead are dropped.
        """
        self._check_open()
        message = SetSeed(checked_seed(seed))
        with self.pause():
            self._seed_all(message)
        return seed

    def _seed_all(self, message: SetSeed) -> None:
        self._rest()
        self._held.clear()
        self._seed = message.seed
        self._tell_all(message)

    def reset(self) -> None:
        """Start new episodes with the next rollouts; open ones are cut where they stand."""
        self._check_open()
        with self.pause():
            self._rest()
            self._tell_all(Reset())

    def _tell_all(self, message: SetSeed | Reset) -> None:
        """Let all workers cut their episodes off, in one way or the other."""
        self._checked(self._crew.call(dict.fromkeys(self._up(), message)))
        if self._assembler is not None:
            self._assembler.discard_open()

    def stats(self) -> dict[str, Any]:
        """Return counts, speed, where the time goes, episode statistics and what was lost."""
        return {
            "frames": self._frames,
            "batches": self._batches,
            "frames_per_second": self._speed(sum(row.frames for row in self._rows.values())),
            "time": self._shares.as_dict(),
            **self._episodes.as_dict(),
            "policy_version": self._version,
            "workers": [self._about(number) for number in self._numbers],
            "restarts": self._supervisor.restarts,
            "lost": {
                "rollouts": self._supervisor.lost_rollouts,
                "trajectories": list(self._supervisor.lost_trajectories),
            },
        }

    def _speed(self, frames: int) -> float:
        seconds = perf_counter() - (self._first_collect or perf_counter())
        return frames / seconds if seconds else 0.0

    def _about(self, number: int) -> dict[str, Any]:
        link, row = self._crew.links.get(number), self._rows[number]
        pid, host = (None, None) if link is None else (link.pid, link.host)
        return {
            "worker": number,
            "pid": pid,
            "host": host,
            "frames": row.frames,
            "frames_per_second": self._speed(row.frames),
            "lag": self._version - row.version,
            "restarts": row.restarts,
        }

    def map_fn(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function in each worker, between two rollouts, and return what it returned.

        Args:
            function: Of one argument, which has `worker` (its number), `envs` (a list) and `policy`.
        """
        self._check_open()
        message = Call(pack(function, "function"))
        with self.pause():
            self._rest(everyone=True)
            answers = self._checked(self._crew.call(dict.fromkeys(self._numbers, message)))
        return [unpack(answers[number].value) for number in self._numbers]

    def get_distant_attr(self, path: str) -> list[Any]:
        """Return an attribute in each worker, such as `"policy.weight"`; see `map_fn`."""
        return self.map_fn(operator.attrgetter(path))

    def _source_state(self) -> Any:
        self._rest(everyone=True)
        states = self._checked(self._crew.call(dict.fromkeys(self._numbers, TakeState())))
        return {
            "workers": [states[number].state for number in self._numbers],
            "held": [(batch.clone(), frames) for batch, frames in self._held],
            "incarnation": next(self._incarnations),
            "version": self._version,
            "made": [self._rows[number].frames for number in self._numbers],
            "next_env": self._next_env,
            "episodes": self._episodes.state_dict(),
        }

    def _load_source_state(self, state: Any) -> None:
        if len(state["workers"]) != self.num_workers:
            raise UsageError(
                f"this state is of {len(state['workers'])} workers; this collector has "
                f"{self.num_workers}."
            )
        self._rest(everyone=True)
        inner = dict(zip(self._numbers, state["workers"], strict=True))
        self._checked(self._crew.call({n: PutState(one) for n, one in inner.items()}))
        self._held = deque(state["held"])
        self._incarnations = itertools.count(state["incarnation"])
        self._episodes.load_state_dict(state["episodes"])
        self._version, self._next_env = state["version"], max(self._next_env, state["next_env"])
        versions = {number: unpack(one)[0]["version"] for number, one in inner.items()}
        for number, made in zip(self._numbers, state["made"], strict=True):
            self._rows[number] = _Row(made, versions[number])
        for version in set(versions.values()):  # for workers that are restarted later
            holders = [number for number, one in versions.items() if one == version]
            self._block.publish(unpack(inner[holders[0]])[1], version, holders)

    def _shutdown(self, timeout: float) -> None:
        self._ender.detach()
        self._crew.close(timeout)
        self._slabs.close()
        self._block.close()
