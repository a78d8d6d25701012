"""`MultiSyncCollector`: one batch from all workers, each writing its part of one slab."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.collectors.base import STORED
from swath.collectors.documented import document
from swath.collectors.jobs import each_of
from swath.collectors.multi import MultiCollector
from swath.collectors.single import steps_for
from swath.collectors.writing import Parts, storage_dims
from swath.errors import UsageError
from swath.memory import Layout, Slab, SlabPool
from swath.rollout import Filled, keys, lend
from swath.workers.messages import Died, Failed, Rolled

__all__ = ["MultiSyncCollector"]


@dataclass
class _Round:
    """A batch in the making."""

    slab: Slab
    steps: dict[int, int]
    waiting: set[int]
    rows: dict[int, int] = field(default_factory=dict)
    """The rows that each worker has filled."""
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)
    stored: bool = False
    """Workers write it to the replay buffer."""
    frames: int = 0
    broken: set[int] = field(default_factory=set)
    """Those whose part failed."""
    absent: set[int] = field(default_factory=set)
    """Workers whose replacement Ray could not place in time; the batch has no part of them."""

    @property
    def failed(self) -> bool:
        return bool(self.broken)


class MultiSyncCollector(MultiCollector):
    """Collect with several processes; each batch has the rollouts of all of them.

    Strictly on-policy: each rollout begins with the newest published weights.

    Args:
        create_env_fn: An id or a callable that makes an env, for all workers, or a list of such
            with one entry for each worker. An entry may itself be a list: several envs.
        policy: None (random), a callable or `nn.Module` from observation to action, or a
            `tensordict.nn` module. Each worker gets a copy.
        **options: See [options](options.md); `frames_per_batch` is required.

    Examples:
        >>> makers = ["CartPole-v1", "CartPole-v1"]
        >>> with MultiSyncCollector(makers, frames_per_batch=100, total_frames=200) as collector:
        ...     for data in collector:
        ...         print(data.batch_size)
        torch.Size([2, 50])
        torch.Size([2, 50])
    """

    _without: Mapping[str, str] = {
        "max_lag": "its rollouts begin with the newest weights in any case; the option is for "
        "MultiAsyncCollector"
    }
    _batches_are = "batches of all workers"

    def _start(self) -> None:
        self._round: _Round | None = None
        super()._start()
        self._use(self._numbers)

    def _use(self, members: Sequence[int]) -> None:
        """Let the next batches be of these workers."""
        stops = list(itertools.accumulate(self._envs[number] for number in members))
        spans = zip([0, *stops], stops, strict=False)
        self._members = dict(zip(members, spans, strict=True))
        # A worker's lone env is one row among the envs of others who have several.
        self._batched = any(self._told[number].interface.batched for number in members)
        self._lead = self._arranged()
        longest = max(self._plans[number].steps for number in members)
        layout = Layout(self._forms.fields, longest, stops[-1], self.options.memory_order)
        spans_now = self._members
        self._pool = SlabPool(lambda: self._slabs.make(layout, spans_now))
        storing = {str(self.options.devices(number).storing) for number in members}
        if len(storing) > 1:
            raise UsageError(
                f"storing_device is {sorted(storing)}; but a batch of all workers is stored on "
                "one device. Give one device, or use MultiAsyncCollector."
            )
        self._moved = self._transfer(layout, members[0])

    def _steps(self) -> list[int]:
        frames, envs = self.options.frames_per_batch, list(self._envs.values())
        if isinstance(frames, int):
            return [steps_for(frames, sum(envs))] * self.num_workers
        each = each_of("frames_per_batch", frames, self.num_workers)
        return [steps_for(*pair) for pair in zip(each, envs, strict=True)]

    def _arranged(self) -> tuple[int, ...]:
        """Return how the envs of all workers are arranged in a batch, before any concatenation."""
        envs = [self._envs[number] for number in self._members]
        steps = [self._plans[number].steps for number in self._members]
        batched, total = self._batched, sum(envs)
        if self._assembler is not None:
            return (total,)
        even, even_steps = len(set(envs)) == 1, len(set(steps)) == 1
        how = self.options.cat_results
        if not even and how != 0:
            raise UsageError(
                f"the workers have {envs} envs; with different numbers of envs, cat_results "
                "must be 0."
            )
        if not even_steps and (how == "stack" or (how == 0 and batched)):
            raise UsageError(
                f"the workers make {steps} steps; with different numbers of steps, cat_results "
                "must be -1."
            )
        if not batched:
            return (len(envs),)
        leads = [self._told[number].interface.batch_shape or (1,) for number in self._members]
        if len({lead[how == 0 :] for lead in leads}) > 1:
            raise UsageError(
                f"the envs of the workers are arranged as {leads}, which cannot be put into one "
                "batch. Give all workers the same kind of envs, or use MultiAsyncCollector."
            )
        if how == 0:
            return (sum(lead[0] for lead in leads), *leads[0][1:])
        return (len(envs), *leads[0])

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch."""
        return sum(self._plans[number].steps * self._envs[number] for number in self._members)

    # -- a batch --------------------------------------------------------------------------------

    def _gather(self, frames_left: float) -> tuple[Any, int] | None:
        if self._round is not None and self._round.failed:
            self._finish()  # nobody asked for what was left of it
            self._round = None
        if self._round is None:
            self._begin(frames_left)
        return self._delivered(frames_left)

    def _delivered(self, frames_left: float) -> tuple[Any, int] | None:
        self._finish()
        done, self._round = self._round, None
        assert done is not None
        # Envs that stay ended go on filling rows, but no row of theirs is a frame.
        if not done.frames and len(done.frozen | done.absent) == len(self._members):
            self._pool.give_back(done.slab)
            return None
        batch, frames = self._outcome(done)
        if self.options.collect_ahead and frames_left - frames > 0:
            self._begin(frames_left - frames)
        return batch, frames

    def _begin(self, frames_left: float) -> None:
        """Order one rollout of each worker."""
        self._block.direct()
        known = {*self._members, *self._up()}  # members may be started again meanwhile
        members = [n for n in self._numbers if n in known and n not in self._unplaced]
        if members != list(self._members):
            self._use(members)
        whole = self.frames_per_batch
        left = int(min(frames_left, whole))
        steps = {n: -(-self._plans[n].steps * left // whole) for n in self._members}
        slab = self._pool.take()
        if self._supervisor.restart and not self._slabs.can_share(slab):
            slab = self._pool.make()  # one that a restarted worker can be given
        self._round = _Round(slab, steps, set(self._members), stored=self._storing.on)
        for worker, count in steps.items():
            if worker not in self._starting:
                self._crew.interrupt(worker, False)
                self._slabs.order(worker, slab, self._members[worker], count)

    def _finish(self) -> None:
        """Wait until all workers have told of their part; a failure is raised or mended."""
        current = self._round
        assert current is not None
        while current.waiting:
            self._listen()

    def _rolled(self, worker: int, rolled: Rolled) -> None:
        current = self._round
        assert current is not None
        current.rows[worker] = rolled.steps
        current.frames += rolled.frames
        if rolled.all_frozen:
            current.frozen.add(worker)
        current.waiting.discard(worker)
        self._preempt(current)

    def _preempt(self, current: _Round) -> None:
        """Stop those who are not done once enough are."""
        threshold = self.options.preemptive_threshold
        if threshold is not None and len(current.rows) >= threshold * len(self._members):
            for worker in current.waiting:
                self._crew.interrupt(worker)

    def _mend(self, worker: int, event: Failed | Died) -> None:
        current = self._round
        told = current is not None and current.failed
        try:
            self._recovered(worker, event)
        except Exception:
            if current is not None:
                self._give_up(current, worker, event)
            if not told:  # the first failure of a round is the one that is told
                raise
        if current is not None and worker in self._unplaced:
            current.waiting.discard(worker)
            current.absent.add(worker)

    def _joined(self, worker: int) -> None:
        current = self._round
        if worker in self._members:
            self._pool = SlabPool(self._pool.make)  # of slabs that this one knows, too
        if current is not None and worker in current.waiting:
            span = self._members[worker]
            self._slabs.share(current.slab, worker, span)
            self._slabs.order(worker, current.slab, span, current.steps[worker])
            if current.failed:
                self._crew.interrupt(worker)

    def _give_up(self, current: _Round, worker: int, event: Failed | Died) -> None:
        """Note what is whole of a round that fails, and stop the others."""
        current.broken.add(worker)
        if isinstance(event, Failed) and event.slab is not None:
            current.rows[worker] = event.steps
            if event.mask is not None:
                current.masks[worker] = event.mask
        current.waiting.discard(worker)
        for other in current.waiting:
            self._crew.interrupt(other)

    def _outcome(self, done: _Round) -> tuple[Any, int]:
        """Return a round as a batch, and its frames; only what is not in the replay buffer."""
        if done.stored and not done.failed:
            self._pool.give_back(done.slab)
            return STORED, done.frames
        if done.stored:
            self._frames += done.frames
            done.rows = {worker: done.rows.get(worker, 0) for worker in done.broken}
        return self._batch(done)

    def _batch(self, done: _Round) -> tuple[TensorDict | Parts, int]:
        """Return a round as a batch, and its frames."""
        steps = max(done.rows.values(), default=0)
        mask = self._mask(done, steps)
        own = done.slab.arrays.get(keys.MASK)
        if own is not None:
            own[:steps] &= mask
            frames, mask_beside = int(own[:steps].sum()), None
        else:
            frames, mask_beside = int(mask.sum()), None if mask.all() else mask
        batch = lend(
            self._pool,
            Filled(done.slab, steps, frames, mask_beside),
            self._forms.interface.observations,
            self._lead,
            self._moved,
        )
        if mask_beside is not None and not done.failed and self._assembler is None:
            batch.del_(keys.MASK)  # rows that some workers do not have are cut off here
        if self._output.into_torchrl and self._assembler is None and not done.failed:
            parts = self._parts(batch, done)
            if parts and parts[0].batch_dims >= storage_dims(self.options.replay_buffer):
                return parts, frames
        return self._concatenated(batch, done), frames

    def _parts(self, batch: TensorDict, done: _Round) -> Parts:
        """Return what each worker has made by itself, in as many steps as it has made."""
        parts = Parts()
        for place, (worker, span) in enumerate(self._members.items()):
            if worker in done.absent:
                continue
            which = slice(*span) if len(self._lead) == 1 and self._batched else place
            part: TensorDict = batch[which][..., : done.rows.get(worker, 0)]
            if self.options.preemptive_threshold is not None and part[keys.MASK].all():
                part.del_(keys.MASK)  # it was for those who have fewer steps
            if part.numel():
                parts.append(part)
        return parts

    def _mask(self, done: _Round, steps: int) -> np.ndarray:
        """Return which rows were filled, `[T, N]`, after clearing those that were not."""
        mask = np.ones((steps, done.slab.layout.envs), bool)
        for worker, (start, stop) in self._members.items():
            rows = done.rows.get(worker, 0)
            mask[rows:, start:stop] = False
            if worker in done.masks:
                mask[:rows, start:stop] &= done.masks[worker]
            if rows < steps:
                for key, array in done.slab.arrays.items():
                    array[rows:steps, start:stop] = -1 if key == keys.TRAJ_IDS else 0
        return mask

    def _concatenated(self, batch: TensorDict, done: _Round) -> TensorDict:
        """Return the batch joined along time, if that was asked for; this copies."""
        how = self.options.cat_results
        if self._assembler is not None:
            return batch
        if how == "stack" or (how == 0 and self._batched):
            return self._of_those_there(batch, done) if done.absent else batch
        parts = [batch[i][..., : done.rows.get(w, 0)] for i, w in enumerate(self._members)]
        joined: TensorDict = torch.cat(parts, -1)
        joined.names = [*[None] * (joined.batch_dims - 1), "time"]
        return joined

    def _of_those_there(self, batch: TensorDict, done: _Round) -> TensorDict:
        """Return the batch without the rows of those who had no part in it; this copies."""
        there = [worker for worker in self._members if worker not in done.absent]
        if self.options.cat_results == "stack":
            rows = [list(self._members).index(worker) for worker in there]
        else:
            each = math.prod(self._lead[1:])
            rows = [
                row
                for start, stop in (self._members[worker] for worker in there)
                for row in range(start // each, stop // each)
            ]
        fewer: TensorDict = batch[rows]
        fewer.names = batch.names
        return fewer

    # -- between batches ------------------------------------------------------------------------

    def _publishes_later(self) -> bool:
        return self._round is not None and bool(self._round.waiting)

    def _settle(self) -> None:
        self._end_round()
        self._block.direct()

    def _end_round(self) -> None:
        if self._round is not None:
            self._finish()
            done, self._round = self._round, None
            if any(done.rows.values()):
                outcome = self._outcome(done)
                if outcome[1]:  # else all rows are of envs that stay ended
                    (self._broken_rollouts if done.failed else self._held).append(outcome)

    def _broken(self) -> TensorDict | None:
        if self._round is not None and self._round.failed:
            self._settle()
        return super()._broken()


document(MultiSyncCollector, "workers")
