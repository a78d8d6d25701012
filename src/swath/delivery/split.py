"""From rollouts in which episodes lie end to end to one row per trajectory.

`split_trajectories` is what users call (as `swath.collectors.utils.split_trajectories`);
`group_frames` is the index arithmetic under it, shared with `delivery.trajectories`.

```
    ids        [7 7 7 4 4 | 4 9 9 9 9]       two rows of five frames, any order
    group      [0 0 0 1 1 | 1 2 2 2 2]       numbered by first appearance
    position   [0 1 2 0 1 | 2 0 1 2 3]       within the trajectory
    padded     row `group`, column `position` of a tensor [3, 4], zero elsewhere
    nested     frames taken in `order`, cut after `lengths` = [3, 3, 4]
```
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from swath.errors import UsageError
from swath.rollout.keys import MASK, NEXT_DONE, TRAJ_IDS
from swath.tree import Key

__all__ = ["Groups", "frame_values", "group_frames", "pad_frames", "split_trajectories"]

_COLLECTOR = TRAJ_IDS[:-1]


class Groups(NamedTuple):
    """Where each of M frames belongs among G trajectories, by first appearance."""

    order: Tensor
    """`[M]`: the frames, trajectory after trajectory, each in its order of appearance."""
    group: Tensor
    """`[M]`: the trajectory of each frame."""
    position: Tensor
    """`[M]`: the place of each frame in its trajectory."""
    lengths: Tensor
    """`[G]`: the number of frames of each trajectory."""


def group_frames(ids: Tensor) -> Groups:
    """Group frames with the same id, keeping the order in which ids and frames appear.

    >>> groups = group_frames(torch.tensor([7, 4, 4, 7, 9]))
    >>> groups.order.tolist(), groups.group.tolist(), groups.position.tolist()
    ([0, 3, 1, 2, 4], [0, 1, 1, 0, 2], [0, 0, 1, 1, 0])
    >>> groups.lengths.tolist()
    [2, 2, 1]

    Args:
        ids: `[M]`, one id per frame; the same id need not be adjacent.
    """
    count = ids.numel()
    sorted_ids, by_id = torch.sort(ids, stable=True)
    is_first = torch.ones(count, dtype=torch.bool, device=ids.device)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    starts = is_first.nonzero().squeeze(1)  # [G], in the order of the ids
    sizes = torch.diff(starts, append=starts.new_tensor([count]))
    # The sort is stable, so the first frame of a block is the one that appeared first.
    by_appearance = by_id[starts].argsort()
    number = _scatter(torch.arange(starts.numel(), device=ids.device), by_appearance)

    block = is_first.cumsum(0) - 1  # [M], in sorted order like the two below
    group = number[block]
    position = torch.arange(count, device=ids.device) - starts[block]
    lengths = sizes[by_appearance]
    target = (lengths.cumsum(0) - lengths)[group] + position
    return Groups(
        _scatter(by_id, target), _scatter(group, by_id), _scatter(position, by_id), lengths
    )


def frame_values(rollout: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return the entry with one value per frame as `[rows, T]`, or None if it is not there."""
    values = rollout.get(key, None)
    if values is None:
        return None
    *rows, steps = rollout.batch_size
    if values.numel() != rollout.batch_size.numel():
        raise UsageError(
            f"{key!r} has shape {list(values.shape)}, but one value per frame is needed: the "
            f"batch size {list(rollout.batch_size)}, or that with a trailing 1."
        )
    return values.reshape(torch.Size(rows).numel(), steps)


def split_trajectories(
    rollout: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Return the trajectories of `rollout`, one per row, zero padded and with a mask.

    Frames with the same trajectory id make one trajectory, wherever they are; without ids, a
    true done flag ends one. Frames that an existing mask leaves out are dropped first.
    Trajectories come in the order of their first frames.

    >>> from tensordict import TensorDict
    >>> ids = torch.tensor([3, 3, 5, 5, 5])
    >>> rollout = TensorDict({"reward": torch.ones(5, 1), "collector": {"traj_ids": ids}}, [5])
    >>> batch = split_trajectories(rollout)
    >>> batch.batch_size
    torch.Size([2, 3])
    >>> batch["collector", "mask"].tolist()
    [[True, True, False], [True, True, True]]
    >>> split_trajectories(rollout, as_nested=torch.jagged)["reward"][0].shape
    torch.Size([2, 1])

    Args:
        rollout: Batch size `[..., T]`, time last. It is not changed.
        prefix: Where `"traj_ids"` is read and `"mask"` read and written: `"collector"` unless
            given; `()` is the root, where ids and masks of the collector are still found.
        trajectory_key: The ids, if they are elsewhere.
        done_key: Ends of trajectories, used without ids: `("next", "done")` unless given.
            `"done"` means the flag under `"next"` too, if there is one.
        as_nested: `True` or `torch.strided` for nested tensors, batch size `[trajectories, -1]`
            (their length instead of -1 if they share one); `torch.jagged` for jagged ones,
            batch size `[trajectories]`. Neither has a mask.

    Returns:
        Batch size `[trajectories, longest]` unless nested. Values that are no tensors are
        padded with `None`.

    Raises:
        UsageError: Neither ids nor done flags are there, or an argument makes no sense.
    """
    layout = _nested_layout(as_nested)
    if not rollout.batch_dims:
        raise UsageError("rollout has batch size []; expected [..., T], time last. Set batch_size.")
    homes = [_COLLECTOR] if prefix is None else [_path(prefix)]
    if homes == [()]:
        homes.append(_COLLECTOR)
    mask_keys = [(*home, "mask") for home in homes]
    masks = [mask for key in mask_keys if (mask := frame_values(rollout, key)) is not None]
    valid = torch.stack(masks).bool().all(0) if masks else None  # [rows, T]
    ids = _own_ids(rollout, [(*home, "traj_ids") for home in homes], trajectory_key, done_key)
    if ids is None:
        ids = _ids_from_done(rollout, NEXT_DONE if done_key is None else done_key, valid)

    chosen = None if valid is None else valid.flatten().nonzero().squeeze(1)
    form = _Form(ids.flatten() if valid is None else ids[valid], chosen, layout)
    batch = form.tree(rollout.exclude(*mask_keys), rollout.batch_dims)
    if layout is None:
        batch.set(mask_keys[0], form.mask())
    if layout is not torch.jagged and rollout.names[-1] == "time":
        batch.names = [None, "time"]
    return batch


def pad_frames(frames: TensorDictBase, chosen: Tensor, ids: Tensor) -> TensorDict:
    """Return the chosen frames of `frames` `[F]`, one trajectory per row, with a mask.

    Args:
        frames: Any number of frames.
        chosen: `[M]`, the indices of those to take.
        ids: `[M]`, their trajectories.
    """
    form = _Form(ids, chosen, None)
    return form.tree(frames, 1).set(MASK, form.mask())


class _Form:
    """How frames become rows; applied to each leaf of a rollout.

    Args:
        ids: `[M]`, the trajectory of each frame.
        chosen: `[M]`, where these frames are among those of a leaf; None if they are all.
        layout: None for padded.
    """

    def __init__(self, ids: Tensor, chosen: Tensor | None, layout: torch.layout | None) -> None:
        groups = group_frames(ids)
        self._layout = layout
        self._lengths = groups.lengths
        self._sizes: list[int] = groups.lengths.tolist()
        if layout is torch.strided and not self._sizes:
            raise UsageError(
                "rollout has no frames, and a nested tensor of strided layout cannot be empty. "
                "Pass as_nested=False or torch.jagged, or leave this rollout out."
            )
        self._longest = max(self._sizes, default=0)
        self._order = groups.order if chosen is None else chosen[groups.order]
        # One tensor for all leaves: jagged tensors are alike for torch if they share it.
        self._offsets = torch.tensor([0, *accumulate(self._sizes)], device=ids.device)
        self._batch_size = torch.Size([len(self._sizes), self._longest])
        if layout is torch.strided and len(set(self._sizes)) > 1:
            self._batch_size = torch.Size([len(self._sizes), -1])
        elif layout is torch.jagged:  # a second dimension would keep tensordict from apply and set
            self._batch_size = torch.Size([len(self._sizes)])
        elif layout is None:
            # Padding is gathered like the rest, then zeroed: for wide rows several times faster
            # than scattering frames into zeros, which torch does element by element.
            mask = self.mask().flatten()
            self._padding = mask.logical_not().nonzero().squeeze(1)
            self._cells = torch.zeros_like(mask, dtype=torch.int64)
            self._cells[mask] = self._order

    def mask(self) -> Tensor:
        """Return which cells of the padded form hold a frame."""
        columns = torch.arange(self._longest, device=self._lengths.device)
        return columns < self._lengths.unsqueeze(1)

    def tree(self, node: Any, batch_dims: int) -> TensorDict:
        """Return a tensordict or tensorclass of batch size `[..., T]` with its frames in rows."""
        leaves = {}
        for key, value in node.items():
            if isinstance(value, UnbatchedTensor):
                leaves[key] = value
            elif is_non_tensor(value):
                leaves[key] = self._objects(value, batch_dims)
            elif is_tensor_collection(value):
                leaves[key] = self.tree(value, batch_dims)
            else:
                leaves[key] = self._tensor(value.flatten(0, batch_dims - 1))
        tree = TensorDict(leaves, self._batch_size, device=node.device)
        return type(node).from_tensordict(tree) if is_tensorclass(node) else tree

    def _tensor(self, frames: Tensor) -> Tensor:
        device = frames.device
        if self._layout is None:
            rows = frames.index_select(0, self._cells.to(device))
            rows.index_fill_(0, self._padding.to(device), 0)
            return rows.view(*self._batch_size, *frames.shape[1:])
        frames = frames.index_select(0, self._order.to(device))
        if self._layout is torch.strided:
            pieces = list(torch.split(frames, self._sizes))
            return torch.nested.as_nested_tensor(pieces, layout=torch.strided)
        return torch.nested.nested_tensor_from_jagged(
            frames,
            self._offsets.to(device),
            min_seqlen=min(self._sizes, default=0),
            max_seqlen=self._longest,
        )

    def _objects(self, value: Any, batch_dims: int) -> NonTensorData | NonTensorStack:
        """Do the same for values that are no tensors; `None` is their padding."""
        if isinstance(value, NonTensorData):  # one value for all frames
            return NonTensorData(value.data, batch_size=self._batch_size)
        frames = value.tolist()
        for _ in range(batch_dims - 1):
            frames = list(chain.from_iterable(frames))
        ordered = [frames[i] for i in self._order.tolist()]
        rows = [ordered[start:end] for start, end in pairwise(self._offsets.tolist())]
        if self._layout is None:
            rows = [row + [None] * (self._longest - len(row)) for row in rows]
        return NonTensorStack(*(NonTensorStack(*map(NonTensorData, row)) for row in rows))


def _own_ids(
    rollout: TensorDictBase,
    ids_keys: list[Key],
    trajectory_key: NestedKey | None,
    done_key: NestedKey | None,
) -> Tensor | None:
    """Return the ids that `rollout` carries as `[rows, T]`, or None to go by done flags."""
    if trajectory_key is None:
        found = (frame_values(rollout, key) for key in ids_keys)
        return next((ids for ids in found if ids is not None), None)
    ids = frame_values(rollout, trajectory_key)
    if ids is None and done_key is None:
        raise UsageError(
            f"trajectory_key={trajectory_key!r} is not in the rollout; it has {_keys(rollout)}. "
            "Name the entry with one trajectory id per frame, or pass done_key."
        )
    return ids


def _ids_from_done(rollout: TensorDictBase, done_key: NestedKey, valid: Tensor | None) -> Tensor:
    """Return ids as `[rows, T]` that change after each true flag and at each row's start."""
    done = frame_values(rollout, ("next", *_path(done_key)))
    if done is None:
        done = frame_values(rollout, done_key)
    if done is None:
        raise UsageError(
            f"rollout has no trajectory ids and no done flags at {done_key!r}; it has "
            f"{_keys(rollout)}. Name one of them with trajectory_key or done_key."
        )
    begins = torch.ones_like(done, dtype=torch.bool)
    # A frame that the mask leaves out ends nothing, whatever its flag says.
    begins[:, 1:] = (done if valid is None else done.bool() & valid)[:, :-1]
    return begins.flatten().cumsum(0).view_as(begins)


def _nested_layout(as_nested: bool | torch.layout) -> torch.layout | None:
    """Return the layout asked for; None stands for padded."""
    if as_nested is False:
        return None
    if as_nested is True or as_nested is torch.strided:
        return torch.strided
    if as_nested is torch.jagged:
        return torch.jagged
    raise UsageError(
        f"as_nested is {as_nested!r}; expected False, True, torch.strided or torch.jagged."
    )


def _path(key: NestedKey) -> Key:
    """Return a key as the tuple of its parts."""
    return (key,) if isinstance(key, str) else tuple(key)


def _keys(rollout: TensorDictBase) -> list[NestedKey]:
    return sorted(rollout.keys(True, True), key=str)


def _scatter(values: Tensor, places: Tensor) -> Tensor:
    """Return a tensor with `values[i]` at `places[i]`, a permutation."""
    return torch.empty_like(values).scatter_(0, places, values)
