"""Where Minari's datasets are on disk, found without importing Minari."""

from __future__ import annotations

from pathlib import Path

from swath.errors import UsageError

__all__ = ["minari_dataset_in"]

_DEPTH = 4
"""An id has a name and as many namespaces as its env has, which are folders."""


def minari_dataset_in(directory: str | Path) -> Path | None:
    """Return the folder of the Minari dataset that is or lies below a directory.

    None if there is none; more than one are refused with their names.
    """
    root = Path(directory)
    found: list[Path] = []
    for depth in range(_DEPTH):
        found += [path.parents[1] for path in root.glob("*/" * depth + "data/metadata.json")]
    if len(found) > 1:
        names = ", ".join(sorted(repr(str(path)) for path in found))
        raise UsageError(
            f"there are {len(found)} Minari datasets below {root}; name one of them: {names}."
        )
    return found[0] if found else None
