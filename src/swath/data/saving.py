"""Saving a replay buffer as a dataset: whole, or the one before it.

```
 DIR.new   written, with replay.pt beside the frames -->  DIR becomes DIR.old, DIR.new becomes DIR
```

Wherever a crash comes, DIR or, between the two steps, DIR.old is whole; both are looked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.data.datasets import DatasetWriter, load_dataset, partial_of
from swath.data.drawing import Draws
from swath.data.runs import Runs
from swath.data.storage import Ring, Word
from swath.errors import UsageError
from swath.tree import Key, nest

__all__ = ["check_state", "load", "restore", "save", "state_of"]

_STATE = "replay.pt"
_CHUNK = 1 << 26


def state_of(ring: Ring | None, draws: Draws, capacity: int) -> dict[str, Any]:
    """Return all frames and all that the next draws depend on."""
    state: dict[str, Any] = {
        "format": 1,
        "capacity": capacity,
        "rng": draws.rng.bit_generator.state,
    }
    if ring is not None:
        with ring:
            rows = ring.numbers() % capacity
            state["frames"] = nest({key: c.take(rows) for key, c in ring.columns.items()})
            state.update(_ledger(ring, draws))
    return state


def _ledger(ring: Ring, draws: Draws) -> dict[str, Any]:
    numbers = ring.numbers()
    ledger = {
        "numbers": torch.from_numpy(numbers),
        "words": torch.tensor(ring.words[: Word.RUNS].tolist()),
        "sampler": draws.sampler.state_dict(),
    }
    if ring.words[Word.RUNS]:  # the frames alone do not tell where some are missing in between
        rows = numbers % ring.capacity
        ledger["begins"], ledger["before"] = (
            torch.from_numpy(one[rows]) for one in (ring.begins, ring.before)
        )
    return ledger


def check_state(state: Mapping[str, Any], capacity: int) -> None:
    """Refuse a state that is none of a buffer of this capacity."""
    if state.get("format") != 1 or state.get("capacity") != capacity:
        raise UsageError(
            f"this is no state of a replay buffer with capacity={capacity}: format "
            f"{state.get('format')!r}, capacity {state.get('capacity')!r}."
        )


def save(ring: Ring, draws: Draws, directory: str | Path) -> None:
    """Write frames and whatever else there is to know, in place of what was saved there before."""
    path, new, old = _paths(directory)
    if path.exists() and not (path / _STATE).is_file():
        raise UsageError(f"{path} exists and is no saved replay buffer; name another directory.")
    for leftover in (new, partial_of(new)):
        shutil.rmtree(leftover, ignore_errors=True)
    size = sum(column.tensor[:1].nbytes for column in ring.columns.values())
    with ring:
        numbers = ring.numbers()
        with DatasetWriter(new, capacity=ring.capacity) as writer:
            for part in np.array_split(numbers, -(-len(numbers) * size // _CHUNK) or 1):
                rows = part % ring.capacity
                frames = {key: column.take(rows) for key, column in ring.columns.items()}
                writer.write(TensorDict(nest(frames), [len(part)]))
        torch.save({**state_of(None, draws, ring.capacity), **_ledger(ring, draws)}, new / _STATE)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load(directory: str | Path) -> tuple[TensorDict, dict[str, Any]]:
    """Return the frames, memory-mapped, and the rest."""
    path = _paths(directory)[0]
    if not (path / _STATE).is_file():
        raise UsageError(f"{path} is no saved replay buffer: it has no {_STATE}.")
    return load_dataset(path), torch.load(path / _STATE, weights_only=True)


def restore(
    ring: Ring, values: Mapping[Key, torch.Tensor], state: Mapping[str, Any]
) -> Runs | None:
    """Put frames back into their rows, with the numbers that they had.

    Returns what their trajectories go on from, if slices of them are wanted.
    """
    numbers = state["numbers"].numpy()
    rows = numbers % ring.capacity
    with ring:
        ring.stamps[:] = 0
        for key, value in values.items():
            tensor = ring.columns[key].tensor
            tensor[torch.from_numpy(rows)] = value.to(tensor.device)
        ring.words[: Word.RUNS] = state["words"].numpy().data
        ring.words[Word.STARVED] = 0
        ring.words[Word.LOADED] += 1
        runs = Runs(ring) if ring.words[Word.RUNS] else None
        if runs is not None:
            runs.follow(ring, numbers)
            if "begins" in state:
                ring.begins[rows], ring.before[rows] = (
                    state[name].numpy() for name in ("begins", "before")
                )
        ring.stamps[rows] = numbers + 1
    return runs


def _paths(directory: str | Path) -> tuple[Path, Path, Path]:
    """Return DIR, DIR.new and DIR.old, after setting right what a crash has left."""
    path = Path(directory).expanduser().absolute()
    new, old = (path.with_name(path.name + end) for end in (".new", ".old"))
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)
    return path, new, old
