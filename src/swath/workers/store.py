"""From rollouts to what a replay buffer gets; and a worker that writes it there itself.

```
  worker:         rollout --> whole trajectories? --> split? postproc? --> extend --> Rolled
                                                        |  no memory yet: it waits here
  your process:                              Rolled(first frame) --> prepare --> Store(handle)
```

*Who owns what.* Your process makes the buffer and its memory; a worker maps it and owns the rows
that it writes until they are whole (data/storage.py). It also owns trajectories that are not whole
yet; your process asks for them when it needs them. A worker that waits for samples to be drawn
reads its messages meanwhile, so that it can be told to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tensordict import TensorDictBase

from swath.data import ReplayBuffer
from swath.data.runs import Stream
from swath.data.storage import Handle
from swath.delivery.split import split_trajectories
from swath.delivery.trajectories import TrajectoryAssembler
from swath.errors import UsageError
from swath.links import pack, unpack
from swath.memory import SharedMemory

__all__ = ["Finish", "RolloutStore"]


@dataclass(frozen=True)
class Finish:
    """What becomes of rollouts before somebody gets them."""

    trajs_per_batch: int | None
    traj_format: Literal["padded", "cat"]
    split_trajs: bool
    postproc: Callable[[Any], Any] | None

    def assembler(self) -> TrajectoryAssembler | None:
        """Return what puts whole trajectories together, if that is asked for."""
        if self.trajs_per_batch is None:
            return None
        return TrajectoryAssembler(self.trajs_per_batch, self.traj_format)

    def __call__(self, batch: Any) -> Any:
        """Return what is delivered for a rollout, or for whole trajectories."""
        if self.split_trajs:
            batch = split_trajectories(batch)
        if self.postproc is None:
            return batch
        done = self.postproc(batch)
        if done is None:
            raise UsageError(
                "postproc returned None; expected the batch that is to be delivered. It must "
                "return the batch, even if it changes the batch in place."
            )
        return done


class RolloutStore:
    """A worker's way into the replay buffer.

    Args:
        finish: What is done with rollouts before.
        watch: Called while a write waits.
    """

    def __init__(self, finish: Finish, watch: Callable[[], None]) -> None:
        self._finish, self._watch = finish, watch
        self.assembler = finish.assembler()
        self._buffer: Any = None
        self._stream = Stream()
        self._waiting: list[TensorDictBase] = []

    def attach(self, handle: Handle | bytes, *memory: SharedMemory) -> None:
        """Write what has waited for this, and all that comes."""
        if isinstance(handle, bytes):
            self._buffer = unpack(handle)
        else:
            self._buffer = ReplayBuffer.attached(handle, *memory)
        self._buffer.watch = self._watch
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self._stream.write(self._buffer, batch)

    def put(self, rollout: TensorDictBase) -> bytes | None:
        """Write a rollout; return a first frame, packed, as long as there is no memory for it."""
        batches: Iterable[Any] = [rollout]
        if self.assembler is not None:
            self.assembler.push(rollout)
            batches = iter(self.assembler.pop, None)
        for batch in batches:
            finished = self._finish(batch)
            if self._buffer is None:
                self._waiting.append(finished.clone())
            else:
                self._stream.write(self._buffer, finished)
        first = next((batch for batch in self._waiting if batch.numel()), None)
        return None if first is None else pack(first.reshape(-1)[:1].clone(), "a frame")

    def held(self, clear: bool) -> TensorDictBase | None:
        """Return the frames of trajectories that were not written yet, and forget them or not."""
        assert self.assembler is not None
        return self.assembler.drain() if clear else self.assembler.state_dict()["frames"]
