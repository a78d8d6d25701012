"""Give a compact batch (`compact_obs=True`) its next observations back."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from swath.delivery.split import arrange, nested_dims
from swath.errors import UsageError
from swath.rollout.final import FinalObservations
from swath.rollout.keys import FINAL, FINAL_OBS, MASK, TRAJ_IDS, following

__all__ = ["restore_next"]


def restore_next(batch: TensorDictBase) -> TensorDictBase:
    """Return the batch with `("next", observation)`, true last observations included.

    The batch must hold its rows in the order of time, as it was delivered; envs may be left out or
    reordered. Of a batch that was split into trajectories, the padding is zero.

    Args:
        batch: What a collector with `compact_obs=True` delivered, `[..., T]`.
    """
    if FINAL not in batch.keys(True):
        raise UsageError(
            "this batch was not collected with compact_obs=True; there is nothing to restore."
        )
    index, found = batch[FINAL], batch.get(FINAL_OBS)
    final = getattr(found, "data", None)
    if not isinstance(final, FinalObservations):
        raise UsageError(
            "this batch was joined from several batches, each with its own table of final "
            "observations. Call restore_next on each of them before you join them."
        )
    table = final.table
    inside = index < 0
    ids = batch[TRAJ_IDS]
    follows = torch.zeros_like(inside)
    follows[..., :-1] = ids[..., :-1] == ids[..., 1:]
    # Padding (see split.py) points to the next row as well, and stands in the last one, too.
    if (inside & ~follows & batch.get(MASK, torch.ones_like(inside))).any():
        raise UsageError(
            "some rows of this batch are not followed by the next row of their trajectory, so "
            "their next observation is not in it. Call restore_next before you slice a batch "
            "over time."
        )
    out = batch.copy()
    out.set("next", batch["next"].copy())
    for name in table.keys(True, True):
        key = (name,) if isinstance(name, str) else name
        observation = batch[key]
        restored = torch.empty_like(observation)
        time, steps = index.ndim - 1, index.shape[-1]
        if steps:
            restored.narrow(time, 0, steps - 1).copy_(observation.narrow(time, 1, steps - 1))
            restored.narrow(time, steps - 1, 1).zero_()
        restored[~inside] = table[key][index[~inside]]
        out.set(following(key), restored)
    arrange(out["next"], nested_dims(batch.exclude("next")))
    return out
