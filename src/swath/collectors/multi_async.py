"""`MultiAsyncCollector` and `AsyncCollector`: whichever worker is done first is served first."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from swath.collectors.base import STORED
from swath.collectors.documented import document
from swath.collectors.jobs import each_of
from swath.collectors.multi import MultiCollector
from swath.collectors.single import steps_for
from swath.memory import Layout, Slab, SlabPool
from swath.rollout import Filled, Transfer, lend
from swath.workers.messages import Died, Failed, Rolled

__all__ = ["AsyncCollector", "MultiAsyncCollector"]

_ONE = "a batch holds the rollout of one worker"
_SYNC = "it is for MultiSyncCollector"
_AHEAD = 2
"""Rollouts of one worker that are ordered or wait to be delivered: it fills one meanwhile."""


@dataclass(frozen=True, eq=False)
class _Order:
    """A rollout that is under way or waits to be delivered."""

    number: int
    worker: int
    slab: Slab
    steps: int
    version: int
    """The newest at that time."""
    stored: bool
    """The worker writes it to the replay buffer."""


class MultiAsyncCollector(MultiCollector):
    """Collect with several processes; each batch is a rollout of the one that is done first.

    Workers go on collecting while you train. They take new weights between any two steps, so a
    batch may have frames of several versions: `("collector", "policy_version")` has the version of
    each frame, and `("collector", "worker")` the worker that collected it. Nothing is dropped: a
    worker that is two rollouts ahead waits.

    Args:
        create_env_fn: An id or a callable that makes an env, for all workers, or a list of such
            with one entry for each worker. An entry may itself be a list: several envs.
        policy: None (random), a callable or `nn.Module` from observation to action, or a
            `tensordict.nn` module. Each worker gets a copy.
        **options: See [options](options.md); `frames_per_batch` is that of one worker.

    Examples:
        >>> makers = ["CartPole-v1", "CartPole-v1"]
        >>> with MultiAsyncCollector(makers, frames_per_batch=50, total_frames=200) as collector:
        ...     sum(data.numel() for data in collector)
        200
    """

    _without: Mapping[str, str] = {
        "cat_results": f"{_ONE}, so there is nothing to concatenate; {_SYNC}",
        "preemptive_threshold": f"{_ONE}, which waits for no other; {_SYNC}",
        "collect_ahead": f"its workers continue while you train in any case; {_SYNC}",
    }
    _refreshes = True
    _batches_are = "batches of one worker each"

    def _start(self) -> None:
        self._ordered: dict[int, deque[_Order]] = {n: deque() for n in self._numbers}
        self._ready: list[tuple[_Order, Any, int]] = []
        self._owed: dict[int, list[int]] = {}
        self._order_numbers = itertools.count()
        self._frozen: set[int] = set()
        self._transfers: dict[int, Transfer | None] = {}
        super()._start()
        self._pools = {worker: self._new_pool(worker) for worker in self._numbers}

    def _new_pool(self, worker: int) -> SlabPool:
        envs, plan = self._envs[worker], self._plans[worker]
        layout = Layout(self._forms.fields, plan.steps, envs, plan.memory_order)
        self._transfers[worker] = self._transfer(layout, worker)
        return SlabPool(lambda: self._slabs.make(layout, {worker: (0, envs)}))

    def _steps(self) -> list[int]:
        each = each_of("frames_per_batch", self.options.frames_per_batch, self.num_workers)
        return [steps_for(one, self._envs[n]) for n, one in zip(self._numbers, each, strict=True)]

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch; of the largest if the workers' differ."""
        known = [number for number in self._numbers if number in self._envs]
        return max(self._plans[number].steps * self._envs[number] for number in known)

    # -- a batch --------------------------------------------------------------------------------

    def _gather(self, frames_left: float) -> tuple[Any, int] | None:
        self._order(frames_left, 1)
        while (place := self._next()) is None:
            if not any(self._ordered.values()) and not self._starting:
                return None
            self._listen()
            self._order(frames_left, 1)
        _, batch, frames = self._ready.pop(place)
        self._order(frames_left - frames, 0)
        return batch, frames

    def _next(self) -> int | None:
        """Return which of the rollouts that are ready is delivered; None to wait for another.

        First come, first served, unless that would make one that was ordered before too old.
        """
        if self.options.max_lag is None:
            return 0 if self._ready else None
        under_way = [one for orders in self._ordered.values() for one in orders]
        under_way = sorted([*under_way, *[one[0] for one in self._ready]], key=lambda o: o.number)
        for place, (order, _, _) in enumerate(self._ready):
            others = [one for one in under_way if one is not order]
            lags = (self._version + 1 + n - one.version for n, one in enumerate(others))
            if order is under_way[0] or all(lag <= self.options.max_lag for lag in lags):
                return place
        return None

    def _lent(self, worker: int, filled: Filled) -> TensorDict:
        interface, transfer = self._told[worker].interface, self._transfers[worker]
        lead = interface.batch_shape
        return lend(self._pools[worker], filled, interface.observations, lead, transfer)

    def _order(self, frames_left: float, wanted: int) -> None:
        """Order as many rollouts as may be under way, for those first who have fewest.

        Args:
            frames_left: How many frames may be delivered yet.
            wanted: How many batches are delivered before new weights can come: 1 or 0.
        """
        up = self._up()
        left = frames_left - sum(frames for _, _, frames in self._ready)
        for worker, orders in self._ordered.items():
            left -= sum(order.steps * self._envs[worker] for order in orders)
        for worker in self._starting:
            left -= sum(steps * self._envs[worker] for steps in self._owed.get(worker, ()))
        most = None if self.options.max_lag is None else self.options.max_lag + wanted
        busy = {w: len(self._ordered[w]) for w in up}
        for order, _, _ in self._ready:
            busy[order.worker] = busy.get(order.worker, 0) + 1
        while left > 0 and (most is None or sum(busy.values()) < most):
            free = [w for w in up if w not in self._frozen]
            worker = min(free, key=lambda w: (busy[w], self._rows[w].frames), default=-1)
            if worker < 0 or busy[worker] >= _AHEAD:
                return
            envs = self._envs[worker]
            steps = int(min(self._plans[worker].steps, -(-left // envs)))
            self._send(worker, self._pools[worker].take(), steps)
            busy[worker] += 1
            left -= steps * envs

    def _send(self, worker: int, slab: Slab, steps: int) -> None:
        number = next(self._order_numbers)
        order = _Order(number, worker, slab, steps, self._version, self._storing.on)
        self._ordered[worker].append(order)
        self._slabs.order(worker, slab, (0, self._envs[worker]), steps)

    def _rolled(self, worker: int, rolled: Rolled) -> None:
        order = self._ordered[worker].popleft()
        if rolled.all_frozen:
            self._frozen.add(worker)
        batch: Any = STORED
        if rolled.frames and not order.stored:
            batch = self._lent(worker, Filled(order.slab, rolled.steps, rolled.frames))
        else:
            self._pools[worker].give_back(order.slab)
        if rolled.frames:
            self._ready.append((order, batch, rolled.frames))

    def _forget_episodes(self, workers: Sequence[int]) -> None:
        super()._forget_episodes(workers)
        self._frozen.difference_update(workers)

    def _joined(self, worker: int) -> None:
        self._frozen.discard(worker)
        self._ordered[worker] = deque()
        self._pools[worker] = self._new_pool(worker)
        for steps in self._owed.pop(worker, ()):
            self._send(worker, self._pools[worker].take(), steps)

    def _left(self, worker: int) -> None:
        super()._left(worker)
        self._frozen.discard(worker)
        for kept in (self._ordered, self._pools, self._transfers, self._owed):
            kept.pop(worker, None)

    def _mend(self, worker: int, event: Failed | Died) -> None:
        orders = self._ordered.setdefault(worker, deque())
        try:
            self._recovered(worker, event)
        except Exception:
            if isinstance(event, Died):
                orders.clear()
            elif event.slab is not None:
                order = orders.popleft()
                if event.steps:  # what is whole, for `partial`
                    filled = Filled(order.slab, event.steps, event.frames, event.mask)
                    kept = (self._lent(worker, filled), event.frames)
                    self._broken_rollouts.append(kept)
            raise
        self._owed.setdefault(worker, []).extend(order.steps for order in orders)
        orders.clear()
        if isinstance(event, Died) and event.unplaced:
            del self._owed[worker]  # for others to make

    # -- between batches ------------------------------------------------------------------------

    def _settle(self) -> None:
        while any(self._ordered.values()):
            self._listen()
        self._held.extend(one[1:] for one in self._ready)
        self._ready.clear()


class AsyncCollector(MultiAsyncCollector):
    """Collect with one worker process, which goes on collecting while you train.

    Args:
        create_env_fn: What `Collector` takes, except env objects: the worker makes its own.
        policy: As for `MultiAsyncCollector`.
        **options: See [options](options.md); `frames_per_batch` is required.

    Examples:
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=50, total_frames=100) as collector:
        ...     [data.batch_size for data in collector]
        [torch.Size([50]), torch.Size([50])]
    """

    _without: Mapping[str, str] = {
        **MultiAsyncCollector._without,
        "num_workers": "it has one worker; use MultiAsyncCollector for several",
    }

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        super().__init__([create_env_fn], policy, **options)


_kinds: tuple[type, ...] = (MultiAsyncCollector, AsyncCollector)
for _kind in _kinds:
    document(_kind, "workers")
