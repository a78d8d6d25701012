"""Rollouts in, batches of whole trajectories out.

```
                        one row per frame, those at the end free
    push(rollout) ----> [ gone | frame | gone | frame | frame | free ... ]  ----> pop() -> batch
      copied in                    ^              ^                       copied out
                           complete: rows   open: rows by id
```

Only row numbers are sorted. When the free rows are used up, the frames that are still held move to
the front; rows that have gone are the space for new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from swath.delivery.split import arrange, group_frames, nested_dims, split_trajectories
from swath.errors import UsageError
from swath.rollout.keys import MASK, NEXT_DONE, TRAJ_IDS
from swath.tree import Key

__all__ = ["Pending", "TrajectoryAssembler"]


class Pending(NamedTuple):
    """What a `TrajectoryAssembler` holds: complete trajectories, their frames, and the rest."""

    trajectories: int
    frames: int
    open_frames: int
    """Of trajectories that have not ended, or of which some frames were given away."""


class TrajectoryAssembler:
    """Turn rollouts into batches of exactly `num_trajectories` whole trajectories.

    A trajectory may span many rollouts; it is complete when `("next", "done")` is true on its
    last frame. Trajectories leave in the order in which they ended, envs in order within a step.

    A frame leaves once, and a trajectory leaves `pop` whole or not at all: of one that is torn,
    since some of its frames left by `drain` or went past (`tear`), the other frames are kept for
    `drain`.

    Examples:
        >>> ids, done = torch.tensor([0, 0, 1]), torch.tensor([[False], [True], [False]])
        >>> data = {"next": {"done": done}, "collector": {"traj_ids": ids}}
        >>> assembler = TrajectoryAssembler(1, "cat")
        >>> assembler.push(TensorDict(data, [3]))
        >>> assembler.pop()["collector", "traj_ids"]
        tensor([0, 0])
        >>> assembler.pop() is None, assembler.pending()
        (True, Pending(trajectories=0, frames=0, open_frames=1))

    Args:
        num_trajectories: The number of trajectories in a batch.
        traj_format: `"padded"` for `[num_trajectories, longest]`, zero padded, with a mask at
            `("collector", "mask")`; `"cat"` for `[frames]`, one trajectory after the other.
    """

    def __init__(self, num_trajectories: int, traj_format: Literal["padded", "cat"]) -> None:
        self._num_trajectories = num_trajectories
        self._padded = traj_format == "padded"
        self._nested: dict[Key, tuple[int, ...]] = {}  # of frames that leave; held, they are flat
        self._clear()

    def _clear(self) -> None:
        self._torn: set[int] = set()
        none = torch.empty(0, dtype=torch.int64)
        self._hold(TensorDict({TRAJ_IDS: none, NEXT_DONE: none.bool()}, [0]), [], 0)

    def _hold(self, frames: TensorDict, lengths: list[int], end: int) -> None:
        """Hold the rows up to `end`: complete trajectories of these lengths, then open ones."""
        self._frames, self._used = frames, sum(lengths)
        rows = torch.arange(self._used, device=frames[TRAJ_IDS].device)
        self._complete = deque(torch.split(rows, lengths))  # the rows of each trajectory
        self._open: dict[int, list[Tensor]] = {}  # the same by trajectory id, in pieces
        self._sort_in(end)

    @torch.no_grad()
    def push(self, rollout: TensorDictBase) -> None:
        """Take the frames of a rollout `[..., T]`; its memory may be reused afterwards."""
        frames = _by_time(rollout)
        if not len(self._frames):
            self._frames = frames[:0]  # for its keys
            self._nested = nested_dims(rollout)
        _check_alike(frames, self._frames)
        if self._used + len(frames) > len(self._frames):
            self._make_room(len(frames))
        end = self._used + len(frames)
        self._frames[self._used : end] = frames
        self._sort_in(end)

    def _sort_in(self, end: int) -> None:
        """Find the trajectories of the rows that were filled since, up to `end`."""
        ids = self._frames[TRAJ_IDS][self._used : end]
        done = self._frames[NEXT_DONE][self._used : end].flatten()
        order, lengths = group_frames(ids)
        last = order[lengths.cumsum(0) - 1]
        rows = torch.split(order + self._used, lengths.tolist())
        for traj_id, piece in zip(ids[last].tolist(), rows, strict=True):
            self._open.setdefault(traj_id, []).append(piece)
        for traj_id in ids[last[done[last]].sort().values].tolist():  # in the order of their ends
            if traj_id not in self._torn:
                self._complete.append(torch.cat(self._open.pop(traj_id)))
        self._used = end

    def tear(self, rollout: TensorDictBase) -> None:
        """Take note that the frames of a rollout `[..., T]` have gone another way."""
        keys = [key for key in (TRAJ_IDS, NEXT_DONE, MASK) if key in rollout.keys(True)]
        frames = _by_time(rollout.select(*keys))
        ends = frames[TRAJ_IDS][frames[NEXT_DONE].flatten()].tolist()
        torn = {*frames[TRAJ_IDS].tolist()}
        self._torn |= (torn - {*ends}) | (torn & self._open.keys())

    def _make_room(self, wanted: int) -> None:
        """Move what is held to the front, and to more memory if that leaves too few free rows."""
        held = self._read(self._rows())
        # A third is free then at least, so that what is moved is a constant factor of what is new.
        capacity = (len(held) + wanted) * 3 // 2
        if capacity > len(self._frames):
            self._frames = held.new_empty(capacity)
        self._frames[: len(held)] = held
        self._hold(self._frames, [len(each) for each in self._complete], len(held))

    def _rows(self) -> Tensor:
        """Return the rows that are held, trajectory after trajectory, complete ones first."""
        none = self._frames[TRAJ_IDS][:0]
        return torch.cat([none, *self._complete, *chain.from_iterable(self._open.values())])

    def _read(self, rows: Tensor) -> TensorDict:
        """Return a copy of the frames in these rows."""
        return self._frames.apply(
            lambda leaf: leaf.index_select(0, rows), batch_size=[len(rows)], names=["time"]
        )

    def _leaving(self, rows: Tensor) -> TensorDict:
        """Return a copy of the frames in these rows, nested as they came."""
        frames = self._read(rows)
        arrange(frames, self._nested)
        return frames

    def pop(self) -> TensorDict | None:
        """Return the next batch, or None while fewer than `num_trajectories` are complete."""
        if len(self._complete) < self._num_trajectories:
            return None
        return self._taken(self._num_trajectories)

    def pop_all(self) -> TensorDict | None:
        """Return all complete trajectories, however many; None if there are none."""
        return self._taken(len(self._complete)) if self._complete else None

    def _taken(self, count: int) -> TensorDict:
        batch = self._leaving(torch.cat([self._complete.popleft() for _ in range(count)]))
        return split_trajectories(batch) if self._padded else batch

    def pending(self) -> Pending:
        """Return how much is held."""
        frames = sum(map(len, self._complete))
        return Pending(len(self._complete), frames, len(self._rows()) - frames)

    def ids(self) -> list[int]:
        """Return the trajectories of which frames are held."""
        return self._frames[TRAJ_IDS][self._rows()].unique().tolist()

    def drain(self) -> TensorDict | None:
        """Return all that is held as `[frames]`, complete trajectories first; None if nothing."""
        frames, torn = self.state_dict()["frames"], self._torn | self._open.keys()
        self._clear()
        self._torn = torn  # those that go on have lost their beginning
        return frames

    def discard_open(self, ids: Iterable[int] | None = None) -> int:
        """Forget unfinished trajectories, all or these, and return how many frames they had."""
        before = self.pending().open_frames
        for traj_id in list({*self._open, *self._torn} if ids is None else ids):
            self._open.pop(traj_id, None)
            self._torn.discard(traj_id)
        return before - self.pending().open_frames

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that is held, trajectory after trajectory, complete ones first."""
        rows = self._rows()
        return {
            "frames": self._leaving(rows) if len(rows) else None,
            "lengths": [len(each) for each in self._complete],
            "torn": sorted(self._torn),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what `state_dict` returned, and nothing else."""
        self._clear()
        self._torn.update(state["torn"])
        if (frames := state["frames"]) is not None:
            self._nested = nested_dims(frames)
            self._hold(_by_time(frames).clone(), state["lengths"], len(frames))


def _by_time(rollout: TensorDictBase) -> TensorDict:
    """Return the valid frames of a rollout `[..., T]` as `[M]`, in order of time, then of env."""
    dims = rollout.batch_dims
    leaves = {}
    for key, leaf in rollout.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"{key!r} is not a tensor, and whole trajectories can only be assembled from "
                "tensors. Leave the entry out of the rollout, or encode it as a tensor."
            )
        leaves[key] = leaf.movedim(dims - 1, 0).flatten(0, dims - 1)
    mask = leaves.pop(MASK, None)
    frames = TensorDict(leaves, [rollout.batch_size.numel()], device=rollout.device)
    return frames if mask is None else frames[mask.flatten()]


def _check_alike(frames: TensorDict, before: TensorDict) -> None:
    new, held = (
        {key: (leaf.shape[1:], leaf.dtype, leaf.device) for key, leaf in each.items(True, True)}
        for each in (frames, before)
    )
    if new != held:
        keys = sorted({key for key, _ in new.items() ^ held.items()}, key=str)
        raise UsageError(
            f"a rollout differs from those before it in {keys}: now "
            f"{[new.get(key) for key in keys]}, before {[held.get(key) for key in keys]}. "
            "All need the same keys, shapes, dtypes and device."
        )
