"""From a rollout to what is delivered, or written to a replay buffer.

A buffer of swath's, or any object with `extend`, gets a batch as the user would. TorchRL's own
collectors write what each worker has made by itself: frames, or one row for each env where the
worker has several. Its storages and samplers are made for that form: one that has seen `[T]` takes
nothing else, and its `SliceSampler` wants one dimension. So `MultiSyncCollector` gives one of
TorchRL's buffers not a batch of all workers but the part of each, and whole trajectories come end
to end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.options import Options
from swath.data import RayReplayBuffer, ReplayBuffer
from swath.data.runs import Stream
from swath.rollout.keys import FINAL, FINAL_OBS
from swath.workers.store import Finish

__all__ = ["Output", "Parts", "storage_dims"]


class Parts(list[TensorDictBase]):
    """A batch of all workers as the part of each, to be written one after the other."""

    def clone(self) -> Parts:
        """Return copies of all parts."""
        return Parts(part.clone() for part in self)

    def joined(self) -> TensorDictBase | None:
        """Return the parts as one batch, in which each is a row if they are alike."""
        if len({part.batch_size for part in self}) > 1:
            return torch.cat([part.reshape(-1) for part in self])
        return torch.stack(list(self)) if self else None


class Output:
    """What becomes of a rollout in your process.

    Args:
        options: Of the collector.
    """

    def __init__(self, options: Options) -> None:
        self._options, self.buffer = options, options.replay_buffer
        self.hook = options.post_collect_hook
        self.into_torchrl = _is_torchrls(self.buffer)
        """The replay buffer is one of TorchRL's."""
        self.finishing = Finish(
            options.trajs_per_batch,
            "cat" if self.into_torchrl else options.traj_format,
            options.split_trajs,
            options.postproc,
        )
        self.stream = Stream()
        """What is written to the buffer."""

    def processed(self, batch: Any) -> Any:
        """Return a batch split and processed as asked for, after the hook has seen it."""
        options = self._options
        batch = self.finishing(batch)
        storing = options.storing_device or options.device
        if storing is None and options.env_device == options.policy_device:
            storing = options.env_device
        if isinstance(storing, (str, torch.device)) and isinstance(batch, TensorDictBase):
            batch = batch.to(storing)  # mostly it is there, and only says so from now on
        if self.hook is not None:
            self.hook(batch)
        return batch

    def write(self, batch: Any, on_written: Callable[[], object]) -> None:
        """Write to the replay buffer; if Ctrl-C comes behind that, let it be known as written."""
        if self.into_torchrl and self._options.compact_obs:
            # A storage that keeps frames would keep the table of a whole batch for each of them.
            # TorchRL's NextStateReconstructor does without: it marks the ends of trajectories.
            batch = batch.exclude(FINAL, FINAL_OBS)
        written = _amount(self.buffer)
        try:
            self.stream.write(self.buffer, batch)
        except KeyboardInterrupt:
            if _amount(self.buffer) != written:  # then not once more
                on_written()
            raise


def _is_torchrls(buffer: Any) -> bool:
    """Tell whether a replay buffer is of one of TorchRL's classes, or of a subclass of one."""
    if isinstance(buffer, (ReplayBuffer, RayReplayBuffer)):
        return False
    return any(one.__module__.startswith("torchrl.") for one in type(buffer).__mro__)


def _amount(buffer: Any) -> int:
    """Return how much was written to a buffer so far, if it counts that; else 0."""
    return int(getattr(buffer, "writes", getattr(buffer, "write_count", 0)))


def storage_dims(buffer: Any) -> int:
    """Return how many batch dimensions the storage of one of TorchRL's buffers keeps apart."""
    return int(getattr(getattr(buffer, "storage", None), "ndim", 1))
