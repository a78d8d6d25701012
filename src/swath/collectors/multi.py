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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from swath.collectors.base import STORED
from swath.collectors.crewed import CrewedCollector, Row
from swath.collectors.setup import Setup, fields_in_words, weights_in_words
from swath.collectors.single import checked_seed, chosen
from swath.collectors.torchrl_members import called_as_in_torchrl
from swath.collectors.turns import between_batches
from swath.errors import EnvError, PolicyError, UsageError
from swath.links import pack, unpack
from swath.observe import CountOf, Episodes
from swath.policies import policy_module
from swath.workers.messages import (
    Acknowledge,
    Call,
    Died,
    Failed,
    PutState,
    Reset,
    SetSeed,
    TakeState,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MultiCollector"]


class MultiCollector(CrewedCollector):
    """Base class of the collectors with worker processes.

    `MultiCollector(sync=True, ...)` makes a `MultiSyncCollector`, and `sync=False` makes a
    `MultiAsyncCollector`.
    """

    _batches_are: str
    """What a batch is of, in words."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Return the collector that `sync` says, where this class itself is called."""
        return super().__new__(cls._meant(options), *arguments, **options)

    @classmethod
    def _meant(cls, options: Mapping[str, Any]) -> type[Self]:
        """Return which class is meant by what was given."""
        if cls is not MultiCollector:
            return cls
        if options.get("sync") is None:
            raise UsageError(
                "MultiCollector needs the option sync: True makes a MultiSyncCollector, False "
                "a MultiAsyncCollector."
            )
        from swath import collectors

        kinds: Any = collectors.MultiAsyncCollector, collectors.MultiSyncCollector
        return kinds[bool(options["sync"])]

    # -- rollouts -------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Let the workers write to the replay buffer themselves, if they can."""
        if self._storing.on:
            return
        reason = self._storing.why_not(
            begun=self._frames > 0, hooked=self.post_collect_hook is not None
        )
        self._writer = "workers" if reason is None else f"this process: {reason}"
        if reason is None:
            self._settle()  # what comes of that is for this process to write
            self._share(*self._up())
            self._storing.on = True  # those who are being started are told when they are ready

    def _rest(self) -> None:
        if self._storing.on:
            self._settle()  # or workers that are ahead would write on
            stored = [frames for batch, frames in self._held if batch is STORED]
            self._held = deque(one for one in self._held if one[0] is not STORED)
            self._frames += sum(stored)
            self._way.batches += len(stored)

    def _fetch_held(self) -> None:
        assert self._assembler is not None
        for frames in self._fetched(clear=True):
            self._assembler.push(frames)

    def _fetched(self, clear: bool) -> list[TensorDict]:
        held, dead = self._storing.held(self._up(), clear)
        self._mend_all(dead)  # what they held is lost, and said to be
        return held

    def _assembler_state(self) -> dict[str, Any]:
        whole = self._output.finishing.assembler()
        assert whole is not None
        whole.load_state_dict(super()._assembler_state())
        for frames in self._fetched(clear=False):
            whole.push(frames)
        return whole.state_dict()

    def _whole_state(self) -> dict[str, Any]:
        while True:  # a worker that was started again meanwhile is half in it as it was before
            restarts = self._supervisor.restarts
            state = super()._whole_state()
            if self._supervisor.restarts == restarts:
                return state

    def _rollout(self) -> Any:
        if self._storing.on and not self._in_background():
            raise UsageError(
                "since start() the workers of this collector write to the replay buffer "
                "directly; draw batches from the buffer."
            )
        return super()._rollout()

    def _collect(self, frames_left: float) -> tuple[Any, int] | None:
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

    @called_as_in_torchrl
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: int | Sequence[int] | None = None,
        wait: bool = False,
    ) -> int:
        """Publish weights to the workers and return their version.

        The weights are copied once, into memory that all workers share; your tensors are only read.

        Args:
            policy_or_weights: A module, a state dict or a TensorDict of parameters; by default
                the policy that the collector was made with.
            worker_ids: Publish to these workers only; to all by default.
            wait: Return only when each of them has taken the weights.
        """
        self._check_open()
        source = self._module() if policy_or_weights is None else policy_or_weights
        if source is None and self._forms.weights.shapes:
            raise UsageError(
                "the workers made their policies with policy_factory, so this process has no "
                "policy whose weights it could publish; pass the weights: "
                "update_policy_weights_(policy)."
            )
        numbers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        numbers = list(self._numbers if numbers is None else numbers)
        unknown = [number for number in numbers if number not in self._numbers]
        if unknown:
            raise UsageError(f"worker_ids {unknown} do not exist; workers are {self._numbers}.")
        later = self._publishes_later()
        version = self._publish(source, numbers, later)
        if wait:
            turn = self._owner.turn("update_policy_weights_(wait=True)")
            with self._shield, self.pause(), turn:
                self._acknowledge(numbers, later)
        return version

    def _publish(self, source: Any, numbers: Sequence[int], later: bool) -> int:
        """Publish weights as a version that no others have, whatever happens."""
        with self._shield:
            self._version = version = self._version + 1
            try:
                self._block.publish({} if source is None else source, version, numbers, later)
            except UsageError:  # they do not fit, and nobody has them
                self._version -= 1
                raise
            return self._note_version(version)

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

    def _copied_module(self) -> torch.nn.Module | None:
        return self._module()

    # -- the rest -------------------------------------------------------------------------------

    @between_batches
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Restart every random stream from this seed, beginning with the next batch.

        Rollouts that were collected ahead are dropped.

        Args:
            seed: At least 0.
            static_seed: All envs of all workers get the same seed.
        """
        self._check_open()
        self._seed_all(SetSeed(checked_seed(seed), static_seed))
        return seed

    def _seed_all(self, message: SetSeed) -> None:
        self._calm()
        self._held.clear()
        self._seed = message.seed
        self._tell(message, self._numbers)

    @between_batches
    def reset(self, workers: Any = None) -> None:
        """Start new episodes with the next rollouts; open ones are cut where they stand.

        Args:
            workers: Whose: their numbers, or a flag for each; of all by default.
        """
        self._check_open()
        which = self._numbers if workers is None else chosen("workers", workers, self._numbers)
        self._calm()
        self._tell(Reset(), which)

    def _tell(self, message: SetSeed | Reset, which: Sequence[int]) -> None:
        """Let workers cut their episodes off, in one way or the other.

        One that is started again begins new ones anyway, with the seed of now.
        """
        there = [number for number in self._up() if number in which]
        _, dead = self._supervisor.answered(self._crew.call(dict.fromkeys(there, message)))
        self._mend_all(dead)
        everyone = len(which) == self.num_workers
        cut = None if everyone else [one for n in which for one in self._open_ids.get(n, ())]
        self._forget_episodes(which)
        if self._assembler is not None:
            self._take_held()
            self._assembler.discard_open(cut)

    def _take_held(self) -> None:
        """Put the trajectories together that were collected up to here.

        What is held goes on with trajectories that the assembler has begun: if these were discarded
        before it is there, its ends would pass for whole ones.
        """
        assert self._assembler is not None
        while self._held:
            rollout, frames = self._held.popleft()
            self._frames += frames
            if rollout is not STORED:
                self._assembler.push(rollout)

    def _forget_episodes(self, workers: Sequence[int]) -> None:
        """Forget what is known of the episodes of workers: others are under way now."""
        for number in workers:
            self._open_ids.pop(number, None)

    def _stats(self) -> dict[str, Any]:
        rows = [self._about(number) for number in self._numbers]
        return {
            "time": self._shares.as_dict(),
            **self._episodes.as_dict(),
            "policy_version": self._version,
            "workers": CountOf(rows),
            "workers_alive": len(self._crew.links),
            "per_worker": rows,
            "restarts": self._supervisor.restarts,
            "lost": {
                "rollouts": self._supervisor.lost_rollouts,
                "trajectories": list(self._supervisor.lost_trajectories),
            },
        }

    def _ended_episodes(self) -> Episodes:
        return self._episodes

    def _about(self, number: int) -> dict[str, Any]:
        link, row = self._crew.links.get(number), self._rows[number]
        pid, host = (None, None) if link is None else (link.pid, link.host)
        return {
            "worker": number,
            "pid": pid,
            "host": host,
            "frames": row.frames,
            "frames_per_second": self._speed(row.frames - row.loaded),
            "lag": self._version - row.version,
            "restarts": row.restarts,
        }

    @called_as_in_torchrl
    @between_batches
    def map_fn(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function in each worker, between two rollouts, and return what it returned.

        If a worker dies meanwhile and is restarted, the function is called in it once more.

        Args:
            function: Is called with one argument, which has the attributes `worker` (a number),
                `envs` (a list) and `policy`.
        """
        return self._call_all(dict.fromkeys(self._numbers, Call(pack(function, "function"))))

    @between_batches
    def _call_each(self, functions: Sequence[Callable[[Any], Any]]) -> list[Any]:
        """Call in each worker a function of its own; see `map_fn`."""
        messages = [Call(pack(function, "function")) for function in functions]
        return self._call_all(dict(zip(self._numbers, messages, strict=True)))

    def _call_all(self, calls: Mapping[int, Call]) -> list[Any]:
        self._check_open()
        answers = self._ask_all(lambda number: calls[number])
        return [unpack(answers[number].value) for number in self._numbers]

    @called_as_in_torchrl
    def get_distant_attr(self, path: str) -> list[Any]:
        """Return an attribute of each worker, such as `"policy.weight"`; see `map_fn`."""
        return self.map_fn(operator.attrgetter(path))

    def _source_state(self) -> Any:
        states = self._ask_all(lambda number: TakeState())
        return {
            "workers": [states[number].state for number in self._numbers],
            "open_ids": [list(self._open_ids.get(number, ())) for number in self._numbers],
            "held": [(batch.clone(), frames) for batch, frames in self._held],
            "incarnation": next(self._incarnations),
            "version": self._version,
            "made": [self._rows[number].frames for number in self._numbers],
            "next_env": self._next_env,
            "episodes": self._episodes.state_dict(),
        }

    def _setup(self) -> Setup:
        return {
            "workers": f"{self.num_workers} workers",
            "batches": self._batches_are,
            "envs": [self._told.get(number, self._forms).envs for number in self._numbers],
            "keys": fields_in_words(self._forms.fields),
            "weights": weights_in_words(self._forms.weights),
        }

    @called_as_in_torchrl
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; see `BaseCollector`."""
        if self._storing.on and self._assembler is not None:
            raise UsageError(
                "with trajs_per_batch the workers assemble trajectories themselves since "
                "start(), so this state cannot be loaded now. Make a new collector, load the "
                "state, and call start() afterwards."
            )
        super().load_state_dict(state)

    def _load_source_state(self, state: Any) -> None:
        self._drop_under_way()
        inner = dict(zip(self._numbers, state["workers"], strict=True))
        self._ask_all(lambda number: PutState(inner[number]))
        self._held, self._broken_rollouts = deque(state["held"]), deque()
        self._forget_episodes(self._numbers)
        self._open_ids.update(zip(self._numbers, state["open_ids"], strict=True))
        self._incarnations = itertools.count(state["incarnation"])
        self._episodes.load_state_dict(state["episodes"])
        self._version, self._next_env = state["version"], max(self._next_env, state["next_env"])
        versions = {number: unpack(one)[0]["version"] for number, one in inner.items()}
        for number, made in zip(self._numbers, state["made"], strict=True):
            self._rows[number] = Row(made, versions[number], loaded=made)
        for version in set(versions.values()):  # for workers that are restarted later
            holders = [number for number, one in versions.items() if one == version]
            self._block.publish(unpack(inner[holders[0]])[1], version, holders)

    def _drop_under_way(self) -> None:
        """Wait until no worker is busy; failures are dropped with everything that was collected."""
        while True:
            try:
                return self._calm(everyone=True)
            except (EnvError, PolicyError):  # the worker itself lives, and has told of it
                pass

    def _check_keeps_envs(self, close_env: bool) -> None:
        if not close_env:
            raise UsageError(
                "close_env=False is for Collector, whose envs are in this process; workers "
                "close their own envs when they end. Leave it out."
            )

    def _shutdown(self, timeout: float, close_env: bool) -> None:
        self._ender.detach()
        self._crew.close(timeout)
        self._slabs.close()
        self._block.close()
