"""One form for everybody's batches, so that one check can read them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from tensordict import TensorDictBase

Rows = dict[str, np.ndarray]


@dataclass
class Batch:
    """Arrays, time first: ``[T, N, ...]``."""

    obs: Rows
    next_obs: Rows
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    known: np.ndarray
    """Frames whose outcome the contestant stored; all of them, except with Stable-Baselines3."""

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated


def join(batches: Sequence[Batch]) -> Batch:
    """Consecutive batches as one."""

    def merge(parts):
        if isinstance(parts[0], dict):
            return {key: merge([part[key] for part in parts]) for key in parts[0]}
        return np.concatenate(parts)

    return Batch(**{f.name: merge([getattr(b, f.name) for b in batches]) for f in fields(Batch)})


def from_tensordict(data: TensorDictBase, keys: Sequence[str]) -> Batch:
    """A batch of swath or TorchRL: ``[T]``, ``[N, T]`` or ``[W, N, T]`` of W workers.

    Flags and reward have a last dim of 1.
    """
    data = data[None] if data.ndim == 1 else data.flatten(0, -2)

    def rows(key):
        return data[key].numpy().swapaxes(0, 1)

    def column(key):
        return rows(("next", key))[..., 0]

    terminated = column("terminated")
    return Batch(
        obs={key: rows(key) for key in keys},
        next_obs={key: rows(("next", key)) for key in keys},
        action=rows("action"),
        reward=column("reward"),
        terminated=terminated,
        truncated=column("truncated"),
        known=np.ones_like(terminated),
    )
