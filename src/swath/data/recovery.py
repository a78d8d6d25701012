"""A dataset of what a writer had stored before it was killed."""

from __future__ import annotations

import os
from pathlib import Path

from swath.data.datasets import absolute, partial_of, publish, write_about
from swath.data.files import ABOUT, UNFINISHED, read_columns, read_json, write_meta
from swath.errors import UsageError
from swath.system import lock_directory

__all__ = ["recover_dataset"]


def recover_dataset(directory: str | Path) -> int:
    """Make a dataset of the frames in `DIR.partial`, whose writer was killed; return how many.

    A batch that was being written may be there in part: each of its frames is whole.

    Args:
        directory: DIR, which was to be written; `DIR.partial` will do as well.

    Examples:
        >>> recover_dataset("data/killed")  # doctest: +SKIP
        12000
    """
    path = absolute(directory)
    if path.name.endswith(".partial"):
        path = path.with_name(path.name.removesuffix(".partial"))
    if (path / ABOUT).exists():
        raise UsageError(f"{path} is a whole dataset; there is nothing to recover.")
    partial = partial_of(path)
    if not (partial / UNFINISHED).exists():
        found = "has no frames" if partial.is_dir() else "does not exist"
        delete = " Delete it." if partial.is_dir() else ""
        raise UsageError(f"{partial} {found}: there is nothing to recover.{delete}")
    try:
        let_go = lock_directory(partial)
    except BlockingIOError:
        raise UsageError(f"a process is writing to {partial}; let it end first.") from None
    try:
        return _recovered(path)
    finally:
        let_go()


def _recovered(path: Path) -> int:
    partial = partial_of(path)
    about, columns = read_json(partial / UNFINISHED), read_columns(partial)
    # The killed writer may have appended to some columns only.
    frames = min(
        os.stat(column.path).st_size // column.nbytes(1)
        for column in columns.values()
        if column.nbytes(1)
    )
    if not frames:
        raise UsageError(f"{partial} has no whole frame: there is nothing to recover.")
    for column in columns.values():
        column.cut(frames)
    write_meta(partial, columns, frames)
    write_about(partial, {**about, "frames": frames})
    publish(path)
    return frames
