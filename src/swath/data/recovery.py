"""A dataset of what a writer had stored before it was killed."""

from __future__ import annotations

import os
from pathlib import Path

from swath.data.datasets import absolute, partial_of, publish, write_about
from swath.data.files import ABOUT, UNFINISHED, check_size, read_columns, read_json, write_meta
from swath.errors import UsageError
from swath.system import lock_directory

__all__ = ["recover_dataset"]


def recover_dataset(directory: str | Path) -> int:
    """Make a dataset of the frames in `DIR.partial`, whose writer was killed; return how many.

    Of the batch that was being written a part may be there, but each frame is complete.

    Args:
        directory: The directory that the writer was given, or its `DIR.partial`.

    Examples:
        >>> recover_dataset("data/killed")  # doctest: +SKIP
        12000
    """
    path = absolute(directory)
    if path.name.endswith(".partial"):
        path = path.with_name(path.name.removesuffix(".partial"))
    if (path / ABOUT).exists():
        raise UsageError(f"{path} is a complete dataset; there is nothing to recover.")
    partial = partial_of(path)
    if not (partial / UNFINISHED).exists():
        found = "has no frames" if partial.is_dir() else "does not exist"
        delete = " Delete it." if partial.is_dir() else ""
        raise UsageError(f"{partial} {found}: there is nothing to recover.{delete}")
    try:
        let_go = lock_directory(partial)
    except BlockingIOError:
        raise UsageError(
            f"a process is still writing to {partial}; wait until it has ended."
        ) from None
    try:
        return _recovered(path)
    finally:
        let_go()


def _recovered(path: Path) -> int:
    partial = partial_of(path)
    _refuse_links(partial)
    about, columns = read_json(partial / UNFINISHED), read_columns(partial)
    for column in columns.values():
        check_size(column.path)
    # The killed writer may have appended to some columns only.
    sizes = [(column.path.stat().st_size, column.nbytes(1)) for column in columns.values()]
    frames = min((size // each for size, each in sizes if each), default=0)
    if not frames:
        raise UsageError(f"{partial} has no complete frame; there is nothing to recover.")
    for column in columns.values():
        column.cut(frames)
    write_meta(partial, columns, frames)
    write_about(partial, {**about, "frames": frames})
    publish(path)
    return frames


def _refuse_links(directory: Path) -> None:
    """Refuse links, which no writer makes: what they lead to would be cut."""
    for folder, below, files in os.walk(directory):
        for path in (Path(folder) / name for name in (*below, *files)):
            if path.is_symlink():
                raise UsageError(
                    f"{path} is a link, and recovering cuts files: put the file itself there."
                )
