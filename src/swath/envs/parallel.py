"""`ParallelEnv`: envs in other processes, several in each.

```
  your process                        board: step t, slab k | ended, failed of each process
  Runner --step(t)--> ParallelGroup --bells--> process 0: envs 0 to 3 --+
     ^                     |        --------> process 1: envs 4 to 7 --+--> the slab, shared
     '------ done bell, or a sentinel: a process has ended ------------'
```

Your process owns the slab, the board and the bells; a process owns its envs and writes their
columns of the slab: observations, rewards, flags and, unless an env that has ended is to stay so,
the first observation of the next episode. Shutdown: an empty message, wait, kill after some
seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, NoReturn

import numpy as np

import swath
from swath.envs.base import Env
from swath.envs.group import Group
from swath.envs.hosted import ASK, BARE, EAGER, Attach, Call, Detach, Hosted, Trouble, main
from swath.envs.info import InfoNames
from swath.envs.joined import check_equal
from swath.errors import UsageError, WorkerError
from swath.links import Bell, ProcessLink, pack
from swath.links.launch import ending, in_worker
from swath.links.parcels import unpack_error
from swath.memory import SharedMemory, Slab
from swath.rollout import CallFailed

__all__ = ["ParallelEnv"]

_GRACE = 5.0
_OPEN_DESCRIPTORS = 64
_SPINS, _LOOKS = 300, 100
"""Looks at the board before a process, or this one, goes to sleep: some 200 us.

It costs more to wake a core that sleeps than a step of a cheap env takes."""


class ParallelEnv(Env):
    """N envs in worker processes, stepped together, with batch size `[N]`.

    Args:
        num_envs: How many.
        create_env_fn: Makes one env (an id, or a callable), or a list of N such with equal spaces.
        num_workers: How many processes; as many as there are cores by default, envs spread evenly.
        info_keys: Entries of the info dicts to store, as in `GymEnv`.

    Examples:
        >>> env = ParallelEnv(4, "CartPole-v1", num_workers=2)
        >>> env.rollout(10, break_when_any_done=False).batch_size
        torch.Size([4, 10])
        >>> env.close()
    """

    def __init__(
        self,
        num_envs: int,
        create_env_fn: Any,
        num_workers: int | None = None,
        *,
        info_keys: InfoNames = (),
    ) -> None:
        for name, value in (("num_envs", num_envs), ("num_workers", num_workers)):
            given = value is not None or name == "num_envs"
            if given and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be an int of at least 1; got {value!r}.")
        listed = isinstance(create_env_fn, (list, tuple))
        makers = list(create_env_fn) if listed else [create_env_fn] * num_envs
        if len(makers) != num_envs:
            raise UsageError(f"num_envs is {num_envs}, but {len(makers)} env makers were given.")
        for maker in makers:
            if not isinstance(maker, str) and not callable(maker):
                raise UsageError(
                    f"the env maker is {maker!r}; processes make their own envs, so pass an id or "
                    "a callable that makes an env."
                )
        workers = min(num_envs, num_workers or len(os.sched_getaffinity(0)))
        super().__init__(ParallelGroup(makers, workers, info_keys))


class ParallelGroup(Group):
    """Envs that other processes step."""

    needs_shared_memory = True

    def __init__(self, makers: Sequence[Any], workers: int, info_keys: InfoNames) -> None:
        bounds = [len(makers) * number // workers for number in range(workers + 1)]
        self.spans = list(itertools.pairwise(bounds))
        self._board, self._ended = SharedMemory(8 * (4 + 3 * workers)), SharedMemory(len(makers))
        words = self._board.array.view(np.int64)
        self.order = words[:4]
        """The turn, the step, the slab and the mode."""
        self.own = words[4:].reshape(workers, 3)
        """Of each process: the turn that it has done, the envs that ended in it, a failure."""
        self.ended = self._ended.array
        self.bells, self.done = [Bell() for _ in range(workers)], Bell()
        # A worker of a collector leaves the cores to its like.
        self.cores = 0 if in_worker() else len(os.sched_getaffinity(0))
        self.turn = 0
        self.dead: str | None = None
        self.links: list[ProcessLink] = []
        self._unused: deque[int] = deque()
        self._numbers = itertools.count()
        self._modes: set[tuple[int, int]] = set()
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        self._described: deque[weakref.ref[SharedMemory]] = deque()
        bells = [*self.bells, self.done]
        self._ender = weakref.finalize(self, _end, self.links, bells, self.order, 0.0)
        try:
            self._start(makers, info_keys)
        except BaseException:
            self._ender()
            raise

    def _start(self, makers: Sequence[Any], info_keys: InfoNames) -> None:
        quiet = swath.filter_warnings_subprocess
        for number, (start, stop) in enumerate(self.spans):
            spins = _SPINS if number < self.cores else 0
            job = makers[start:stop], info_keys, quiet, number, start, spins
            self.links.append(ProcessLink(main, pack(job, "create_env_fn")))
        hosted: list[Hosted] = self._answers(range(len(self.links)))
        for number, (host, span) in enumerate(zip(hosted, self.spans, strict=True)):
            check_equal(hosted[0], host, span[0])
            if host.num_envs != span[1] - span[0]:
                raise UsageError(
                    f"{span[1] - span[0]} env makers made {host.num_envs} envs; each must make one."
                )
            descriptors = [*self.bells[number].descriptors, *self.done.descriptors]
            self.links[number].send(None, [self._board, self._ended], descriptors)
        super().__init__(len(makers), hosted[0].observation_space, hosted[0].action_space)
        self.info_fields = hosted[0].info_fields
        self.skips_rows = any(host.skips_rows for host in hosted)
        self.resets_singly = all(host.resets_singly for host in hosted)
        self.freezes = all(host.freezes for host in hosted)
        if all(host.time_limits is not None for host in hosted):
            self.time_limits = [limit for host in hosted for limit in host.time_limits or ()]
        self.poller = select.poll()
        for descriptor in (self.done.fileno(), *(link.sentinel for link in self.links)):
            self.poller.register(descriptor, select.POLLIN)

    # -- talking --------------------------------------------------------------------------------

    def ask(self, messages: Mapping[int, Any], memory: SharedMemory | None = None) -> list[Any]:
        """Send messages to processes, by number, and return their answers."""
        self.check_alive()
        self.turn += 1
        self.order[:2] = self.turn, ASK
        for number, message in messages.items():
            try:
                self.links[number].send((self.turn, message), [memory] if memory else [])
            except EOFError:
                self.lose(number)
            self.bells[number].ring()
        return self._answers(messages)

    def _answers(self, numbers: Iterable[int]) -> list[Any]:
        """Return an answer of each of these; the first failure is raised once all have come."""
        answers, failure = [], None
        for number in numbers:
            try:
                answers.append(self.answer(number))
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def answer(self, number: int) -> Any:
        """Wait for the answer of this turn, or for the death of who owes it."""
        link, turn, answer = self.links[number], -1, None
        while turn != self.turn:  # answers of turns that were given up are of no interest
            ready: list[Any] = list(wait([link, link.sentinel]))  # type: ignore[list-item]
            try:
                turn, answer = link.receive() if link in ready else self.lose(number)
            except EOFError:
                self.lose(number)
        if not isinstance(answer, Trouble):
            return answer
        cause, start = unpack_error(answer.error), self.spans[number][0]
        if not answer.call:
            raise cause
        index = None if answer.index is None else answer.index + start
        failure = CallFailed(index, answer.call, answer.message)
        failure.completed = [i + start for i in answer.completed]
        raise failure from cause

    def lose(self, number: int) -> NoReturn:
        """Say how a process has ended; the env is of no use any more."""
        link, (start, stop) = self.links[number], self.spans[number]
        how = ending(link.exit_code(None) or 0)
        self.dead = f"the process {link.pid} with envs {start} to {stop - 1} {how}"
        raise CallFailed(None, "step()", self.dead) from WorkerError(self.dead)

    def check_alive(self) -> None:
        """Refuse to go on after a process has ended."""
        if self.dead is not None:
            raise CallFailed(None, "step()", self.dead) from WorkerError(self.dead)

    # -- EnvGroup -------------------------------------------------------------------------------

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> _BoundParallel:
        everyone = range(len(self.links))
        while self._unused:
            self.ask(dict.fromkeys(everyone, Detach(self._unused.popleft())))
        memory = slab.memory
        assert isinstance(memory, SharedMemory)
        known = self._known.setdefault(memory, {})
        if slab.span not in known:
            number = next(self._numbers)
            first = slab.span[0]
            spans = [(first + start, first + stop) for start, stop in self.spans]
            layout = slab.layout
            self.ask({n: Attach(number, layout, span) for n, span in enumerate(spans)}, memory)
            known[slab.span] = number
            weakref.finalize(memory, self._unused.append, number)
            self._forget_descriptor(memory)
        number, mode = known[slab.span], BARE * bare + EAGER * eager
        if (number, mode) not in self._modes:
            self.ask(dict.fromkeys(everyone, Call("bind", (), number, mode)))
            self._modes.add((number, mode))
        return _BoundParallel(self, number, mode)

    def _forget_descriptor(self, memory: SharedMemory) -> None:
        """Close the descriptors of all but the newest slabs: a user may keep very many."""
        self._described.append(weakref.ref(memory))
        if len(self._described) > _OPEN_DESCRIPTORS:
            oldest = self._described.popleft()()
            if oldest is not None:
                oldest.close_descriptor()

    def seed(self, seeds: Sequence[int]) -> None:
        spans = enumerate(self.spans)
        self.ask({number: Call("seed", (seeds[i:j],)) for number, (i, j) in spans})

    def freeze(self, which: Sequence[int]) -> None:
        self.ask({n: Call("freeze", (some,)) for n, some in self.share(which).items()})

    def share(self, which: Sequence[int] | None) -> Mapping[int, list[int] | None]:
        """Return which of these envs each process has, by their number there."""
        if which is None:
            return dict.fromkeys(range(len(self.spans)))
        shares = {
            number: [int(i) - start for i in which if start <= i < stop]
            for number, (start, stop) in enumerate(self.spans)
        }
        return {number: some for number, some in shares.items() if some}

    def snapshot(self) -> list[Any] | None:
        snapshots = self.ask(dict.fromkeys(range(len(self.links)), Call("snapshot")))
        if any(one is None for one in snapshots):
            warnings.warn(
                "the envs of a ParallelEnv cannot be pickled, so this state holds no simulator "
                "state: resuming from it starts new episodes.",
                stacklevel=2,
            )
            return None
        return snapshots

    def restore(self, snapshot: list[Any]) -> None:
        self.ask({number: Call("restore", (one,)) for number, one in enumerate(snapshot)})

    def close(self) -> None:
        if self._ender.detach() is not None:
            self.dead = "this ParallelEnv is closed"
            _end(self.links, [*self.bells, self.done], self.order, _GRACE)


def _end(links: list[ProcessLink], bells: list[Bell], order: np.ndarray, grace: float) -> None:
    """End the processes: asked first, killed after some seconds."""
    order[1] = ASK
    for link, bell in zip(links, bells, strict=False):
        with contextlib.suppress(EOFError):
            link.send((0, None))
        bell.ring()
    deadline = monotonic() + grace
    for link in links:
        link.close(max(0.0, deadline - monotonic()))
    for bell in bells:
        bell.close()


class _BoundParallel:
    """The envs, writing into one slab."""

    def __init__(self, group: ParallelGroup, slab: int, mode: int) -> None:
        self._group, self._slab, self._mode = group, slab, mode
        self.eager = bool(mode & EAGER)
        self._rings = [bell.ring for bell in group.bells]

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        shares = self._group.share(which).items()
        mode = self._mode & BARE
        self._group.ask({n: Call("reset", (t, some), self._slab, mode) for n, some in shares})

    def step(self, t: int) -> Sequence[int]:
        group = self._group
        group.check_alive()
        group.turn += 1
        group.order[:] = group.turn, t, self._slab, self._mode
        for ring in self._rings:
            ring()
        self._await()
        _, ended, failed = group.own.sum(0).tolist()
        if failed:
            self._fail()
        return self._ended() if ended else ()

    def _await(self) -> None:
        """Wait until all processes have done their turn, or one of them has ended."""
        group, poll, turn = self._group, self._group.poller.poll, self._group.turn
        done, turns = group.done.fileno(), group.own[:, 0]
        looks = 0
        while (turns != turn).any():
            if group.cores and looks < _LOOKS:
                looks += 1
                os.sched_yield()
                continue
            for descriptor, _ in poll():
                if descriptor == done:
                    group.done.take()
                else:
                    group.lose([link.sentinel for link in group.links].index(descriptor))
            looks = 0

    def _ended(self) -> list[int]:
        group = self._group
        return [
            start + i
            for number, (start, stop) in enumerate(group.spans)
            if group.own[number, 1]
            for i in np.flatnonzero(group.ended[start:stop]).tolist()
        ]

    def _fail(self) -> NoReturn:
        """Raise the failure of a process; the envs of all others have made the step."""
        group = self._group
        failures: list[CallFailed] = []
        completed: list[int] = []
        for number, (start, stop) in enumerate(group.spans):
            if not group.own[number, 2]:
                completed.extend(range(start, stop))
                continue
            try:
                group.answer(number)
            except CallFailed as failure:
                completed.extend(failure.completed)
                failures.append(failure)
        failures[0].completed = completed
        raise failures[0]
