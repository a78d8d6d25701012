"""Saving a replay buffer as a dataset: whole, or the one before it.

```
 DIR.new   written, with replay.pt beside the frames -->  DIR becomes DIR.old, DIR.new becomes DIR
```

Wherever a crash comes, DIR or, between the two steps, DIR.old is whole; both are looked for. What
has one of these names and is no saved buffer is somebody else's, and is left alone; to load
removes nothing.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.data.checksums import STATE
from swath.data.datasets import DatasetWriter, absolute, described, opened, partial_of
from swath.data.drawing import Draws
from swath.data.files import check_size, damaged
from swath.data.runs import Runs, Streams
from swath.data.samplers import Sampler
from swath.data.storage import Ring, Word
from swath.errors import UsageError
from swath.tree import Key, nest

__all__ = ["check_state", "load", "restore", "save", "state_of"]

_CHUNK = 1 << 26


def state_of(ring: Ring | None, draws: Draws, streams: Streams, capacity: int) -> dict[str, Any]:
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
            state.update(_ledger(ring, draws, streams))
    return state


def _ledger(ring: Ring, draws: Draws, streams: Streams) -> dict[str, Any]:
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
        ledger["streams"] = streams.state(ring)
    return ledger


def check_state(state: Mapping[str, Any], capacity: int, sampler: Sampler) -> None:
    """Refuse a state that is none of a buffer of this capacity, with such a sampler."""
    if state.get("format") != 1 or state.get("capacity") != capacity:
        raise UsageError(
            f"this is not a state of a replay buffer with capacity={capacity}: format "
            f"{state.get('format')!r}, capacity {state.get('capacity')!r}."
        )
    known = state.get("sampler")  # none, if the buffer was empty
    needed = set() if known is None else sampler.state_dict().keys() - known.keys()
    if known is not None and needed:
        raise UsageError(
            "this is the state of a replay buffer with another sampler: "
            f"{type(sampler).__name__} continues from {sorted(needed)}, and it has "
            f"{sorted(known)}. Load it into a buffer with the sampler that it was saved with, "
            "or load only the frames: buffer.extend(load_dataset(directory))."
        )


def save(
    ring: Ring, draws: Draws, streams: Streams, directory: str | Path, checksum: bool = False
) -> None:
    """Write frames and whatever else there is to know, in place of what was saved there before."""
    path, new, old = _paths(directory)
    for one in (path, new, old):
        if one.exists() and not (one / STATE).is_file():
            raise UsageError(
                f"{one} exists and is not a saved replay buffer; name another directory."
            )
    _remove(old)  # a crash has left them
    _remove(new)
    try:
        with ring:
            _write(ring, draws, streams, new, checksum)
    except BaseException:
        _remove(new)  # on a full disk it would take the room of whatever comes next
        raise
    if path.exists():
        path.rename(old)
    new.rename(path)
    _remove(old)


def _remove(saved: Path) -> None:
    """Remove what was saved, under a name that says that it is not whole any more."""
    shutil.rmtree(partial_of(saved), ignore_errors=True)
    if saved.exists():
        saved.rename(partial_of(saved))
        shutil.rmtree(partial_of(saved), ignore_errors=True)


def _write(ring: Ring, draws: Draws, streams: Streams, new: Path, checksum: bool) -> None:
    size = sum(column.tensor[:1].nbytes for column in ring.columns.values())
    numbers = ring.numbers()
    with DatasetWriter(new, checksum=checksum, capacity=ring.capacity) as writer:
        for part in np.array_split(numbers, -(-len(numbers) * size // _CHUNK) or 1):
            rows = part % ring.capacity
            frames = {key: column.take(rows) for key, column in ring.columns.items()}
            writer.write(TensorDict(nest(frames), [len(part)]))
        state = {**state_of(None, draws, streams, ring.capacity), **_ledger(ring, draws, streams)}
        (partial_of(new) / STATE).write_bytes(_as_bytes(state))


def _as_bytes(state: dict[str, Any]) -> memoryview:
    """Return what `torch.save` makes of a state; of a full disk it would say nothing of use."""
    out, options = io.BytesIO(), torch.serialization
    before = options.get_crc32_options()
    options.set_crc32_options(True)  # the user may have done without them; `_read_state` does not
    try:
        torch.save(state, out)
    finally:
        options.set_crc32_options(before)
    return out.getbuffer()


def load(directory: str | Path, verify: bool = False) -> tuple[TensorDict, dict[str, Any]]:
    """Return the frames, memory-mapped, and the rest."""
    path = _paths(directory)[0]
    if not (path / STATE).exists():
        raise UsageError(f"{path} is not a saved replay buffer: it has no {STATE}.")
    found = described(path, verify)
    state = _read_state(path / STATE, found.frames)
    return opened(found)[0], state


def _read_state(path: Path, frames: int) -> dict[str, Any]:
    """Return what was saved beside so many frames."""
    check_size(path)
    content = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(content) as archive:  # torch does not look at the checksums in there
            broken = archive.testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"{broken} in it was changed")
        content.seek(0)
        state = torch.load(content, map_location="cpu", weights_only=True)
        numbers = state["numbers"]
        good = _are_numbers(numbers, state["words"]) and isinstance(state["sampler"], dict)
        runs = [state[name] for name in ("begins", "before") if name in state]
        good &= all(one.shape == numbers.shape and one.dtype == torch.int64 for one in runs)
        streams = state.get("streams", {})
        good &= all(_are_open(one, state["words"][Word.CLAIMED]) for one in streams.values())
    except Exception as error:  # torch and zipfile raise a dozen kinds
        raise damaged(path, f"cannot be read ({error})", "the state of a buffer expected") from None
    if not good or len(numbers) != frames:
        raise damaged(path, "is not about these frames", f"the numbers of {frames} were expected")
    return state


def _are_numbers(numbers: torch.Tensor, words: torch.Tensor) -> bool:
    """Tell whether these can be the numbers of frames, and the words of their ledger."""
    if numbers.ndim != 1 or words.shape != (Word.RUNS,):
        return False
    if not numbers.dtype == words.dtype == torch.int64 or words.min() < 0 or not len(numbers):
        return False
    claimed = words[Word.CLAIMED]
    return bool(0 <= numbers[0] <= numbers[-1] < claimed and (numbers.diff() > 0).all())


def _are_open(known: torch.Tensor, claimed: torch.Tensor) -> bool:
    """Tell whether these can be open trajectories, each with the number of its last frame."""
    if known.dtype != torch.int64 or known.ndim != 2 or known.shape[1] != 2:
        return False
    return bool(((known[:, 1] >= 0) & (known[:, 1] < claimed)).all())


def restore(
    ring: Ring, streams: Streams, values: Mapping[Key, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Put frames back into their rows, with the numbers that they had; nobody may write."""
    numbers = state["numbers"].numpy()
    rows = numbers % ring.capacity
    with ring:
        ring.stamps[:] = 0
        for key, value in values.items():
            ring.columns[key].put_back(rows, value)
        ring.words[: Word.RUNS] = state["words"].numpy().data
        ring.words[Word.STARVED] = 0
        ring.words[Word.LOADED] += 1
        if ring.words[Word.RUNS]:
            Runs(ring).follow(ring, numbers)
            streams.load(ring, state.get("streams", {}))
            if "begins" in state:
                ring.begins[rows], ring.before[rows] = (
                    state[name].numpy() for name in ("begins", "before")
                )
        ring.stamps[rows] = numbers + 1


def _paths(directory: str | Path) -> tuple[Path, Path, Path]:
    """Return DIR, DIR.new and DIR.old, after setting right what a crash has left."""
    path = absolute(directory)
    new, old = (path.with_name(path.name + end) for end in (".new", ".old"))
    if not path.exists() and (old / STATE).is_file():
        old.rename(path)
    return path, new, old
