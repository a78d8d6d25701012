"""Room on disk for files that are written through a memory map."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from swath.system import free_bytes

__all__ = ["reserve"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def reserve(directory: Path, sizes: Mapping[Path, int]) -> None:
    """Give the files of a directory their sizes, and take room on disk, or raise an `OSError`.

    Whoever writes through a map to a page for which the disk has no room is killed by SIGBUS: there
    is nothing to catch, and no message. So the room is taken before anything is mapped. Files that
    have it already are left alone.
    """
    missing = {path: size - _room_of(path) for path, size in sizes.items()}
    needed = sum(max(0, size) for size in missing.values())
    free = free_bytes(directory.parent)
    full = (
        f"its files need {needed:,} bytes more on disk, and {free:,} are free; make room, give a "
        "smaller capacity, or name a directory on another disk"
    )
    if needed > free:  # to take what there is would hinder others meanwhile
        raise OSError(errno.ENOSPC, full, str(directory))
    for path, size in sizes.items():
        if missing[path] <= 0 < size:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _allocate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _FULL:
                raise OSError(error.errno, full, str(directory)) from error
            raise


def _room_of(path: Path) -> int:
    if not path.exists():
        return 0
    status = path.stat()
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size


def _allocate(descriptor: int, size: int) -> None:
    try:
        if size and hasattr(os, "posix_fallocate"):
            return os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    # The file system cannot take room beforehand: that it was free a moment ago must do.
    os.ftruncate(descriptor, size)
