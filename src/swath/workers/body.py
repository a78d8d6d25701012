"""What a worker does: one runner, driven by messages.

It knows nothing of where it runs or of who reads its slabs; a port brings orders and memory and
takes reports back.
"""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swath.envs import as_group
from swath.envs.registry import bring_registered
from swath.errors import ClosedError
from swath.links import Channel, ProcessPort, pack, unpack
from swath.links.parcels import pack_error
from swath.memory import HeapMemory, Memory, SharedMemory, Slab
from swath.memory.weights import WeightBlock, WeightSpec, named_weights
from swath.observe import Shares
from swath.policies import made_by, policy_module
from swath.rollout import Filled, described, envs_in_words, runner_for
from swath.workers.messages import (
    Acknowledge,
    Attach,
    Begin,
    Built,
    Call,
    Close,
    Collect,
    Detach,
    Done,
    Failed,
    Job,
    Publish,
    PutState,
    Ready,
    Reset,
    Rolled,
    SetSeed,
    State,
    Store,
    TakeHeld,
    TakeState,
    Value,
    Weights,
)
from swath.workers.store import RolloutStore

__all__ = ["Worker", "main", "serve"]


def main(channel: Channel, payload: bytes) -> None:
    """Run a worker in a process of its own."""
    serve(ProcessPort(channel), payload)


def serve(port: Any, job: bytes) -> None:
    """Run the worker that a job describes, at the worker's end of a link."""
    try:
        worker = Worker(port, unpack(job))
    except Exception as error:
        port.send(Failed(pack_error(error)))
        return
    worker.run()


class Worker:
    """One runner and the memory that it was given.

    Args:
        port: The worker's end of a link.
        job: What to be.
    """

    def __init__(self, port: Any, job: Job) -> None:
        self._port, self._job = port, job
        port.on_push = self._pushed
        self._slabs: dict[int, Slab] = {}
        self._block: WeightBlock | None = None
        self._reader = 0
        self._store: RolloutStore | None = None
        self._inbox: deque[tuple[Any, Any]] = deque()  # read while a write waited
        if job.quiet:
            warnings.simplefilter("ignore")
        torch.set_num_threads(job.num_threads)
        bring_registered(job.registered)
        init_fn = unpack(job.init_fn)
        if init_fn is not None:
            init_fn()
        self._group = as_group(unpack(job.envs), unpack(job.env_kwargs))
        if job.copies_envs:  # or each copy would go on with the same random numbers
            self._group.seed([secrets.randbits(32) for _ in range(self._group.num_envs)])
        port.send(Built(self._group.num_envs))

    def _begin(self, message: Begin) -> None:
        policy = unpack(self._job.policy)
        if self._job.makes_policy:
            policy = made_by(policy)
        self._policy, module = policy, policy_module(policy)
        if module is not None:
            module.to(message.plan.devices.settled(self._group, policy)[1])
        self._runner = runner_for(self._group, policy, message.plan)
        self._weights = {} if module is None else named_weights(module)
        if not self._port.shares_memory:  # weights come by themselves, into memory of our own
            spec = WeightSpec.of(module)
            self._block = WeightBlock(spec, 1, HeapMemory(WeightBlock.nbytes(spec, 1)))
        fields = [place.field for place in self._runner.layout.places.values()]
        plan = described(self._runner, module is not None)
        spec, envs = WeightSpec.of(module), envs_in_words(self._runner)
        self._port.send(Ready(self._runner.interface, fields, spec, plan, envs))

    def run(self) -> None:
        """Follow messages until the one that says to end."""
        handlers: dict[type, Callable[..., None]] = {
            Begin: self._begin,
            Weights: self._use_block,
            Attach: self._attach,
            Detach: self._detach,
            Collect: self._collect,
            SetSeed: self._set_seed,
            Reset: self._reset,
            Acknowledge: self._acknowledge,
            TakeState: self._take_state,
            PutState: self._put_state,
            Call: self._call,
            Store: self._store_in,
            TakeHeld: self._take_held,
        }
        try:
            while True:
                message, memories = self._inbox.popleft() if self._inbox else self._port.receive()
                if isinstance(message, Close):
                    return
                try:
                    handlers[type(message)](message, *memories)
                except Exception as error:
                    self._port.send(Failed(pack_error(error)))
        finally:
            self._block = None  # memory of a GPU is given back by hand
            self._group.close()

    def _attach(self, message: Attach, memory: Memory) -> None:
        slab = Slab(message.layout, memory)
        if (message.start, message.stop) != (0, message.layout.envs):
            slab = slab.part(message.start, message.stop)
        if isinstance(memory, SharedMemory) and not self._group.needs_shared_memory:
            memory.close_descriptor()  # else its envs' own processes map it too
        self._slabs[message.slab] = slab

    def _detach(self, message: Detach) -> None:
        self._slabs.pop(message.slab, None)  # it may be another worker's, or of one before us

    def _use_block(self, message: Weights, memory: Memory) -> None:
        on_gpu = None
        if message.handle is not None:
            opened, arguments = message.handle
            on_gpu = opened(*arguments)
        self._block = WeightBlock(message.spec, message.readers, memory, on_gpu)
        self._reader = message.reader
        if isinstance(memory, SharedMemory):
            memory.close_descriptor()

    def _pushed(self, message: Publish, block: np.ndarray) -> None:
        """Take weights that were sent, in the thread that listens; the runner finds them."""
        assert self._block is not None
        self._block.publish_flat(block, message.missing, message.version, 0)

    def _store_in(self, message: Store, *memories: SharedMemory) -> None:
        if self._store is None:
            self._store = RolloutStore(unpack(message.finish), self._look_up)
        if message.handle is not None:
            self._store.attach(message.handle, *memories)
        self._port.send(Done())

    def _look_up(self) -> None:
        """Read messages while a write waits; the one that says to end ends that, too."""
        while self._port.waits():
            self._inbox.append(self._port.receive())
        if self._inbox and isinstance(self._inbox[-1][0], Close):  # nothing comes after it
            raise ClosedError("this worker was told to end.")

    def _take_held(self, message: TakeHeld) -> None:
        assert self._store is not None
        self._port.send(State(pack(self._store.held(message.clear), "trajectories")))

    def _set_seed(self, message: SetSeed) -> None:
        self._runner.set_seed(message.seed, message.static)
        self._cut()

    def _reset(self, message: Reset) -> None:
        self._runner.reset()
        self._cut()

    def _cut(self) -> None:
        if self._store is not None and self._store.assembler is not None:
            self._store.assembler.discard_open()
        self._port.send(Done())

    def _acknowledge(self, message: Acknowledge) -> None:
        self._runner.version = self._newest()
        self._port.send(Done())

    def _take_state(self, message: TakeState) -> None:
        self._runner.version = self._newest()  # as the next rollout would
        weights = {name: value.detach().cpu() for name, value in self._weights.items()}
        self._port.send(State(pack((self._runner.state_dict(), weights), "the state")))

    @torch.no_grad()
    def _put_state(self, message: PutState) -> None:
        state, weights = unpack(message.state)
        self._runner.load_state_dict(state)
        for name, value in weights.items():
            self._weights[name].copy_(value)
        self._port.send(Done())

    def _call(self, message: Call) -> None:
        envs = getattr(self._group, "envs", [self._group])
        about = SimpleNamespace(worker=self._job.number, envs=envs, policy=self._policy)
        self._port.send(Value(pack(unpack(message.function)(about), "what it returned")))

    def _collect(self, order: Collect) -> None:
        runner, slab = self._runner, self._slabs[order.slab]
        runner.version, runner.partial = self._newest(), None  # told of, or of a life before
        refresh = self._newest if self._job.refreshes else None
        try:
            filled = runner.collect(order.steps, slab, refresh, self._port.interrupted)
        except Exception as error:
            part = runner.partial
            done = (0, 0, None) if part is None else (part.steps, part.frames, part.mask)
            report: Failed | Rolled = Failed(pack_error(error), order.slab, *done)
        else:
            report = self._stored(order, filled)
        stored = self._store is not None and isinstance(report, Rolled)
        self._port.send(report, None if stored else slab.memory)

    def _stored(self, order: Collect, filled: Filled) -> Failed | Rolled:
        """Write a rollout to the replay buffer, if there is one for it, and tell of it."""
        runner, first, store = self._runner, None, self._store
        open_ids = list(runner.open_ids)
        if store is not None:
            try:
                first = store.put(runner.view(filled))
            except Exception as error:
                kept = (0, 0) if store.assembler else (filled.steps, filled.frames)
                return Failed(pack_error(error), order.slab, *kept, storing=True)
            if store.assembler is not None:
                open_ids = list({*open_ids, *store.assembler.ids()})
        shares, runner.shares = runner.shares, Shares()
        return Rolled(
            order.slab,
            filled.steps,
            filled.frames,
            runner.version,
            runner.finished,
            shares,
            open_ids,
            runner.all_frozen,
            first,
        )

    def _newest(self) -> int:
        """Take the newest weights if they are new, and return their version."""
        version = self._runner.version
        if self._block is not None and self._block.newest(self._reader) > version:
            version = self._block.take(self._reader, self._weights)
        return version
