"""What is in a batch: its tensors by key, and whether they are like those that came before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.errors import UsageError
from swath.rollout import keys
from swath.tree import Key, key_name

__all__ = ["Like", "check_fit", "flat", "frames_of", "in_words", "leaves"]


class Like(Protocol):
    """Shape and dtype of one key of a frame."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


def frames_of(
    batch: TensorDictBase,
) -> tuple[dict[Key, torch.Tensor], torch.Size, np.ndarray | None]:
    """Return the tensors of a batch by key, its batch size, and its mask."""
    if not isinstance(batch, TensorDictBase) or not batch.batch_dims:
        raise UsageError(
            f"expected a batch of a collector, a TensorDict [*, T]; got {type(batch).__name__}"
            f"{getattr(batch, 'batch_size', '')}. A single frame goes to ReplayBuffer.add()."
        )
    values, lead = leaves(batch), batch.batch_size
    mask = values.pop(keys.MASK, None)
    return values, lead, None if mask is None else mask.cpu().numpy().reshape(lead)


def leaves(
    batch: TensorDictBase, above: Key = (), found: dict[Key, torch.Tensor] | None = None
) -> dict[Key, torch.Tensor]:
    """Return the tensors of a batch by key."""
    found = {} if found is None else found
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            found[(*above, name)] = value
        elif isinstance(value, TensorDictBase):
            leaves(value, (*above, name), found)
        else:
            raise UsageError(
                f"{key_name((*above, name))} holds {type(value).__name__}, which has no array "
                "form; remove it from the batch (after compact_obs: "
                "swath.collectors.utils.restore_next)."
            )
    return found


def in_words(columns: Mapping[Key, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a frame of each column by its name, as users write them."""
    return {
        key_name(key): (str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
        for key, value in columns.items()
    }


def check_fit(known: Mapping[Key, Like], values: Mapping[Key, torch.Tensor], dims: int) -> None:
    """Refuse tensors `[*lead, *shape]` that are not like those that came first."""
    if values.keys() != known.keys():
        key = min(values.keys() ^ known.keys())
        which = "lacks" if key in known else "has a new key,"
        raise UsageError(f"this batch {which} {key_name(key)}; all must have the same keys.")
    for key, value in values.items():
        one = known[key]
        if value.dtype is not one.dtype or value.shape[dims:] != one.shape:
            raise UsageError(
                f"{key_name(key)} is {value.dtype} {tuple(value.shape[dims:])} per frame in this "
                f"batch, but {one.dtype} {tuple(one.shape)} in the first; all batches must agree."
            )


def flat(value: torch.Tensor, lead: torch.Size, mask: np.ndarray | None) -> torch.Tensor:
    """Return the frames of a tensor `[*lead, *shape]` that the mask has, one after the other."""
    rows = value.detach().flatten(0, len(lead) - 1)
    return rows if mask is None else rows[torch.from_numpy(mask.reshape(-1)).to(rows.device)]
