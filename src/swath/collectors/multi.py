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
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict

from swath.collectors.base import STORED, BaseCollector
from swath.collectors.jobs import check_equal, jobs_of, sources_of, split
from swath.collectors.options import Options, Scope
from swath.collectors.single import checked_seed, plan_of
from swath.collectors.storing import Storing
from swath.errors import UsageError
from swath.links import unpack
from swath.observe import Episodes, Shares
from swath.policies import policy_module
from swath.rollout import Plan
from swath.workers.crew import Crew
from swath.workers.messages import (
    Acknowledge,
    Begin,
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
        super().__init__(parsed)
        self.num_workers = len(jobs)
        self._supervisor = Supervisor(parsed.on_worker_failure == "restart", parsed.max_restarts)
        self._incarnations = itertools.count(len(jobs))
        self._held: deque[tuple[Any, int]] = deque()
        self._broken_rollouts: deque[tuple[TensorDict, int]] = deque()
        self._open_ids: dict[int, Sequence[int]] = {}
        self._made = [0] * len(jobs)
        self._episodes, self._shares = Episodes(0), Shares()
        self._first_collect: float | None = None
        self._crew = Crew(jobs, parsed.worker_timeout, self._place(len(jobs)))
        self._slabs = self._crew.place.slabs(self._crew)
        self._storing = Storing(parsed, self._finishing, self._crew, self._supervisor)
        self._ender = weakref.finalize(self, self._crew.close, 0.0)
        try:
            self._start()
        except BaseException:
            self._ender.detach()
            self._crew.close(0.0)
            raise

    # -- construction ---------------------------------------------------------------------------

    def _start(self) -> None:
        numbers = range(self.num_workers)
        self._crew.launch(numbers)
        built = self._supervisor.checked(self._crew.answers(numbers))
        self._envs = [built[number].num_envs for number in numbers]
        self._firsts = [sum(self._envs[:number]) for number in numbers]
        self._plans = self._plan()
        ready = self._supervisor.checked(
            self._crew.call({number: Begin(plan) for number, plan in enumerate(self._plans)})
        )
        self._forms: Ready = ready[0]
        for number in numbers:
            check_equal(self._forms, ready[number], number)
        self._block = self._crew.place.weights(self._crew, self._forms.weights)
        for number in numbers:
            self._block.begin(number)

    def _plan(self) -> list[Plan]:
        """Return what each worker is to do."""
        plans = []
        quotas = split(self.options.init_random_frames, self._firsts, self._envs)
        for number, (steps, quota) in enumerate(zip(self._steps(), quotas, strict=True)):
            plan = plan_of(self.options, steps)
            plans.append(
                replace(
                    plan,
                    init_random_frames=quota,
                    first_env=self._firsts[number],
                    first_traj_id=number * _IDS_PER_WORKER,
                    worker=number,
                    marks_worker=self._refreshes,
                    masked=self.options.preemptive_threshold is not None,
                )
            )
        return plans

    def _place(self, count: int) -> Place | None:
        """Return where so many workers run; None for processes of this machine."""
        return None

    @abc.abstractmethod
    def _steps(self) -> list[int]:
        """Return how many steps a rollout of each worker has."""

    # -- rollouts -------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Let the workers write to the replay buffer themselves, if they can."""
        if self._storing.on:
            return
        reason = self._storing.why_not(begun=self._frames > 0)
        self._writer = "workers" if reason is None else f"this process: {reason}"
        if reason is None:
            self._settle()  # what comes of that is for this process to write
            self._storing.share(*range(self.num_workers))
            self._storing.on = True

    def _rest(self) -> None:
        if self._storing.on:
            self._settle()  # or workers that are ahead would write on
            stored = [frames for batch, frames in self._held if batch is STORED]
            self._held = deque(one for one in self._held if one[0] is not STORED)
            self._frames, self._batches = self._frames + sum(stored), self._batches + len(stored)

    def _fetch_held(self) -> None:
        assert self._assembler is not None
        for frames in self._storing.held(clear=True):
            self._assembler.push(frames)

    def _assembler_state(self) -> dict[str, Any]:
        whole = self._finishing.assembler()
        assert whole is not None
        whole.load_state_dict(super()._assembler_state())
        for frames in self._storing.held(clear=False):
            whole.push(frames)
        return whole.state_dict()

    def _rollout(self) -> Any:
        if self._storing.on and not self._in_background():
            raise UsageError(
                "the workers of this collector write to the replay buffer by themselves since "
                "start(); draw from it."
            )
        return super()._rollout()

    def _collect(self, frames_left: float) -> tuple[Any, int] | None:
        if self._first_collect is None:
            self._first_collect = perf_counter()
        with self._crew.shield:  # Ctrl-C finds the batch held, or still in the making
            if not self._held:
                self._slabs.tidy()
                answer = self._gather(frames_left)
                if answer is None:
                    return None
                self._held.append(answer)
        return self._held.popleft()

    @abc.abstractmethod
    def _gather(self, frames_left: float) -> tuple[Any, int] | None:
        """Return the next rollout; None if there is nothing more to collect."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait for all rollouts that are under way, and hold them."""

    def _count(self, worker: int, rolled: Rolled) -> None:
        """Take over what a worker tells of a rollout."""
        self._episodes.record(rolled.episodes)
        self._shares.add(rolled.shares)
        self._open_ids[worker] = rolled.open_ids
        self._made[worker] += rolled.frames
        self._storing.hear(worker, rolled)

    @abc.abstractmethod
    def _mend(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed and order again what it owes; otherwise raise."""

    def _recovered(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker that failed, or raise what happened."""
        storing = isinstance(event, Failed) and event.storing  # it is not the worker that failed
        if storing or not self._supervisor.forgives():
            raise self._supervisor.error(worker, event)
        try:
            self._restart(worker)
        except KeyboardInterrupt:
            self._crew.tell_again(worker, event)  # so that who goes on begins with it
            raise

    def _restart(self, worker: int) -> None:
        self._supervisor.lost_trajectories.extend(self._open_ids.pop(worker, ()))
        self._supervisor.lost_rollouts += 1
        if self._assembler is not None:
            self._assembler.discard_open(self._supervisor.lost_trajectories)
        self._crew.dismiss(worker)
        self._crew.launch([worker])
        incarnation = next(self._incarnations)
        generation = incarnation - self.num_workers + 1
        plan = replace(
            self._plans[worker],
            first_stream=self._firsts[worker] + generation * sum(self._envs),
            first_traj_id=incarnation * _IDS_PER_WORKER,
            init_random_frames=max(0, self._plans[worker].init_random_frames - self._made[worker]),
        )
        answer = self._crew.answers([worker])[worker]
        if not isinstance(answer, (Failed, Died)):
            answer = self._crew.call({worker: Begin(plan)})[worker]
        if isinstance(answer, (Failed, Died)):
            self._recovered(worker, answer)
            return
        self._block.begin(worker)
        self._storing.forget(worker)

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
        numbers = list(range(self.num_workers)) if numbers is None else list(numbers)
        unknown = [number for number in numbers if number not in range(self.num_workers)]
        if unknown:
            raise UsageError(
                f"worker_ids {unknown} do not exist; workers are 0 to {self.num_workers - 1}."
            )
        block, later = self._block, self._publishes_later()
        block.publish({} if source is None else source, self._version + 1, numbers, later)
        self._version += 1
        self._note_version(self._version)
        if wait:
            with self.pause():
                self._acknowledge(numbers, later)
        return self._version

    def _acknowledge(self, numbers: Sequence[int], later: bool) -> None:
        if later:
            self._settle()
        for number, answer in self._crew.call(dict.fromkeys(numbers, Acknowledge())).items():
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
        self._settle()
        self._held.clear()
        self._tell_all(message)

    def reset(self) -> None:
        """Start new episodes with the next rollouts; open ones are cut where they stand."""
        self._check_open()
        with self.pause():
            self._settle()
            self._tell_all(Reset())

    def _tell_all(self, message: SetSeed | Reset) -> None:
        """Let all workers cut their episodes off, in one way or the other."""
        self._supervisor.checked(self._crew.call(dict.fromkeys(range(self.num_workers), message)))
        if self._assembler is not None:
            self._assembler.discard_open()

    def _stats(self) -> dict[str, Any]:
        seconds = perf_counter() - (self._first_collect or perf_counter())
        return {
            "frames": self._frames,
            "batches": self._batches,
            "frames_per_second": sum(self._made) / seconds if seconds else 0.0,
            "time": self._shares.as_dict(),
            **self._episodes.as_dict(),
            "policy_version": self._version,
            "workers": [self._row(number) for number in range(self.num_workers)],
            "restarts": self._supervisor.restarts,
            "lost": {
                "rollouts": self._supervisor.lost_rollouts,
                "trajectories": list(self._supervisor.lost_trajectories),
            },
        }

    def _row(self, number: int) -> dict[str, Any]:
        link = self._crew.links.get(number)
        pid, host = (None, None) if link is None else (link.pid, link.host)
        return {"pid": pid, "host": host, "frames": self._made[number]}

    def _source_state(self) -> Any:
        self._settle()
        messages = dict.fromkeys(range(self.num_workers), TakeState())
        states = self._supervisor.checked(self._crew.call(messages))
        return {
            "workers": [states[number].state for number in range(self.num_workers)],
            "held": [(batch.clone(), frames) for batch, frames in self._held],
            "incarnation": next(self._incarnations),
            "version": self._version,
            "made": list(self._made),
            "episodes": self._episodes.state_dict(),
        }

    def _load_source_state(self, state: Any) -> None:
        if len(state["workers"]) != self.num_workers:
            raise UsageError(
                f"this state is of {len(state['workers'])} workers; this collector has "
                f"{self.num_workers}."
            )
        self._settle()
        self._supervisor.checked(
            self._crew.call({n: PutState(inner) for n, inner in enumerate(state["workers"])})
        )
        self._held = deque(state["held"])
        self._incarnations = itertools.count(state["incarnation"])
        self._episodes.load_state_dict(state["episodes"])
        self._version, self._made = state["version"], list(state["made"])
        versions = [unpack(inner)[0]["version"] for inner in state["workers"]]
        for version in set(versions):  # for workers that are restarted later
            holders = [number for number, one in enumerate(versions) if one == version]
            self._block.publish(unpack(state["workers"][holders[0]])[1], version, holders)

    def _shutdown(self, timeout: float) -> None:
        self._ender.detach()
        self._crew.close(timeout)
        self._slabs.close()
        self._block.close()
