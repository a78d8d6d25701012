"""Datasets, saved buffers and buffers on disk, alike enough to be damaged by the same tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_kit import check, contents, numbered

from swath.data import DatasetWriter, ReplayBuffer, describe, load_dataset

KINDS = ["dataset", "saved", "buffer"]
CAPACITY = 20


def written(directory: Path, kind: str, **options: Any) -> list[int]:
    """Write frames, and return their counts, the oldest first."""
    if kind == "dataset":
        with DatasetWriter(directory, note="a word", **options) as writer:
            writer.write(numbered(0, 2, CAPACITY // 2))
        return list(range(CAPACITY))
    storage = {"storage": "memmap", "directory": directory} if kind == "buffer" else {}
    with ReplayBuffer(CAPACITY, sampler="prioritized", **storage) as buffer:
        buffer.extend(numbered(0, 15))
        buffer.extend(numbered(15, 12))  # the ring comes round
        if kind == "saved":
            buffer.save(directory, **options)
    return list(range(7, 27))


def loaded(directory: Path, kind: str, **options: Any) -> list[int]:
    """Return the counts of the frames in a directory, by all ways in which it can be read."""
    found = check(load_dataset(directory, **options)).tolist()
    assert describe(directory)["frames"] == len(found)
    if kind != "dataset":
        assert contents(opened(directory, kind, **options)) == found
    return found


def opened(directory: Path, kind: str, **options: Any) -> ReplayBuffer:
    storage = {"storage": "memmap", "directory": directory} if kind == "buffer" else {}
    buffer = ReplayBuffer(CAPACITY, sampler="prioritized", batch_size=8, **storage)
    if kind == "saved":
        buffer.load(directory, **options)
    return buffer


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def bytes_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files_of(directory)}


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
