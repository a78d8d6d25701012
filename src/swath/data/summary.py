"""What is in a dataset, told without reading more of it than that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from swath.data.datasets import described, opened
from swath.data.files import ABOUT
from swath.data.frames import in_words, leaves
from swath.data.minari import describe_minari
from swath.data.minari_paths import minari_dataset_in
from swath.observe import Episodes
from swath.rollout import keys

__all__ = ["describe"]


def describe(directory: str | Path) -> dict[str, Any]:
    """Describe a dataset, also one of Minari's, or the directory of a `ReplayBuffer`, as a dict.

    Returns:
        `"frames"`, `"capacity"` (None unless a buffer's), `"bytes"`, `"keys"` (dtype and shape by
        name), `"about"` (where it comes from), `"trajectories"`, and of those that ended
        `"episodes"`, `"return"` and `"length"`. A full buffer has lost the first frames of its
        oldest trajectories, which then look shorter than they were.
    """
    folder = None if (Path(directory) / ABOUT).exists() else minari_dataset_in(directory)
    if folder is not None:
        return describe_minari(folder)
    found = described(directory)
    data, rows = opened(found)
    about = {name: value for name, value in found.about.items() if name != "frames"}
    columns = leaves(data)
    size = sum(value[:1].nbytes for value in columns.values())
    return {
        "frames": len(rows),
        "capacity": about.pop("capacity", None),
        "bytes": size * len(rows),
        "keys": in_words(columns),
        "about": about,
        **_episodes(columns, np.asarray(rows)),
    }


def _episodes(columns: Any, rows: np.ndarray) -> dict[str, Any]:
    """Return statistics of the trajectories whose last frame is done."""
    episodes = Episodes(0)
    wanted = (keys.TRAJ_IDS, keys.REWARD, keys.NEXT_DONE)
    if not len(rows) or any(key not in columns for key in wanted):
        return {"trajectories": 0, **episodes.as_dict()}
    ids, reward, done = (columns[key].numpy()[rows].reshape(-1) for key in wanted)
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=ids[order[0]] - 1))
    lengths = np.diff(starts, append=len(order))
    returns = np.add.reduceat(reward[order].astype(np.float64), starts)
    ended = np.flatnonzero(done[order[starts + lengths - 1]])
    ended = ended[np.argsort(order[starts + lengths - 1][ended], kind="stable")]  # as they ended
    episodes.record(list(zip(returns[ended].tolist(), lengths[ended].tolist(), strict=True)))
    return {"trajectories": len(starts), **episodes.as_dict()}
