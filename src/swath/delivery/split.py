"""From rollouts in which episodes lie end to end to one row per trajectory.

```
    ids      [7 7 7 4 4 | 4 9 9 9 9]      two rows of five frames, any order
    order    [0 1 2 | 3 4 5 | 6 7 8 9]    trajectory after trajectory, by first appearance
    lengths  [3, 3, 4]
    padded   rows of a tensor [3, 4], zero at the ends of the shorter
    nested   frames taken in `order`, cut after `lengths`
```
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, NonTensorData, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from swath.errors import UsageError
from swath.rollout.keys import FINAL, NEXT_DONE, TRAJ_IDS
from swath.tree import Key

__all__ = ["group_frames", "keep_nested_sizes", "split_trajectories"]


def group_frames(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the frames `[M]` trajectory after trajectory, and the lengths `[G]` of these.

    Both the trajectories and the frames of each come in the order in which they appear.

    Examples:
        >>> [part.tolist() for part in group_frames(torch.tensor([7, 4, 4, 7, 9]))]
        [[0, 3, 1, 2, 4], [2, 2, 1]]
    """
    sorted_ids, by_id = torch.sort(ids, stable=True)
    lengths = torch.unique_consecutive(sorted_ids, return_counts=True)[1]
    # The sort is stable, so the first frame of a trajectory is the one that appeared first.
    first = by_id[lengths.cumsum(0) - lengths]
    by_appearance = first.repeat_interleave(lengths).argsort(stable=True)
    return by_id[by_appearance], lengths[first.argsort()]


def keep_nested_sizes(made: TensorDict, rollout: TensorDictBase) -> TensorDict:
    """Give the TensorDicts in what was made of a rollout the batch dimensions that they had there.

    Examples:
        >>> group = TensorDict({"reward": torch.ones(5, 3, 1)}, [5, 3])
        >>> made = TensorDict({"agents": {"reward": torch.ones(2, 4, 3, 1)}}, [2, 4])
        >>> keep_nested_sizes(made, TensorDict({"agents": group}, [5]))["agents"].batch_size
        torch.Size([2, 4, 3])
    """
    for key, part in rollout.items(True):
        if isinstance(part, TensorDictBase) and part.batch_dims > rollout.batch_dims:
            inner = part.batch_size[rollout.batch_dims :]
            made.get(key).batch_size = [*made.batch_size, *inner]
    return made


def split_trajectories(
    rollout: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Return the trajectories of `rollout`, one per row, padded with zeros and with a mask.

    Frames with the same trajectory id make one trajectory, wherever they are; without ids, a
    true done flag ends one. Frames that an existing mask leaves out are dropped first.
    Trajectories come in the order of their first frames.

    Examples:
        >>> ids = torch.tensor([3, 3, 5, 5, 5])
        >>> rollout = TensorDict({"reward": torch.ones(5, 1), "collector": {"traj_ids": ids}}, [5])
        >>> batch = split_trajectories(rollout)
        >>> batch.batch_size, batch["collector", "mask"].tolist()
        (torch.Size([2, 3]), [[True, True, False], [True, True, True]])
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
    """
    layout = torch.strided if as_nested is True else as_nested or None
    if layout not in (None, torch.strided, torch.jagged):
        raise UsageError(
            f"as_nested is {as_nested!r}; expected False, True, torch.strided or torch.jagged."
        )
    if not rollout.batch_dims:
        raise UsageError("rollout has batch size []; expected [..., T], time last. Set batch_size.")
    homes = [TRAJ_IDS[:-1] if prefix is None else _path(prefix)]
    if homes == [()]:
        homes.append(TRAJ_IDS[:-1])
    mask_keys = [(*home, "mask") for home in homes]
    masks = [mask for key in mask_keys if (mask := _values(rollout, key)) is not None]
    valid = torch.stack(masks).bool().all(0) if masks else None
    if trajectory_key is not None:
        ids = _values(rollout, trajectory_key)
    else:
        ids = _values(rollout, *((*home, "traj_ids") for home in homes))
        if ids is None:
            ids = _ids_from_done(rollout, NEXT_DONE if done_key is None else done_key, valid)
    if ids is None:
        raise UsageError(
            f"trajectory_key={trajectory_key!r} is not in the rollout; it has {_keys(rollout)}. "
            "Name the entry with one trajectory id per frame."
        )

    rows = _Rows(ids, valid, layout)
    batch = rows.cut(rollout.exclude(*mask_keys))
    if layout is None:
        batch.set(mask_keys[0], rows.mask)
    if layout is not torch.jagged and rollout.names[-1] == "time":
        batch.names = [None, "time"]
    return batch


class _Rows:
    """How the frames of a rollout become one row per trajectory.

    Args:
        ids: `[rows, T]`, the trajectory of each frame.
        valid: `[rows, T]`, the frames that count; None if all do.
        layout: None for padded.
    """

    def __init__(self, ids: Tensor, valid: Tensor | None, layout: torch.layout | None) -> None:
        self._layout = layout
        self._order, lengths = group_frames(ids.flatten() if valid is None else ids[valid])
        if valid is not None:
            self._order = valid.flatten().nonzero().squeeze(1)[self._order]
        self._sizes: list[int] = lengths.tolist()
        longest = max(self._sizes, default=0)
        self.mask = torch.arange(longest, device=ids.device) < lengths.unsqueeze(1)
        self._batch_size = self.mask.shape
        if layout is torch.jagged:  # a second dimension would keep tensordict from apply and set
            self._batch_size = self.mask.shape[:1]
            # One tensor for all leaves: jagged tensors are alike for torch if they share it.
            self._offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        elif layout is None:
            # Padding is gathered like the rest, then zeroed: for wide rows several times faster
            # than scattering frames into zeros, which torch does element by element.
            mask = self.mask.flatten()
            self._padding = mask.logical_not().nonzero().squeeze(1)
            self._cells = torch.zeros_like(mask, dtype=torch.int64)
            self._cells[mask] = self._order
        elif not self._sizes:
            raise UsageError(
                "rollout has no frames, and a nested tensor of strided layout cannot be empty. "
                "Pass as_nested=False or torch.jagged, or leave this rollout out."
            )
        elif len(set(self._sizes)) > 1:
            self._batch_size = torch.Size([len(self._sizes), -1])

    def cut(self, rollout: TensorDictBase) -> TensorDict:
        """Return a rollout `[..., T]` with its frames in rows."""
        leaves = {}
        for key, value in rollout.items(True, True, is_leaf=is_leaf_nontensor):
            if isinstance(value, Tensor):
                # Zero points to somebody's observation, -1 to the next row's: padding.
                padding = -1 if key == FINAL else 0
                leaves[key] = self._tensor(value.flatten(0, rollout.batch_dims - 1), padding)
            elif isinstance(value, NonTensorData):  # one value for all frames
                leaves[key] = NonTensorData(value.data, batch_size=self._batch_size)
            else:
                raise UsageError(
                    f"{key!r} is a {type(value).__name__}, which cannot be cut into trajectories. "
                    "Leave the entry out, or encode it as a tensor."
                )
        made = TensorDict(leaves, self._batch_size, device=rollout.device)
        return keep_nested_sizes(made, rollout) if self._layout is None else made

    def _tensor(self, frames: Tensor, padding: int) -> Tensor:
        device = frames.device
        if self._layout is None:
            rows = frames.index_select(0, self._cells.to(device))
            rows.index_fill_(0, self._padding.to(device), padding)
            return rows.view(*self._batch_size, *frames.shape[1:])
        frames = frames.index_select(0, self._order.to(device))
        if self._layout is torch.strided:
            pieces = list(torch.split(frames, self._sizes))
            return torch.nested.as_nested_tensor(pieces, layout=torch.strided)
        return torch.nested.nested_tensor_from_jagged(
            frames,
            self._offsets.to(device),
            min_seqlen=min(self._sizes, default=0),
            max_seqlen=self.mask.shape[1],
        )


def _values(rollout: TensorDictBase, *keys: NestedKey) -> Tensor | None:
    """Return the first of these entries that is there, one value per frame, as `[rows, T]`."""
    for key in keys:
        values = rollout.get(key, None)
        if values is None:
            continue
        if values.numel() != rollout.batch_size.numel():
            raise UsageError(
                f"{key!r} has shape {list(values.shape)}, but one value per frame is needed: the "
                f"batch size {list(rollout.batch_size)}, or that with a trailing 1."
            )
        return values.reshape(rollout.batch_size[:-1].numel(), rollout.batch_size[-1])
    return None


def _ids_from_done(rollout: TensorDictBase, done_key: NestedKey, valid: Tensor | None) -> Tensor:
    """Return ids as `[rows, T]` that change after each true flag and at each row's start."""
    done = _values(rollout, ("next", *_path(done_key)), done_key)
    if done is None:
        raise UsageError(
            f"rollout has no trajectory ids and no done flags at {done_key!r}; it has "
            f"{_keys(rollout)}. Name one of them with trajectory_key or done_key."
        )
    begins = torch.ones_like(done, dtype=torch.bool)
    # A frame that the mask leaves out ends nothing, whatever its flag says.
    begins[:, 1:] = (done if valid is None else done.bool() & valid)[:, :-1]
    return begins.flatten().cumsum(0).view_as(begins)


def _path(key: NestedKey) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _keys(rollout: TensorDictBase) -> list[NestedKey]:
    return sorted(rollout.keys(True, True), key=str)
