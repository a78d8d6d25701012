"""`ParallelEnv`: envs in other processes, several in each.

```
  your process                        board: step t, slab k | a mark of each process
  Runner --step(t)--> ParallelGroup --bells--> process 0: envs 0 to 3 --+
     ^                     |        --------> process 1: envs 4 to 7 --+--> the slab, shared
     '------ done bells, or a sentinel: a process has ended -----------'
```

With c cores, c - 1 processes spin for their next step, since waking a core takes long; the others
share the core of your process, which sleeps until they are done, and looks at the board for the
rest. Nobody spins for long: then it sleeps until its bell rings.

Your process owns the slab, the board and the bells; a process owns its envs and writes their
columns of the slab: observations, rewards, flags and, unless an env that has ended is to stay so,
the first observation of the next episode. Shutdown: an empty message, wait, kill after some
seconds.

No order is given before all processes have done those before it (`hosted.py` says why). Ctrl-C can
break off the wait for one: then the next thing that is wanted of the envs waits for them first.
"""

from __future__ import annotations

import contextlib
import itertools
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
from swath.envs.group import Group, called
from swath.envs.hosted import (
    ASK,
    BARE,
    EAGER,
    ENDED,
    FAILED,
    TURN,
    Attach,
    Call,
    Detach,
    Hosted,
    Idle,
    Trouble,
    main,
)
from swath.envs.info import InfoNames
from swath.envs.joined import check_equal
from swath.envs.registry import pack_registered
from swath.errors import UsageError, WorkerError
from swath.links import Bell, ProcessLink, in_words, pack
from swath.links.launch import ending, in_worker
from swath.links.parcels import unpack_error
from swath.memory import SharedMemory, Slab, fence
from swath.owner import Owner, only_here
from swath.policies.choices import joined_masks
from swath.rollout import CallFailed
from swath.shield import Shield
from swath.system import check_can_start_workers, usable_cpus, yield_core

__all__ = ["ParallelEnv"]

_GRACE = 5.0
"""Seconds that processes have to end by themselves, if nothing else was said."""
_OPEN_DESCRIPTORS = 64
_SPINS, _LOOKS = 1000, 500
"""Looks at the board before a process, or this one, goes to sleep: some 300 us.

It can cost more to wake a core that sleeps than a step of a cheap env takes."""


class ParallelEnv(Env):
    """N envs in worker processes, stepped together, with batch size `[N]`.

    Args:
        num_envs: Number of envs.
        create_env_fn: An id or a function that makes one env, or a list of N of these with equal
            spaces.
        num_workers: Number of processes; by default one for each core, with the envs spread evenly.
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
        check_can_start_workers()
        workers = min(num_envs, num_workers or usable_cpus())
        with in_words(f"a ParallelEnv with {workers} processes cannot be made"):
            super().__init__(ParallelGroup(makers, workers, info_keys))


class ParallelGroup(Group):
    """Envs that other processes step."""

    needs_shared_memory = True

    def __init__(self, makers: Sequence[Any], workers: int, info_keys: InfoNames) -> None:
        bounds = [len(makers) * number // workers for number in range(workers + 1)]
        self.spans = list(itertools.pairwise(bounds))
        self._board, self._ended = SharedMemory(8 * (4 + workers)), SharedMemory(len(makers))
        words = self._board.array.view(np.int64).data
        self.order = words[:4]
        """The order, and of a step: which, in which slab, in which mode."""
        self.marks = words[4:]
        """Of each process: the last turn that it has done, with `ENDED` and `FAILED`."""
        self.ended = self._ended.array.data
        # This process sleeps while those that never spin have its core; the others have one each.
        # A worker of a collector leaves those to its like.
        cores = 1 if in_worker() else usable_cpus()
        self.spinning = min(workers, cores - 1)
        self.bells, self.done = [Bell() for _ in range(workers)], (Bell(), Bell())
        """Of each process, and rung when it is done: by those that spin, by those that sleep."""
        self.turn = self.settled = 0
        """The last turn, and the last one that all have done: less if a wait was broken off."""
        self.fit = True
        """Whether to step: not if a step was broken off, which some have made and others not."""
        self.shield = Shield()
        self.dead: str | None = None
        self.links: list[ProcessLink] = []
        self._unused: deque[int] = deque()
        self._numbers = itertools.count()
        self._modes: set[tuple[int, int]] = set()
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()
        self._described: deque[weakref.ref[SharedMemory]] = deque()
        bells = [*self.bells, *self.done]
        # The processes of a fork's parent are not the fork's to end.
        self._owner = Owner("ParallelEnv")
        self._ender = weakref.finalize(self, only_here(_kill), self.links, bells)
        with self.shield:
            try:
                called(self._start, makers, info_keys)
            except BaseException:
                self._ender()
                raise

    def _start(self, makers: Sequence[Any], info_keys: InfoNames) -> None:
        quiet, registered = swath.filter_warnings_subprocess, pack_registered()
        for number, (start, stop) in enumerate(self.spans):
            spins = _SPINS if number < self.spinning else 0
            job = makers[start:stop], info_keys, quiet, number, start, spins, registered
            self.links.append(ProcessLink(main, pack(job, "create_env_fn")))
        hosted: list[Hosted] = self._answers(range(len(self.links)))
        for number, (host, span) in enumerate(zip(hosted, self.spans, strict=True)):
            check_equal(hosted[0], host, span[0])
            if host.num_envs != span[1] - span[0]:
                raise UsageError(
                    f"{span[1] - span[0]} env makers made {host.num_envs} envs; each must make one."
                )
            done = self.done[number >= self.spinning]
            descriptors = [*self.bells[number].descriptors, *done.descriptors]
            try:
                self.links[number].send(None, [self._board, self._ended], descriptors)
            except EOFError:
                self.lose(number)
        super().__init__(len(makers), hosted[0].observation_space, hosted[0].action_space)
        self.take_forms(hosted[0])
        self.skips_rows = any(host.skips_rows for host in hosted)
        self.resets_singly = all(host.resets_singly for host in hosted)
        self.freezes = all(host.freezes for host in hosted)
        if any(host.masks_actions for host in hosted):
            self.action_masks = self._action_masks
        if all(host.time_limits is not None for host in hosted):
            self.time_limits = [limit for host in hosted for limit in host.time_limits or ()]
        split, marks = self.spinning, self.marks
        parts = ((marks[split:], self.done[1], 0), (marks[:split], self.done[0], _LOOKS))
        self.waits = [(*part, self._poller(part[1])) for part in parts if len(part[0])]
        """Whom to wait for: marks, the bell, how often to look before sleeping, who wakes."""

    def _action_masks(self) -> list[np.ndarray | None]:
        """Return what the envs of all processes allow just now."""
        answers = self.ask(dict.fromkeys(range(len(self.links)), Call("action_masks")))
        sizes = [stop - start for start, stop in self.spans]
        return [
            joined_masks(masks, leaf, sizes)
            for leaf, masks in zip(self.actions, zip(*answers, strict=True), strict=True)
        ]

    def _poller(self, done: Bell) -> select.poll:
        poller = select.poll()
        for descriptor in (done.fileno(), *(link.sentinel for link in self.links)):
            poller.register(descriptor, select.POLLIN)
        return poller

    # -- talking --------------------------------------------------------------------------------

    def ask(self, messages: Mapping[int, Any], memory: SharedMemory | None = None) -> list[Any]:
        """Send messages to processes, by number, and return their answers."""
        with self.shield:
            self.settle()
            return self._ask(messages, memory)

    def settle(self) -> None:
        """Wait until all processes have done an order that was broken off, if one was."""
        self.check_alive()
        if self.settled != self.turn:
            self.fit &= bool(self.order[0] & ASK)
            with self.shield:
                self._ask(dict.fromkeys(range(len(self.links)), Idle()), None)

    def _ask(self, messages: Mapping[int, Any], memory: SharedMemory | None) -> list[Any]:
        # Behind the shield: a message goes to all, and is read whole, or not at all. Ctrl-C comes
        # while an answer is waited for; that answer is skipped later, by its turn.
        self.turn += 1
        self.order[0] = TURN * self.turn | ASK
        fence()
        for number, message in messages.items():
            try:
                self.links[number].send((self.turn, message), [memory] if memory else [])
            except EOFError:
                self.lose(number)
            self.bells[number].ring()
        return self._answers(messages)

    def check_fit(self) -> None:
        """Refuse a step after one that was broken off."""
        self.settle()
        if not self.fit:
            raise UsageError(
                "the last step of this ParallelEnv was interrupted, so some of its envs may "
                "have made it and others not; call reset() before the next step."
            )

    def _answers(self, numbers: Iterable[int]) -> list[Any]:
        """Return an answer of each of these; the first failure is raised once all have come."""
        answers, failure = [], None
        for number in numbers:
            try:
                answers.append(self.answer(number))
            except Exception as error:
                failure = failure or error
        self.settled = self.turn
        if failure is not None:
            raise failure
        return answers

    def answer(self, number: int) -> Any:
        """Wait, behind the shield, for the answer of this turn or the death of who owes it."""
        link, turn, answer = self.links[number], -1, None
        while turn != self.turn:  # answers of turns that were broken off are of no interest
            with self.shield.lifted():
                ready: list[Any] = list(wait([link, link.sentinel]))  # type: ignore[list-item]
            try:
                turn, answer = link.receive() if link in ready else self.lose(number)
            except EOFError:
                self.lose(number)
        if not isinstance(answer, Trouble):
            return answer
        start = self.spans[number][0]
        cause = None if answer.error is None else unpack_error(answer.error)
        if cause is not None and not answer.call:
            raise cause
        index = None if answer.index is None else answer.index + start
        failure = CallFailed(index, answer.call, answer.message)
        failure.completed = [i + start for i in answer.completed]
        raise failure from cause

    def lose(self, number: int) -> NoReturn:
        """Raise an error that says how a process has ended; the env can no longer be used."""
        link, (start, stop) = self.links[number], self.spans[number]
        how = ending(link.exit_code(None) or 0)
        self.dead = f"the process {link.pid} with envs {start} to {stop - 1} {how}"
        self.fit = False
        raise CallFailed(None, "step()", self.dead) from WorkerError(self.dead)

    def check_alive(self) -> None:
        """Refuse to go on after a process has ended."""
        if self.dead is not None:
            raise CallFailed(None, "step()", self.dead) from WorkerError(self.dead)

    # -- EnvGroup -------------------------------------------------------------------------------

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> _BoundParallel:
        with self.shield:  # what processes know of slabs, and what they are known to know, is one
            self.settle()
            number, mode = self._attached(slab), BARE * bare + EAGER * eager
            if (number, mode) not in self._modes:
                self.ask(dict.fromkeys(range(len(self.links)), Call("bind", (), number, mode)))
                self._modes.add((number, mode))
        return _BoundParallel(self, number, mode)

    def _attached(self, slab: Slab) -> int:
        """Return the number of a slab that all processes have."""
        everyone = range(len(self.links))
        while self._unused:
            unused = self._unused.popleft()
            self._modes = {pair for pair in self._modes if pair[0] != unused}
            self.ask(dict.fromkeys(everyone, Detach(unused)))
        memory = slab.memory
        assert isinstance(memory, SharedMemory)
        known = self._known.setdefault(memory, {})
        if slab.span not in known:
            known[slab.span] = number = next(self._numbers)
            weakref.finalize(memory, self._unused.append, number)
            first = slab.span[0]
            spans = [(first + start, first + stop) for start, stop in self.spans]
            self.ask({n: Attach(number, slab.layout, span) for n, span in enumerate(spans)}, memory)
            self._forget_descriptor(memory)
        return known[slab.span]

    def _forget_descriptor(self, memory: SharedMemory) -> None:
        """Close the descriptors of all but the newest slabs: a user may keep very many."""
        self._described.append(weakref.ref(memory))
        if len(self._described) > _OPEN_DESCRIPTORS:
            oldest = self._described.popleft()()
            if oldest is not None:
                oldest.close_descriptor()

    def seed(self, seeds: Sequence[int]) -> None:
        spans = enumerate(self.spans)
        called(self.ask, {number: Call("seed", (seeds[i:j],)) for number, (i, j) in spans})

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
        messages = dict.fromkeys(range(len(self.links)), Call("snapshot"))
        snapshots: list[Any] = called(self.ask, messages)
        if any(one is None for one in snapshots):
            warnings.warn(
                "the envs of a ParallelEnv cannot be pickled, so the saved state does not "
                "include them: resuming from it starts new episodes.",
                stacklevel=2,
            )
            return None
        return snapshots

    def restore(self, snapshot: list[Any]) -> None:
        with self.shield:
            self._modes.clear()  # bound are the envs of before, which are gone
            self.restores += 1
            called(
                self.ask, {number: Call("restore", (one,)) for number, one in enumerate(snapshot)}
            )
            self.fit = True

    def close(self, timeout: float | None = None) -> None:
        with self.shield:
            if self._ender.detach() is None or not self._owner.is_here:
                return
            self.dead, self.fit = "this ParallelEnv is closed", False
            self.order[0] |= ASK
            try:
                for link, bell in zip(self.links, self.bells, strict=True):
                    with contextlib.suppress(EOFError):
                        link.send_last((0, None))
                    bell.ring()
                with self.shield.lifted():
                    until = monotonic() + (_GRACE if timeout is None else timeout)
                    for link in self.links:
                        link.exit_code(max(0.0, until - monotonic()))
            finally:
                _kill(self.links, [*self.bells, *self.done])


def _kill(links: list[ProcessLink], bells: list[Bell]) -> None:
    """End the processes that have not ended, and let go of all."""
    for link in links:
        link.close(0.0)
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
        if which is None:
            self._group.fit = True

    def step(self, t: int) -> Sequence[int]:
        group = self._group
        if group.settled != group.turn or not group.fit:
            group.check_fit()
        turn = group.turn = group.turn + 1
        order, number = group.order, TURN * turn
        order[1], order[2], order[3] = t, self._slab, self._mode
        fence()
        order[0] = number
        for ring in self._rings:
            ring()
        for part in group.waits:
            self._await(number, *part)
        fence()
        marks = group.marks.tolist()
        if max(marks) == number:
            group.settled = turn
            return ()
        if any(mark & FAILED for mark in marks):
            self._fail(marks)
        group.settled = turn
        return self._ended(marks)

    def _await(
        self, least: int, marks: memoryview, done: Bell, looks: int, poller: select.poll
    ) -> None:
        """Wait until processes have done their turn, or one of them has ended."""
        left = looks
        while min(marks.tolist()) < least:
            if left:
                left -= 1
                yield_core()
                continue
            for descriptor, _ in poller.poll():
                if descriptor == done.fileno():
                    done.take()
                else:
                    sentinels = [link.sentinel for link in self._group.links]
                    self._group.lose(sentinels.index(descriptor))
            left = looks

    def _ended(self, marks: Sequence[int]) -> list[int]:
        group = self._group
        return [
            start + i
            for mark, (start, stop) in zip(marks, group.spans, strict=True)
            if mark & ENDED
            for i, ended in enumerate(group.ended[start:stop])
            if ended
        ]

    def _fail(self, marks: Sequence[int]) -> NoReturn:
        """Raise the failure of a process; the envs of all others have made the step."""
        group = self._group
        failures: list[CallFailed] = []
        completed: list[int] = []
        with group.shield:
            for number, (start, stop) in enumerate(group.spans):
                if not marks[number] & FAILED:
                    completed.extend(range(start, stop))
                    continue
                try:
                    group.answer(number)
                except CallFailed as failure:
                    completed.extend(failure.completed)
                    failures.append(failure)
            group.settled = group.turn
        failures[0].completed = completed
        raise failures[0]
