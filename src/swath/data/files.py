"""Directories that are whole or not there.

```
 claim(DIR) --> DIR.partial, being written --commit--> DIR
                     +--------------------- abandon --> nothing
```

A process that is killed leaves `DIR.partial` behind, which nothing takes for a dataset.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from swath.errors import UsageError

__all__ = ["abandon", "claim", "commit", "partial_of"]


def partial_of(directory: Path) -> Path:
    """Return where a directory is written until it is whole: `DIR.partial`."""
    return directory.with_name(directory.name + ".partial")


def claim(directory: str | Path) -> Path:
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
    except KeyboardInterrupt:  # raised after the directory was made
        with contextlib.suppress(OSError):
            partial_of(path).rmdir()
        raise
    return path


def commit(directory: Path) -> None:
    """Give the finished directory its name."""
    if directory.is_dir():
        directory.rmdir()  # it is empty; whatever has got in since is not overwritten
    partial_of(directory).rename(directory)


def abandon(directory: Path) -> None:
    """Remove what was written of the directory."""
    shutil.rmtree(partial_of(directory))
