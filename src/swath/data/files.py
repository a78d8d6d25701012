"""The files of a dataset: checked before any of them is used, and never changed by being read.

```
 DIR/swath.json      -->  how many frames
 DIR/meta.json       -->  key, shape and dtype of each column: so many bytes, in that file
 DIR/next/meta.json       the same of nested keys
```

A dataset may have been cut short by a full disk or a copy that broke off, and it may come from a
stranger. So the metadata is read here, word by word, and not by tensordict, which would unpickle
entries that are no tensors, leave out what is missing, and fill up with zeros what is too short, on
disk too: `torch.from_file` makes a file as long as it is told. Here a file is mapped only after it
was found to have exactly the bytes that the metadata asks for, so that there is nothing to make
longer. What is refused stays as it is.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import MemoryMappedTensor, TensorDict

from swath.errors import DamagedFileError, UsageError
from swath.tree import Key, key_name

__all__ = [
    "ABOUT",
    "META",
    "UNFINISHED",
    "ColumnFile",
    "Description",
    "check_size",
    "count_in",
    "damaged",
    "make_files",
    "read_description",
    "read_json",
    "write_meta",
]

ABOUT = "swath.json"
"""Where a dataset comes from."""
UNFINISHED = "unfinished.json"
"""What ABOUT will say, while frames are written; see recovery.py."""
META = "meta.json"
"""What is in a folder, in the words of tensordict."""
_END = ".memmap"
_RESERVED = ("shape", "device", "_type")
"""What META says of the folder itself."""
_KIND = str(TensorDict)
_MOST = 1 << 62
_DEEPEST = 64
_DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and re.fullmatch(r"torch\.(bool|u?int(8|16|32|64)|(b?float|complex)\w+)", str(dtype))
}
# No character of a key may lead out of the folder or mean something to a file system.
_UNSAFE = re.compile(r'[/<>:"|?*\\ %\x00-\x1f\x7f]')


def damaged(path: Path, found: str, expected: str) -> DamagedFileError:
    """Return the error that tells of a file which is not as it was written."""
    return DamagedFileError(
        f"{path} {found}; {expected}. It was damaged after it was written, or not copied whole. "
        "Copy the directory again, or restore it from a backup; swath has changed nothing in "
        "it."
    )


class ColumnFile(NamedTuple):
    """One key of a dataset: a file with the bytes of all frames."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype

    def nbytes(self, frames: int) -> int:
        """Return how long the file is that holds so many frames."""
        return frames * math.prod(self.shape) * self.dtype.itemsize

    def cut(self, frames: int) -> None:
        """Make the file as long as so many frames are."""
        with self.path.open("ab") as file:
            file.truncate(self.nbytes(frames))

    def map(self, frames: int) -> torch.Tensor:
        """Return the frames, mapped; the file must hold so many, and neither less nor more."""
        check_size(self.path, self.nbytes(frames))
        shape = torch.Size([frames, *self.shape])
        if not shape.numel():
            return torch.empty(shape, dtype=self.dtype)
        return MemoryMappedTensor.from_filename(self.path, dtype=self.dtype, shape=shape)


class Description(NamedTuple):
    """What the metadata of a dataset says; all files that it names are there, and of that size."""

    directory: Path
    frames: int
    """Rows of each column: of a buffer on disk, its capacity."""
    about: dict[str, Any]
    columns: dict[Key, ColumnFile]
    folders: list[Path]

    def map(self) -> dict[Key, torch.Tensor]:
        """Return all columns, mapped."""
        return {key: column.map(self.frames) for key, column in self.columns.items()}

    def files(self) -> Iterator[Path]:
        """Yield all files that are described, and those that describe them."""
        yield self.directory / ABOUT
        yield from (folder / META for folder in self.folders)
        yield from (column.path for column in self.columns.values())


# -- writing --------------------------------------------------------------------------------------


def make_files(directory: Path, rows: Mapping[Key, torch.Tensor]) -> dict[Key, ColumnFile]:
    """Make an empty file for each key, where tensordict looks for it."""
    for key in rows:  # all of them before there is any file
        taken = [name for name in key if name in _RESERVED]
        if taken:
            raise UsageError(
                f"{key_name(key)} cannot be stored: the name {taken[0]!r} is reserved, since "
                "it describes a folder in the metadata. Rename the key."
            )
    columns = {}
    for key, row in rows.items():
        folder = directory.joinpath(*map(_file_name, key[:-1]))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (_file_name(key[-1]) + _END)
        path.open("xb").close()
        columns[key] = ColumnFile(path, row.shape[1:], row.dtype)
    return columns


def write_meta(directory: Path, columns: Mapping[Key, ColumnFile], frames: int) -> None:
    """Describe columns as tensordict does, so that it can load them by itself."""
    folders: dict[Key, dict[str, Any]] = {(): {}}
    for key, column in columns.items():
        for depth, name in enumerate(key[:-1]):
            folders[key[:depth]][name] = {"type": "TensorDict"}
            folders.setdefault(key[: depth + 1], {})
        folders[key[:-1]][key[-1]] = {
            "device": "cpu",
            "shape": [frames, *column.shape],
            "dtype": str(column.dtype),
            "is_nested": False,
        }
    for key, entries in folders.items():
        about = {"shape": [frames], "device": "cpu", "_type": _KIND}
        path = directory.joinpath(*map(_file_name, key)) / META
        path.write_text(json.dumps({**entries, **about}), encoding="utf-8")


def _file_name(key: str) -> str:
    """Return the name by which tensordict finds a key, which is never a path."""
    if key in (".", ".."):
        return "%2E" * len(key)
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", key) or "%"


# -- reading --------------------------------------------------------------------------------------


def read_description(directory: Path) -> Description:
    """Return what a directory holds, after looking at the size of every file; maps nothing."""
    about = read_json(directory / ABOUT)
    which = "frames" if "frames" in about else "capacity"
    frames = count_in(directory / ABOUT, about, which, 1)
    columns: dict[Key, ColumnFile] = {}
    folders: list[Path] = []
    _read_folder(directory, (), frames, columns, folders)
    if not columns:
        raise damaged(directory / META, "names no key", "a dataset has one at least")
    for column in columns.values():
        check_size(column.path, column.nbytes(frames))
    _refuse_unknown(directory, columns, folders)
    return Description(directory, frames, about, columns, folders)


def read_columns(directory: Path) -> dict[Key, ColumnFile]:
    """Return the columns of a dataset that was not finished, whatever is in their files."""
    columns: dict[Key, ColumnFile] = {}
    shape: Any = read_json(directory / META).get("shape")
    frames = shape[0] if isinstance(shape, list) and shape and _is_count(shape[0]) else 0
    _read_folder(directory, (), frames, columns, [])
    return columns


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of JSON holds."""
    check_size(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also if it is no text at all
        raise damaged(path, f"is no JSON ({error})", "an object was expected") from None
    if not isinstance(found, dict):
        raise damaged(path, f"holds {_short(found)}", "an object in braces was expected")
    return found


def check_size(path: Path, nbytes: int | None = None) -> None:
    """Refuse a file that is not there, or is not exactly so long."""
    expected = "a file was expected" if nbytes is None else f"{nbytes:,} bytes were expected"
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise damaged(path, "is missing", expected) from None
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for ever
        raise damaged(path, "is no file", expected)
    if nbytes is not None and status.st_size != nbytes:
        raise damaged(path, f"has {status.st_size:,} bytes", expected)


def count_in(path: Path, found: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Return a number of the metadata, which must be one."""
    value: Any = found.get(name)
    if not _is_count(value) or value < least:
        raise damaged(path, f"has {name}={_short(value)}", f"a number from {least} on was expected")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def _read_folder(
    folder: Path, above: Key, frames: int, columns: dict[Key, ColumnFile], folders: list[Path]
) -> None:
    path = folder / META
    meta = read_json(path)
    folders.append(folder)
    shape, _, kind = (meta.pop(name, None) for name in _RESERVED)
    if not _is_shape(shape, frames) or shape != [frames]:
        raise damaged(path, f"has shape={_short(shape)}", f"[{frames}] was expected, as in {ABOUT}")
    if kind != _KIND or len(above) > _DEEPEST:
        raise damaged(path, f"has _type={_short(kind)}", f"{_KIND!r} was expected")
    for name, entry in meta.items():
        key = (*above, name)
        if not isinstance(entry, dict):
            if name.startswith("_"):  # what newer versions of tensordict note of a folder
                continue
            raise damaged(path, f"has {name}={_short(entry)}", "a description was expected")
        if entry.get("type") == "TensorDict":
            _read_folder(_existing(folder, name, ""), key, frames, columns, folders)
        else:
            columns[key] = _column(folder, key, entry, frames)


def _column(folder: Path, key: Key, entry: Mapping[str, Any], frames: int) -> ColumnFile:
    """Return what the metadata says of a key, which must be a plain tensor.

    For anything else tensordict would have to unpickle something, which runs code.
    """
    path = folder / META
    if entry.get("type") is not None or entry.get("is_nested"):
        raise UsageError(
            f"{path} says that {key_name(key)} is a "
            f"{_short(entry.get('type', 'nested tensor'))}, but datasets of swath hold plain "
            "tensors only. Nothing was loaded, since loading such an entry can run code that "
            "came with the directory. If you trust its source, load it with tensordict and "
            "write the tensors again."
        )
    shape: Any = entry.get("shape")
    dtype: Any = entry.get("dtype")
    if not _is_shape(shape, frames) or not isinstance(dtype, str) or dtype not in _DTYPES:
        raise damaged(
            path,
            f"says of {key_name(key)} shape={_short(shape)}, dtype={_short(dtype)}",
            f"[{frames}, ...] and one of torch's dtypes were expected",
        )
    file = _existing(folder, key[-1], _END)
    return ColumnFile(file, torch.Size(shape[1:]), _DTYPES[dtype])


def _is_shape(shape: Any, frames: int) -> bool:
    """Tell whether this is a shape of so many frames that memory can have."""
    if not isinstance(shape, list) or len(shape) > _DEEPEST or not all(map(_is_count, shape)):
        return False
    return shape[:1] == [frames] and math.prod(shape) < _MOST >> 4


def _existing(folder: Path, name: str, end: str) -> Path:
    """Return the file of a key, also under the plain name that older tensordicts gave it."""
    path = folder / (_file_name(name) + end)
    plain = name not in ("", ".", "..") and not re.search(r"[/\\\x00]|^\w:", name)
    if plain and not path.exists() and (folder / (name + end)).exists():
        return folder / (name + end)
    return path


def _refuse_unknown(
    directory: Path, columns: Mapping[Key, ColumnFile], folders: list[Path]
) -> None:
    """Refuse columns that no metadata names: whatever named them is lost."""
    known, inside = {column.path for column in columns.values()}, set(folders)
    for name, below, files in os.walk(directory):
        folder = Path(name)
        # A dataset of its own may lie below this one.
        below[:] = [
            one
            for one in below
            if folder / one in inside
            or not (one.endswith(".partial") or (folder / one / ABOUT).exists())
        ]
        for path in (folder / file for file in files if file.endswith(_END)):
            # What macOS puts beside a file, where the disk has no room for it elsewhere.
            beside = path.name.startswith("._") and path.with_name(path.name[2:]) in known
            if path not in known and not beside:
                meta = path.parent / META
                raise damaged(meta, f"does not name {path.name}", "each column must be named")
