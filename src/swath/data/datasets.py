"""Datasets on disk: frames one after the other, in tensordict's memory-map format.

```
 DIR/swath.json        where it comes from: swath's version, number of frames, env, seed, policy
 DIR/meta.json         tensordict's own description, which `TensorDict.load_memmap(DIR)` reads
 DIR/*.memmap          one file per key with the bytes of all frames; nested keys are folders
 DIR/replay.bin        of a replay buffer only: which rows are whole, and in which order they came
```

All of it is written as `DIR.partial` and gets its name when the writer closes: what is called
`DIR` is whole. Files grow by plain appends rather than through a memory map: that is as fast, needs
no guess of the final size, and a full disk is an error, not a dead process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

from swath import __version__
from swath.data.frames import check_fit, flat, frames_of
from swath.errors import ClosedError, UsageError
from swath.tree import Key, nest

__all__ = [
    "ABOUT",
    "LEDGER",
    "LEDGER_WORDS",
    "DatasetWriter",
    "claimed",
    "load_dataset",
    "make_columns",
    "opened",
    "partial_of",
    "write_about",
]

ABOUT = "swath.json"
"""Where a dataset comes from."""
LEDGER = "replay.bin"
"""In the directory of a replay buffer: words, then a stamp for each row; see storage.py."""
LEDGER_WORDS = 16


class DatasetWriter:
    """Write batches to a directory that `load_dataset` reads; use it in a `with` block.

    Frames stand batch after batch, within a batch env by env, and in order of time for each env.
    Rows that `("collector", "mask")` excludes are left out, and so is the mask. Leaving the block
    closes the writer, after an exception too: the frames written until then are kept.

    Args:
        directory: Where to; must not exist or be empty.
        **about: What to note in `DIR/swath.json`, such as `env_id="CartPole-v1"`.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from swath.envs import GymEnv
        >>> with TemporaryDirectory() as directory:
        ...     with DatasetWriter(directory) as writer:
        ...         writer.write(GymEnv("CartPole-v1").rollout(5))
        ...     load_dataset(directory)["observation"].shape
        torch.Size([5, 4])
    """

    def __init__(self, directory: str | Path, **about: Any) -> None:
        self.directory = claimed(directory)
        self.frames = 0
        self._about = about
        self._columns: dict[Key, _Column] = {}
        self._closed = False

    @property
    def load_call(self) -> str:
        """The Python that loads the dataset."""
        return f"swath.data.load_dataset({str(self.directory)!r})"

    def write(self, batch: TensorDictBase) -> None:
        """Append the frames of a batch `[*, T]`; all of them, or none if this raises."""
        if self._closed:
            raise ClosedError(f"the dataset {self.directory} is closed; make a new writer.")
        values, lead, mask = frames_of(batch)
        rows = {key: flat(value, lead, mask).cpu().contiguous() for key, value in values.items()}
        frames = min((len(row) for row in rows.values()), default=0)
        if not frames:
            return
        if not self._columns:
            self._columns = make_columns(partial_of(self.directory), rows)
        check_fit(self._columns, rows, 1)
        try:
            for key, tensor in rows.items():
                with self._columns[key].path.open("ab") as file:
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        except BaseException:
            for column in self._columns.values():
                column.cut(self.frames)
            raise
        self.frames += frames

    def close(self) -> None:
        """Finish the dataset and give it its name; calling it again is nothing."""
        if self._closed:
            return
        if not self.frames:
            self.discard()
            raise UsageError(f"no frame was written to {self.directory}, so there is no dataset.")
        self._closed = True
        partial = partial_of(self.directory)
        tensors = {key: column.load(self.frames) for key, column in self._columns.items()}
        TensorDict(nest(tensors), [self.frames]).memmap_(partial)
        write_about(partial, {"frames": self.frames, **self._about})
        if self.directory.is_dir():
            self.directory.rmdir()  # it is empty; whatever has got in since is not overwritten
        partial.rename(self.directory)

    def discard(self) -> None:
        """Throw away what was written, unless it is closed already."""
        if not self._closed:
            self._closed = True
            shutil.rmtree(partial_of(self.directory))

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not self.frames:
            self.discard()
        else:
            self.close()


class _Column(NamedTuple):
    """One key of a dataset: a file with the bytes of all frames."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype

    def cut(self, frames: int) -> None:
        with self.path.open("ab") as file:
            file.truncate(frames * self.shape.numel() * self.dtype.itemsize)

    def load(self, frames: int) -> torch.Tensor:
        shape = torch.Size([frames, *self.shape])
        if not shape.numel():
            return torch.empty(shape, dtype=self.dtype)
        return MemoryMappedTensor.from_filename(self.path, dtype=self.dtype, shape=shape)


def make_columns(partial: Path, rows: Mapping[Key, torch.Tensor]) -> dict[Key, _Column]:
    """Make an empty file for each key, where tensordict looks for it."""
    one = TensorDict(nest({key: row[:1] for key, row in rows.items()}), [1])
    files = one.memmap(partial)  # it knows how to turn any key into a file name
    columns = {
        key: _Column(Path(files.get(key).filename), row.shape[1:], row.dtype)
        for key, row in rows.items()
    }
    for column in columns.values():
        column.cut(0)
    return columns


def claimed(directory: str | Path) -> Path:
    """Make `DIR.partial` and return the full path of DIR, or refuse if something is there."""
    path = Path(directory).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a directory that does not exist yet.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty; name another directory or delete it.")
    try:
        partial_of(path).mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"{partial_of(path)} exists: another run writes there, or one was killed. Name another "
            "directory, or delete it."
        ) from None
    return path


def write_about(directory: Path, about: Mapping[str, Any]) -> None:
    """Note where a dataset comes from."""
    about = {"swath": __version__, **about}
    (directory / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def partial_of(directory: Path) -> Path:
    """Return where a directory is written until it is whole: `DIR.partial`."""
    return directory.with_name(directory.name + ".partial")


def load_dataset(directory: str | Path) -> TensorDict:
    """Return a dataset as one memory-mapped TensorDict with batch size `[frames]`.

    Nothing is read until it is used. Writing into its tensors changes the files; clone first.
    Of a `ReplayBuffer` on disk these are the frames that it holds, the oldest first; once its ring
    has come round, they are a copy.
    """
    data, rows = opened(directory)
    return data[: len(rows)] if isinstance(rows, range) else data[torch.from_numpy(rows)]


def opened(directory: str | Path) -> tuple[TensorDict, range | np.ndarray]:
    """Return all rows of a dataset, and which of them are frames, the oldest first."""
    path = Path(directory)
    if not (path / ABOUT).is_file():
        reason = f"it has no {ABOUT}" if path.is_dir() else "there is no such directory"
        if partial_of(path).is_dir():
            reason += f", but {partial_of(path)} is there: its writer runs yet, or was killed"
        raise UsageError(f"{path} is no swath dataset: {reason}.")
    data = TensorDict.load_memmap(path)
    if not (path / LEDGER).is_file():
        return data, range(len(data))
    stamps = np.fromfile(path / LEDGER, np.int64, data.batch_size[0], offset=8 * LEDGER_WORDS)
    rows = np.argsort(stamps, kind="stable")[np.count_nonzero(stamps <= 0) :]
    in_place = np.array_equal(rows, np.arange(len(rows)))
    return data, range(len(rows)) if in_place else rows
