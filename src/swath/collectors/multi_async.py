"""`MultiAsyncCollector` and `AsyncCollector`: whichever worker is done first is served first."""

from __future__ import annotations

from collections import deque
from typing import Any

from tensordict import TensorDict

from swath.collectors.multi import MultiCollector
from swath.collectors.options import Options
from swath.collectors.single import steps_for
from swath.errors import UsageError
from swath.memory import Layout, Slab, SlabPool
from swath.rollout import Filled, lend
from swath.workers.messages import Collect, Died, Failed, Rolled

__all__ = ["AsyncCollector", "MultiAsyncCollector"]

_AHEAD = 2
"""Rollouts of one worker that are ordered or wait to be delivered: it fills one meanwhile."""


class MultiAsyncCollector(MultiCollector):
    """Collect with several processes; each batch is a rollout of one of them, first come first.

    Workers go on while you train. New weights are taken between any two steps, so one batch may
    hold several versions: `("collector", "policy_version")` says which frame is of which, and
    `("collector", "worker")` who collected it. Nothing is dropped: a worker that is two rollouts
    ahead waits.

    Args:
        create_env_fn: An id or a callable that makes an env, for all workers, or a list of such
            with one entry for each worker. An entry may itself be a list: several envs.
        policy: None (random), a callable or `nn.Module` from observation to action, or a
            `tensordict.nn` module. Each worker gets a copy.
        **options: See `swath.collectors.Options`; `frames_per_batch` is that of one worker.

    Examples:
        >>> makers = ["CartPole-v1", "CartPole-v1"]
        >>> with MultiAsyncCollector(makers, frames_per_batch=50, total_frames=200) as collector:
        ...     sum(data.numel() for data in collector)
        200
    """

    _without: tuple[str, ...] = ("cat_results", "preemptive_threshold", "collect_ahead")
    _refreshes = True

    def _start(self) -> None:
        self._ordered: list[deque[tuple[Slab, int]]] = [deque() for _ in range(self.num_workers)]
        self._ready: deque[tuple[int, Slab, Rolled]] = deque()
        self._frozen: set[int] = set()
        super()._start()
        self._pools = [self._new_pool(worker) for worker in range(self.num_workers)]

    def _new_pool(self, worker: int) -> SlabPool:
        envs, plan = self._envs[worker], self._plans[worker]
        layout = Layout(self._forms.fields, plan.steps, envs, plan.memory_order)
        return SlabPool(lambda: self._new_slab(layout, {worker: (0, envs)}))

    def _steps(self) -> list[int]:
        frames = self.options.frames_per_batch
        each = [frames] * self.num_workers if isinstance(frames, int) else list(frames)
        if len(each) != self.num_workers:
            raise UsageError(
                f"frames_per_batch has {len(each)} entries for {self.num_workers} workers."
            )
        return [steps_for(one, envs) for one, envs in zip(each, self._envs, strict=True)]

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch; of the largest if the workers' differ."""
        return max(p.steps * n for p, n in zip(self._plans, self._envs, strict=True))

    # -- a batch --------------------------------------------------------------------------------

    def _gather(self, frames_left: float) -> tuple[TensorDict, int] | None:
        self._order(frames_left)
        while not self._ready:
            if not any(self._ordered):
                return None
            self._listen()
            self._order(frames_left)
        answer = self._lent(*self._ready.popleft())
        self._order(frames_left - answer[1])
        return answer

    def _lent(self, worker: int, slab: Slab, rolled: Rolled) -> tuple[TensorDict, int]:
        filled = Filled(slab, rolled.steps, rolled.frames)
        interface = self._forms.interface
        lead = (self._envs[worker],) if interface.batched else ()
        return lend(self._pools[worker], filled, interface.observations, lead), rolled.frames

    def _order(self, frames_left: float) -> None:
        """Order as many rollouts as may be under way, for those first who have fewest."""
        waiting = [sum(one[0] == w for one in self._ready) for w in range(self.num_workers)]
        left = frames_left - sum(rolled.frames for _, _, rolled in self._ready)
        for worker, orders in enumerate(self._ordered):
            left -= sum(steps * self._envs[worker] for _, steps in orders)
        most = None if self.options.max_lag is None else self.options.max_lag + 1
        busy = [waiting[w] + len(self._ordered[w]) for w in range(self.num_workers)]
        while left > 0 and (most is None or sum(busy) < most):
            free = [w for w in range(self.num_workers) if w not in self._frozen]
            worker = min(free, key=lambda w: (busy[w], self._made[w]), default=-1)
            if worker < 0 or busy[worker] >= _AHEAD:
                return
            envs = self._envs[worker]
            steps = int(min(self._plans[worker].steps, -(-left // envs)))
            self._send(worker, self._pools[worker].take(), steps)
            busy[worker] += 1
            left -= steps * envs

    def _send(self, worker: int, slab: Slab, steps: int) -> None:
        self._ordered[worker].append((slab, steps))
        self._crew.order(worker, Collect(slab.number, steps))

    def _listen(self) -> None:
        """Take the next report."""
        worker, report = self._crew.next()
        if isinstance(report, Rolled):
            self._count(worker, report)
            slab, _ = self._ordered[worker].popleft()
            if report.all_frozen:
                self._frozen.add(worker)
            if report.frames:
                self._ready.append((worker, slab, report))
            else:
                self._pools[worker].give_back(slab)
        elif isinstance(report, (Failed, Died)):
            self._mend(worker, report)

    def _mend(self, worker: int, event: Failed | Died) -> None:
        """Restart a worker and order again; otherwise raise, and keep what is whole."""
        orders = self._ordered[worker]
        try:
            self._recovered(worker, event)
        except BaseException:
            if isinstance(event, Died):
                orders.clear()
            else:
                slab, _ = orders.popleft()
                filled = Filled(slab, event.steps, event.frames, event.mask)
                self._keep(worker, filled)
            raise
        again = [steps for _, steps in orders]
        orders.clear()
        self._pools[worker] = self._new_pool(worker)
        for steps in again:
            self._send(worker, self._pools[worker].take(), steps)

    def _keep(self, worker: int, filled: Filled) -> None:
        """Keep what is whole of a broken rollout for `partial`."""
        if filled.steps:
            interface = self._forms.interface
            lead = (self._envs[worker],) if interface.batched else ()
            batch = lend(self._pools[worker], filled, interface.observations, lead)
            self._broken_rollouts.append((batch, filled.frames))

    # -- between batches ------------------------------------------------------------------------

    def _settle(self) -> None:
        for worker in range(self.num_workers):
            self._crew.interrupt(worker)
        while any(self._ordered):
            self._listen()
        for worker in range(self.num_workers):
            self._crew.interrupt(worker, False)
        while self._ready:
            self._held.append(self._lent(*self._ready.popleft()))


class AsyncCollector(MultiAsyncCollector):
    """Collect with one process beside yours, which goes on while you train.

    Args:
        create_env_fn: What `Collector` takes, except env objects: the worker makes its own.
        policy: As for `MultiAsyncCollector`.
        **options: See `swath.collectors.Options`; `frames_per_batch` is required.

    Examples:
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=50, total_frames=100) as collector:
        ...     [data.batch_size for data in collector]
        [torch.Size([50]), torch.Size([50])]
    """

    _without = (*MultiAsyncCollector._without, "num_workers")

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        super().__init__([create_env_fn], policy, **options)


for _kind in (MultiAsyncCollector, AsyncCollector):
    _kind.__signature__ = Options.signature(workers=True)  # type: ignore[attr-defined]
