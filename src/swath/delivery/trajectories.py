"""Rollouts in, batches of whole trajectories out.

```
                        pool: one growing tensor per leaf, rows of frames
    push(rollout) ----> [ frame | frame | free | frame | free | ... ]  ----> pop() -> batch
      copied in           ^   ^            ^                      copied out, rows freed
                    open: (row, id)   complete: rows, lengths
```

A frame is copied twice, into the pool and out of it, however long its trajectory is and however
long it waits; what is kept and sorted in between are row numbers and ids. The pool grows to the
largest number of frames held at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from torch import Tensor

from swath.delivery.split import frame_values, group_frames, pad_frames
from swath.errors import UsageError, nearest
from swath.rollout.keys import MASK, NEXT_DONE, TRAJ_IDS
from swath.tree import Key

__all__ = ["Pending", "TrajectoryAssembler"]

_FORMATS = ("padded", "cat")

_Leaves = dict[Any, Tensor]  # by key; the first dimension counts frames


class Pending(NamedTuple):
    """What a `TrajectoryAssembler` holds."""

    trajectories: int
    """Complete trajectories that wait."""
    frames: int
    """Frames in them."""
    open_frames: int
    """Frames of trajectories that have not ended yet."""


class TrajectoryAssembler:
    """Turn rollouts into batches of exactly `num_trajectories` whole trajectories.

    A trajectory may span many rollouts; it is complete when `("next", "done")` is true on its
    last frame. Trajectories leave in the order in which they ended, envs in order within a step.

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
        if num_trajectories < 1:
            raise UsageError(f"num_trajectories must be at least 1, got {num_trajectories}.")
        if traj_format not in _FORMATS:
            raise UsageError(
                f"traj_format is {traj_format!r}; expected 'padded' or 'cat'."
                + nearest(str(traj_format), _FORMATS)
            )
        self._num_trajectories = num_trajectories
        self._padded = traj_format == "padded"
        self._clear()

    def _clear(self) -> None:
        self._pool = _FramePool()
        self._open_rows = torch.empty(0, dtype=torch.int64)  # in the order of arrival
        self._open_ids = torch.empty(0, dtype=torch.int64)
        self._complete_rows: deque[Tensor] = deque()  # any number of trajectories in each
        self._complete_lengths: deque[int] = deque()  # one per trajectory

    @torch.no_grad()
    def push(self, rollout: TensorDictBase) -> None:
        """Take the frames of a rollout `[..., T]`; its memory may be reused afterwards."""
        ids, done = _time_first(rollout, TRAJ_IDS), _time_first(rollout, NEXT_DONE).bool()
        leaves = _leaves(rollout)
        if MASK in rollout.keys(include_nested=True):
            kept = _time_first(rollout, MASK).nonzero().squeeze(1)
            leaves = {key: leaf.index_select(0, kept) for key, leaf in leaves.items()}
            ids, done = ids[kept], done[kept]
        rows = self._pool.put(leaves, rollout.device)
        held = self._open_ids.numel()
        self._open_ids = torch.cat([self._open_ids.to(ids.device), ids])
        self._open_rows = torch.cat([self._open_rows.to(ids.device), rows])
        if done.any():
            # What was open before did not end: its last frame was not done.
            self._close(torch.cat([done.new_zeros(held), done]))

    def _close(self, done: Tensor) -> None:
        """Move the trajectories whose last frame is done from the open to the complete."""
        groups = group_frames(self._open_ids)
        last = groups.order[groups.lengths.cumsum(0) - 1]  # [G]: each trajectory's last frame
        is_complete = done[last]
        ended = is_complete.nonzero().squeeze(1)
        ended = ended[last[ended].argsort()]
        lengths = groups.lengths[ended]
        starts = torch.zeros_like(groups.lengths)
        starts[ended] = lengths.cumsum(0) - lengths

        going = is_complete[groups.group]  # [M]: the frames that go
        rows = self._open_rows[going]
        places = (starts[groups.group] + groups.position)[going]
        self._complete_rows.append(torch.empty_like(rows).scatter_(0, places, rows))
        self._complete_lengths.extend(lengths.tolist())
        self._open_rows, self._open_ids = self._open_rows[~going], self._open_ids[~going]

    def pop(self) -> TensorDictBase | None:
        """Return the next batch, or None while fewer than `num_trajectories` are complete."""
        if len(self._complete_lengths) < self._num_trajectories:
            return None
        frames = sum(self._complete_lengths.popleft() for _ in range(self._num_trajectories))
        rows = self._next_rows(frames)
        batch = self._pool.read_padded(rows) if self._padded else self._pool.read(rows)
        self._pool.release(rows)
        return batch

    def _next_rows(self, frames: int) -> Tensor:
        """Remove the rows of the first `frames` complete frames and return them."""
        taken = []
        while frames:
            rows = self._complete_rows.popleft()
            if rows.numel() > frames:
                self._complete_rows.appendleft(rows[frames:])
                rows = rows[:frames]
            taken.append(rows)
            frames -= rows.numel()
        return torch.cat(taken)

    def pending(self) -> Pending:
        """Return how much is held: complete trajectories, their frames, unfinished frames."""
        lengths = self._complete_lengths
        return Pending(len(lengths), sum(lengths), self._open_rows.numel())

    def drain(self) -> TensorDictBase | None:
        """Return all that is held as `[frames]`, complete trajectories first; None if nothing."""
        open_rows = self._open_rows[group_frames(self._open_ids).order]
        rows = torch.cat([*self._complete_rows, open_rows])
        frames = self._pool.read(rows) if rows.numel() else None
        self._clear()
        return frames

    def discard_open(self) -> int:
        """Forget the unfinished trajectories and return the number of frames they had."""
        frames = self._open_rows.numel()
        self._pool.release(self._open_rows)
        self._open_rows, self._open_ids = self._open_rows[:0], self._open_ids[:0]
        return frames

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that is held."""
        complete = torch.cat([self._open_rows[:0], *self._complete_rows])
        return {
            "complete": self._pool.read(complete) if complete.numel() else None,
            "lengths": list(self._complete_lengths),
            "open": self._pool.read(self._open_rows) if self._open_rows.numel() else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what `state_dict` returned, and nothing else."""
        self._clear()
        if (complete := state["complete"]) is not None:
            rows = self._pool.put(_leaves(complete), complete.device)
            self._complete_rows.append(rows)
            self._complete_lengths.extend(state["lengths"])
            self._open_rows = self._open_ids = rows[:0]  # empty, on the right device
        if (unfinished := state["open"]) is not None:
            self._open_rows = self._pool.put(_leaves(unfinished), unfinished.device)
            self._open_ids = unfinished[TRAJ_IDS].clone()


class _FramePool:
    """Frames in numbered rows: one tensor per leaf, and the rows that are free."""

    def __init__(self) -> None:
        self._leaves: _Leaves = {}
        self._capacity = 0
        self._free = torch.empty(0, dtype=torch.int64)
        self._device: torch.device | None = None  # of the TensorDicts, not of the leaves

    def put(self, leaves: _Leaves, device: torch.device | None) -> Tensor:
        """Copy frames into free rows and return the rows."""
        example = next(iter(leaves.values()))
        if not self._leaves:
            self._leaves = {
                key: leaf.new_empty((0, *leaf.shape[1:])) for key, leaf in leaves.items()
            }
            self._free, self._device = self._free.to(example.device), device
        self._check(leaves)
        frames = example.shape[0]
        self._grow(frames - self._free.numel())
        rows, self._free = self._free[:frames], self._free[frames:]
        for key, leaf in leaves.items():
            _as_words(self._leaves[key]).index_copy_(0, rows, _as_words(leaf))
        return rows

    def read(self, rows: Tensor) -> TensorDict:
        """Return a copy of the frames in these rows."""
        leaves = {key: leaf.index_select(0, rows) for key, leaf in self._leaves.items()}
        return TensorDict(leaves, [rows.numel()], device=self._device, names=["time"])

    def read_padded(self, rows: Tensor) -> TensorDict:
        """Return a copy of the frames in these rows, one trajectory per row, with a mask."""
        pool = TensorDict(self._leaves, [self._capacity], device=self._device)
        batch = pad_frames(pool, rows, self._leaves[TRAJ_IDS].index_select(0, rows))
        batch.names = [None, "time"]
        return batch

    def release(self, rows: Tensor) -> None:
        """Let these rows be written again."""
        self._free = torch.cat([self._free, rows])

    def _grow(self, missing: int) -> None:
        if missing <= 0:
            return
        # By half at least, so that the copies made here stay a constant factor overall.
        capacity = self._capacity + max(missing, self._capacity // 2)
        for key, leaf in self._leaves.items():
            larger = leaf.new_empty((capacity, *leaf.shape[1:]))
            larger[: self._capacity] = leaf
            self._leaves[key] = larger
        added = torch.arange(self._capacity, capacity, device=self._free.device)
        self._free = torch.cat([self._free, added])
        self._capacity = capacity

    def _check(self, leaves: _Leaves) -> None:
        new, held = _layout(leaves), _layout(self._leaves)
        if new != held:
            different = sorted({key for key, _ in new.items() ^ held.items()}, key=str)
            raise UsageError(
                f"a rollout differs from those before it in {different}: now "
                f"{[new.get(key) for key in different]}, before "
                f"{[held.get(key) for key in different]}. Trajectories can span rollouts, so all "
                "need the same keys, shapes, dtypes and device."
            )


def _layout(leaves: _Leaves) -> dict[Any, tuple[torch.Size, torch.dtype, torch.device]]:
    return {key: (leaf.shape[1:], leaf.dtype, leaf.device) for key, leaf in leaves.items()}


def _as_words(frames: Tensor) -> Tensor:
    """View frames as rows of 8-byte words if their size allows it.

    `index_copy_` goes element by element: 4,000 images of 28 kB take 17 ms as words, 72 as bytes.
    """
    elements, width = frames.shape[1:].numel(), frames.element_size()
    if width >= 8 or elements == 0 or elements * width % 8:
        return frames
    rows = frames.detach().reshape(frames.shape[0], elements).contiguous()
    if rows.storage_offset() * width % 8:  # torch wants words to begin at a multiple of 8
        rows = rows.clone()
    return rows.view(torch.int64)


def _leaves(rollout: TensorDictBase) -> _Leaves:
    """Return the leaves of a rollout `[..., T]`, frames in the order of time, then of env."""
    dims = rollout.batch_dims
    leaves = {}
    for key, leaf in rollout.items(
        include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor
    ):
        if is_non_tensor(leaf):
            raise UsageError(
                f"{key!r} is no tensor, and whole trajectories are put together from tensors "
                "only. Leave the entry out of the rollout, or encode it as a tensor."
            )
        if key != MASK:
            leaves[key] = leaf.movedim(dims - 1, 0).flatten(0, dims - 1)
    return leaves


def _time_first(rollout: TensorDictBase, key: Key) -> Tensor:
    """Return one value per frame `[M]`, in the order of time, then of env."""
    values = frame_values(rollout, key)
    if values is None:
        raise UsageError(
            f"a rollout has no entry {key!r}, which says where trajectories begin or end. "
            f"It has {sorted(rollout.keys(True, True), key=str)}."
        )
    return values.t().flatten()
