"""Datasets on disk: frames one after the other, in tensordict's memory-map format.

```
 DIR/swath.json        where it comes from: swath's version, number of frames, env, seed, policy
 DIR/meta.json         tensordict's own description, which `TensorDict.load_memmap(DIR)` reads
 DIR/*.memmap          one file per key with the bytes of all frames; nested keys are folders
 DIR/replay.bin        of a replay buffer only: which rows are whole, and in which order they came
 DIR/unfinished.json   while it is written only, instead of swath.json
 DIR/checksums.json    if wanted: a checksum of each of the other files
```

All of it is written as `DIR.partial` and gets its name when the writer closes: what is called
`DIR` is whole. Files grow by plain appends rather than through a memory map: that is as fast, needs
no guess of the final size, and a full disk is an error, not a dead process.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath import __version__
from swath.data.checksums import CHECKSUMS, Checksums, verify_files
from swath.data.files import (
    ABOUT,
    UNFINISHED,
    ColumnFile,
    Description,
    check_size,
    make_files,
    read_description,
    write_meta,
)
from swath.data.frames import check_fit, flat, frames_of
from swath.data.ledger import LEDGER, read_stamps
from swath.data.minari_paths import minari_dataset_in
from swath.errors import ClosedError, UsageError
from swath.system import lock_directory
from swath.tree import Key, nest

__all__ = [
    "DatasetWriter",
    "absolute",
    "claimed",
    "described",
    "load_dataset",
    "opened",
    "partial_of",
    "publish",
    "verify_dataset",
    "write_about",
]


class DatasetWriter:
    """Write batches to a directory that `load_dataset` reads; use it in a `with` block.

    Frames are stored batch after batch, within a batch env by env, and in order of time for each
    env.
    Rows that `("collector", "mask")` excludes are left out, and so is the mask. Leaving the block
    closes the writer, also after an exception: the frames written so far are kept.

    Args:
        directory: A directory that does not exist or is empty.
        checksum: Store a checksum of each file, so that `verify=True` finds changed bytes.
        **about: Values to store in `DIR/swath.json`, such as `env_id="CartPole-v1"`.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from swath.envs import GymEnv
        >>> with TemporaryDirectory() as directory:
        ...     with DatasetWriter(directory) as writer:
        ...         writer.write(GymEnv("CartPole-v1").rollout(5))
        ...     load_dataset(directory)["observation"].shape
        torch.Size([5, 4])
    """

    def __init__(self, directory: str | Path, *, checksum: bool = False, **about: Any) -> None:
        if taken := sorted({"swath", "frames"} & about.keys()):
            raise UsageError(f"{taken} are stored by the writer itself; use another name.")
        self.directory = claimed(directory)
        self.frames = 0
        self._about = about
        self._columns: dict[Key, ColumnFile] = {}
        self._checksums = Checksums() if checksum else None
        # Tells who would recover the dataset that its writer lives.
        self._let_go = weakref.finalize(self, lock_directory(partial_of(self.directory)))
        self._closed = False

    @property
    def load_call(self) -> str:
        """The Python code that loads the dataset."""
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
            partial = partial_of(self.directory)
            self._columns = make_files(partial, rows)
            write_meta(partial, self._columns, 0)  # for `recover_dataset`
            write_about(partial, self._about, UNFINISHED)
        check_fit(self._columns, rows, 1)
        content = {
            self._columns[key].path: tensor.reshape(-1).view(torch.uint8).numpy().data
            for key, tensor in rows.items()
        }
        try:
            for path, data in content.items():
                with path.open("ab") as file:
                    file.write(data)
        except BaseException:
            for column in self._columns.values():
                column.cut(self.frames)
            raise
        self.frames += frames
        if self._checksums is not None:
            self._checksums.add(content)

    def close(self) -> None:
        """Finish the dataset and give it its name; calling it again has no effect."""
        if self._closed:
            return
        if not self.frames:
            self.discard()
            raise UsageError(f"no frames were written to {self.directory}, so there is no dataset.")
        self._closed = True
        partial = partial_of(self.directory)
        for column in self._columns.values():  # somebody may have tidied up meanwhile
            check_size(column.path, column.nbytes(self.frames))
        write_meta(partial, self._columns, self.frames)
        write_about(partial, {"frames": self.frames, **self._about})
        if self._checksums is not None:
            self._checksums.write(partial)
        publish(self.directory)
        self._let_go()

    def discard(self) -> None:
        """Delete the frames that were written, unless the writer is closed already."""
        if not self._closed:
            self._closed = True
            self._let_go()
            shutil.rmtree(partial_of(self.directory))

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not self.frames:
            self.discard()
        else:
            self.close()


def absolute(directory: str | Path) -> Path:
    """Return the full path of a directory; of a link, that of what it leads to.

    What is renamed to the name of a link would take its place, on the disk where the link is.
    """
    path = Path(directory).expanduser().absolute()
    return path.resolve() if path.is_symlink() else path


def claimed(directory: str | Path) -> Path:
    """Make `DIR.partial` and return the full path of DIR, or refuse if something is there."""
    path = absolute(directory)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a directory that does not exist yet.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty; name another directory or delete it.")
    try:
        partial_of(path).mkdir(parents=True)
    except FileExistsError:
        raise UsageError(
            f"{partial_of(path)} exists: another run writes there, or one was killed. Choose "
            f"another directory, delete it, or keep its frames with `swath recover {path}`."
        ) from None
    return path


def write_about(directory: Path, about: Mapping[str, Any], name: str = ABOUT) -> None:
    """Note where a dataset comes from."""
    about = {"swath": __version__, **about}
    (directory / name).write_text(json.dumps(about, indent=2) + "\n")


def partial_of(directory: Path) -> Path:
    """Return where a directory is written until it is whole: `DIR.partial`."""
    return directory.with_name(directory.name + ".partial")


def publish(directory: Path) -> None:
    """Give a directory that is whole its name."""
    if directory.is_dir():
        directory.rmdir()  # it is empty; whatever has got in since is not overwritten
    partial_of(directory).rename(directory)
    # Only now: whoever is killed before leaves something that can be recovered.
    (directory / UNFINISHED).unlink(missing_ok=True)


def load_dataset(directory: str | Path, *, verify: bool = False) -> TensorDict:
    """Return a dataset as one memory-mapped TensorDict with batch size `[frames]`.

    Data is read when it is used. Writing into the tensors changes the files; clone first. For a
    `ReplayBuffer` on disk it returns the frames in the buffer, the oldest first; once the buffer
    has wrapped around, they are a copy. Nothing is unpickled, and files that are missing or do not
    have the right size raise a `DamagedFileError`.

    Args:
        directory: Where it is.
        verify: Read all files and compare them with the stored checksums.
    """
    data, rows = opened(described(directory, verify))
    return data[: len(rows)] if isinstance(rows, range) else data[torch.from_numpy(rows)]


def verify_dataset(directory: str | Path) -> bool:
    """Compare the files of a dataset with their checksums, or tell that there are none.

    Raises:
        DamagedFileError: If one differs; the message names it.
    """
    found = described(directory)
    if not (found.directory / CHECKSUMS).exists():
        return False
    verify_files(found)
    return True


def described(directory: str | Path, verify: bool = False) -> Description:
    """Return what is in a dataset, after looking at the sizes of its files."""
    path = Path(directory)
    if not (path / ABOUT).exists():
        reason = f"it has no {ABOUT}" if path.is_dir() else "there is no such directory"
        if minari_dataset_in(path) is not None:
            reason += f", but there is a Minari dataset: read_minari({str(directory)!r}) reads it"
        if partial_of(path).is_dir():
            reason += (
                f", but {partial_of(path)} exists: its writer still runs, or was killed. If it "
                f"was killed, `swath recover {path}` turns its frames into a dataset"
            )
        raise UsageError(f"{path} is not a swath dataset: {reason}.")
    found = read_description(path)
    if verify:
        verify_files(found)
    return found


def opened(found: Description) -> tuple[TensorDict, range | np.ndarray]:
    """Return all rows of a dataset, and which of them are frames, the oldest first."""
    rows: range | np.ndarray = range(found.frames)
    if "frames" not in found.about:
        stamps = read_stamps(found.directory / LEDGER, found.frames)
        rows = np.argsort(stamps, kind="stable")[np.count_nonzero(stamps <= 0) :]
        if np.array_equal(rows, np.arange(len(rows))):
            rows = range(len(rows))
    return TensorDict(nest(found.map()), [found.frames], device="cpu"), rows
