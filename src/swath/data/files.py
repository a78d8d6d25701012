"""Directories that are whole or not there: written under another name, renamed at the end."""

from __future__ import annotations

from pathlib import Path

from swath.errors import UsageError

__all__ = ["claim", "commit", "partial_of"]


def partial_of(directory: Path) -> Path:
    """Return where a directory is written until it is whole: `DIR.partial`."""
    return directory.with_name(directory.name + ".partial")


def claim(directory: str | Path) -> Path:
    """Return the directory as a full path, or refuse it if something is there already."""
    path = Path(directory).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a directory that does not exist yet.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty; name another directory or delete it.")
    if partial_of(path).exists():
        raise UsageError(
            f"{partial_of(path)} exists: another run writes there, or one was killed. Name another "
            "directory, or delete it."
        )
    return path


def commit(directory: Path) -> None:
    """Give a finished directory its name."""
    if directory.is_dir():
        directory.rmdir()  # it is empty; whatever has got in since is not overwritten
    partial_of(directory).rename(directory)
