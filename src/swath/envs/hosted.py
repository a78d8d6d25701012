"""What a process of a `ParallelEnv` does: host a group of envs and step it when the bell rings.

```
 board:  | order | step, slab, mode | mark of each process |     beside it: who has ended
 order:  TURN * turn, a step, or TURN * turn | ASK: a message is in the channel, or will be
```

*The order alone decides*: whether there is anything to do, and whether that is a step. A bell says
only that it is worth a look, and may ring late, or for nothing. Of the other words a process reads
none before it has seen the order of a step that it has not made, and your process stores the order
after them. It changes none of them before all processes have done with that order: they have marked
its turn, or have answered what was asked after it. So whoever is halted between any two stores or
reads, for however long, no step is made twice, none with the words of another, and none is missed.

A process marks a turn when all that it wrote in it is there. A failure follows through the channel,
behind the mark: your process reads that then, however long it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from swath.envs.make import as_group
from swath.envs.registry import bring_registered
from swath.links import Bell, Channel, ProcessPort, unpack
from swath.links.parcels import pack_error
from swath.memory import Field, Layout, SharedMemory, Slab, fence
from swath.rollout import BoundEnvs, CallFailed, EnvGroup, Outcome
from swath.rollout.keys import following
from swath.system import yield_core
from swath.tree import Leaf

__all__ = [
    "ASK",
    "BARE",
    "EAGER",
    "ENDED",
    "FAILED",
    "TURN",
    "Attach",
    "Call",
    "Detach",
    "Hosted",
    "Idle",
    "Trouble",
    "main",
]

ASK = 1
"""In an order: it is no step, but a message in the channel."""
BARE, EAGER = 1, 2
"""Parts of a mode; see `EnvGroup.bind`."""
ENDED, FAILED, TURN = 1, 2, 4
"""A mark is `TURN` times the turn that a process has done, and whether envs ended or one failed."""


@dataclass(frozen=True)
class Hosted:
    """What the parent needs to know of the envs."""

    num_envs: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    observations: Sequence[Leaf]
    actions: Sequence[Leaf]
    info_fields: list[Field]
    outcome: Outcome
    time_limits: Sequence[int | None] | None
    skips_rows: bool
    resets_singly: bool
    freezes: bool
    masks_actions: bool


@dataclass(frozen=True)
class Attach:
    """A slab to write into; comes with its memory."""

    slab: int
    layout: Layout
    span: tuple[int, int]


@dataclass(frozen=True)
class Detach:
    """A slab that is used no more."""

    slab: int


@dataclass(frozen=True)
class Idle:
    """Nothing; who answers has done all that came before."""


@dataclass(frozen=True)
class Call:
    """Call a method of the group, or of the group bound to a slab; answered by what it returns."""

    name: str
    args: tuple[Any, ...] = ()
    slab: int | None = None
    mode: int = 0


@dataclass(frozen=True)
class Trouble:
    """A call failed; the error is that of the env, if it raised one."""

    error: bytes | None
    index: int | None = None
    call: str = ""
    message: str | None = None
    completed: Sequence[int] = ()


def main(channel: Channel, payload: bytes) -> None:
    """Run a process of a `ParallelEnv`."""
    port = ProcessPort(channel)
    makers, info_keys, quiet, number, start, spins, registered = unpack(payload)
    if quiet:
        warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bring_registered(registered)
    try:
        group = as_group(makers, None, info_keys)
    except Exception as error:
        port.send((0, _trouble(error)))
        return
    try:
        _Host(port, group, number, start).run(spins)
    finally:
        group.close()


class _Host:
    """A group of envs, the slabs that it writes into and the board that says when."""

    def __init__(self, port: ProcessPort, group: EnvGroup, number: int, start: int) -> None:
        self._port, self._group = port, group
        hosted = Hosted(
            group.num_envs,
            group.observation_space,
            group.action_space,
            group.observations,
            group.actions,
            group.info_fields,
            group.outcome,
            group.time_limits,
            group.skips_rows,
            group.resets_singly,
            group.freezes,
            group.action_masks is not None,
        )
        port.send((0, hosted))
        _, (board, ended) = port.receive()
        each = len(port.descriptors) // 2
        self._bell = Bell(tuple(port.descriptors[:each]))
        self._done = Bell(tuple(port.descriptors[each:]))
        words = board.array.view(np.int64).data
        self._order, self._mark = words[:4], words[4 + number : 5 + number]
        self._ended = ended.array[start : start + group.num_envs]
        self._slabs: dict[int, Slab] = {}
        self._bound: dict[tuple[int, int], BoundEnvs] = {}
        self._steps: dict[tuple[int, int], Callable[[int], Sequence[int]]] = {}

    def run(self, spins: int) -> None:
        """Do what the board says when it changes or the bell rings, until that is gone."""
        done, orders = 0, self._order
        while True:
            for _ in range(spins):
                if orders[0] != done:
                    break
                yield_core()  # if anybody else wants this core, it is theirs
            # A step that is seen needs no bell. To wait for its ring could put this core to sleep,
            # so that is taken later: whoever has nothing to do then looks once more, and sleeps.
            order = orders[0]
            if order == done or order & ASK:
                if not self._bell.take():
                    return
                order = orders[0]
            fence()
            if order & ASK:
                if not self._answer_all():
                    return
            elif order != done:  # a ring may be left over
                self._step(order)
                done = order

    def _step(self, order: int) -> None:
        """Step the envs, mark that, and tell of a failure."""
        _, t, slab, mode = self._order.tolist()
        flags, trouble = 0, None
        try:
            ended = self._steps[slab, mode](t)
        except BaseException as error:
            flags, trouble = FAILED, _trouble(error, "step()")
        else:
            if len(ended):
                flags = ENDED
                self._ended.fill(0)
                self._ended[ended] = 1
        fence()
        self._mark[0] = order | flags
        self._done.ring()
        if trouble is not None:
            self._port.send((order // TURN, trouble))

    def _answer_all(self) -> bool:
        """Answer the messages that wait; False if one says that this is the end."""
        while self._port.waits():
            (turn, message), memories = self._port.receive()
            if message is None:
                return False
            try:
                answer = self._answered(message, memories)
            except BaseException as error:
                answer = _trouble(error)
            self._port.send((turn, answer))
        return True

    def _answered(self, message: Any, memories: list[SharedMemory]) -> Any:
        if isinstance(message, Attach):
            self._slabs[message.slab] = Slab(message.layout, memories[0]).part(*message.span)
            if not self._group.needs_shared_memory:
                memories[0].close_descriptor()
        elif isinstance(message, Detach):
            del self._slabs[message.slab]
            for kept in (self._bound, self._steps):
                for key in [key for key in kept if key[0] == message.slab]:
                    del kept[key]
        elif isinstance(message, Idle):
            return None
        elif message.slab is None:
            if message.name == "restore":  # what is bound is bound to the envs of before
                self._bound.clear()
                self._steps.clear()
            return getattr(self._group, message.name)(*message.args)
        else:
            bound = self._binding(message.slab, message.mode)
            if message.name == "bind":
                return None
            return getattr(bound, message.name)(*message.args)
        return None

    def _binding(self, number: int, mode: int) -> BoundEnvs:
        """Return the envs bound to a slab, and have their step ready."""
        if (number, mode) not in self._bound:
            slab = self._slabs[number]
            bound = self._group.bind(slab, bare=bool(mode & BARE))
            self._bound[number, mode] = bound
            self._steps[number, mode] = self._eager(slab, bound) if mode & EAGER else bound.step
        return self._bound[number, mode]

    def _eager(self, slab: Slab, bound: BoundEnvs) -> Callable[[int], Sequence[int]]:
        """Return the step that also writes next observations and starts new episodes."""
        whole: list[tuple[np.ndarray, np.ndarray]] = []
        at_ends: list[tuple[np.ndarray, np.ndarray]] = []
        observed = [leaf.key for leaf in self._group.observations]
        for key in (*observed, *self._group.outcome.carried):
            pair = slab.arrays[following(key)], slab.arrays[key]
            delivered = slab.layout.places[following(key)].field.delivered
            (whole if delivered else at_ends).append(pair)

        def step(t: int) -> Sequence[int]:
            try:
                ended = bound.step(t)
            except CallFailed as failure:
                which = list(failure.completed)
                for after, current in (*whole, *at_ends):
                    after[t, which] = current[t + 1, which]
                raise
            for after, current in whole:
                after[t] = current[t + 1]
            if len(ended):
                which = list(ended)
                for after, current in at_ends:
                    after[t, which] = current[t + 1, which]
                try:
                    bound.reset(t + 1, ended)
                except CallFailed as failure:
                    failure.completed = list(range(self._group.num_envs))
                    raise
            return ended

        return step


def _trouble(error: BaseException, call: str = "") -> Trouble:
    if isinstance(error, CallFailed):
        parcel = None if error.__cause__ is None else pack_error(error.__cause__)
        return Trouble(parcel, error.index, error.call, error.message, error.completed)
    return Trouble(pack_error(error), call=call)
