"""A dataset of what a writer had stored before it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from swath.data.datasets import UNFINISHED, absolute, partial_of, publish, write_about
from swath.data.files import ABOUT, read_columns, read_json, write_meta
from swath.errors import UsageError

__all__ = ["recover_dataset"]


def recover_dataset(directory: str | Path) -> int:
    """Make a dataset of the frames in `DIR.partial`, whose writer was killed; return how many.

    A batch that was being written may be there in part: each of its frames is whole.

    Args:
        directory: DIR, which was to be written; `DIR.partial` will do as well.
    """
    path = absolute(directory)
    if path.name.endswith(".partial"):
        path = path.with_name(path.name.removesuffix(".partial"))
    if (path / ABOUT).exists():
        raise UsageError(f"{path} is a whole dataset; there is nothing to recover.")
    partial = partial_of(path)
    noted = partial / UNFINISHED
    if not noted.exists():
        found = "has no frames" if partial.is_dir() else "does not exist"
        raise UsageError(f"{partial} {found}: there is nothing to recover.")
    with _alone(partial):
        about, columns = read_json(noted), read_columns(partial)
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


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Keep others out, or refuse while the writer is there."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"a process is writing to {partial}; let it end first.") from None
    finally:
        os.close(descriptor)
