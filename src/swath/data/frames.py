"""From batches to columns and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.storage import Ring
from swath.errors import UsageError
from swath.rollout import keys
from swath.tree import Key, key_name

__all__ = ["check_fit", "copy_whole", "frames_of", "leaves", "nested", "newest"]

_PATIENCE = 8


def frames_of(
    batch: TensorDictBase,
) -> tuple[dict[Key, torch.Tensor], torch.Size, np.ndarray | None]:
    """Return the tensors of a batch by key, its batch size, and its mask."""
    if not isinstance(batch, TensorDictBase) or not batch.batch_dims:
        raise UsageError(
            f"expected a batch, a TensorDict [*, T]; got {type(batch).__name__}"
            f"{getattr(batch, 'batch_size', '')}. A single frame goes to add()."
        )
    values, lead = dict(leaves(batch)), batch.batch_size
    mask = values.pop(keys.MASK, None)
    return values, lead, None if mask is None else mask.cpu().numpy().reshape(lead)


def leaves(batch: TensorDictBase, above: Key = ()) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield the tensors of a batch with their keys."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            yield (*above, name), value
        elif isinstance(value, TensorDictBase):
            yield from leaves(value, (*above, name))
        else:
            raise UsageError(
                f"{key_name((*above, name))} holds {type(value).__name__}, which has no array "
                "form; take it out of the batch (after compact_obs: "
                "swath.collectors.utils.restore_next)."
            )


def check_fit(ring: Ring, values: Mapping[Key, torch.Tensor], dims: int) -> None:
    """Refuse tensors `[*lead, *shape]` that are not like those in the ring."""
    columns = ring.columns
    for key in values.keys() ^ columns.keys():
        which = "lacks" if key in columns else "has a new key,"
        raise UsageError(f"this batch {which} {key_name(key)}; all must have the same keys.")
    for key, value in values.items():
        column = columns[key]
        if value.shape[dims:] != column.shape or value.dtype != column.dtype:
            raise UsageError(
                f"{key_name(key)} is {value.dtype} {tuple(value.shape[dims:])} per frame in this "
                f"batch, but {column.dtype} {tuple(column.shape)} in the buffer; all batches "
                "must agree."
            )


def newest(values: Mapping[Key, torch.Tensor]) -> int:
    """Return the newest policy version of a batch."""
    versions = values.get(keys.POLICY_VERSION)
    return 0 if versions is None else int(versions.cpu().numpy().max())


def copy_whole(
    ring: Ring, index: np.ndarray, draw: Callable[[tuple[int, ...]], np.ndarray | None] | None
) -> dict[Key, torch.Tensor] | None:
    """Return frames by key, or None if some of them are gone and no others can be had.

    Args:
        ring: Where they are.
        index: Their numbers; changed where others were drawn.
        draw: Draws others for those that were overwritten while they were copied.
    """
    rows = index % ring.capacity
    values = ring.take(rows)
    ring.fence()
    torn, tries = _torn(ring, index, rows), 0
    while torn.size:
        tries += 1
        patient = tries <= _PATIENCE  # after that, writers wait for once
        with contextlib.nullcontext() if patient else ring:
            again = None if draw is None else draw((len(torn), *index.shape[1:]))
            if again is None:
                return None
            rows, where = again % ring.capacity, torch.from_numpy(torn)
            for key, value in ring.take(rows).items():
                values[key][where] = value
            index[torn] = again
            if patient:
                ring.fence()
            torn = torn[_torn(ring, again, rows)]
    return values


def _torn(ring: Ring, index: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return where frames, or slices with frames, are not whole any more."""
    whole = ring.whole(index, rows)
    return np.flatnonzero(~(whole if whole.ndim == 1 else whole.all(1)))


def nested(
    tree: Mapping[str, Any],
    values: Mapping[Key, torch.Tensor],
    size: torch.Size,
    index: torch.Tensor | None = None,
) -> TensorDict:
    """Return a batch of values by key.

    They fit by construction and are not checked, which takes a fifth of the time.
    """
    source: dict[str, Any] = {} if index is None else {"index": index}
    for name, part in tree.items():
        source[name] = nested(part, values, size) if isinstance(part, dict) else values[part]
    names = None if len(size) == 1 else [None, "time"]
    return TensorDict._new_unsafe(source, size, names=names)
