"""Files damaged at random: the right frames or an error of ours, and no file changed by it."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from file_kit import KINDS, bytes_of, change_json, files_of, loaded, written

from swath.errors import UsageError

SECONDS = float(os.environ.get("SWATH_FUZZ_SECONDS", 3))


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def grow(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 5000)) if chance.random() < 0.5 else bytes(9))


def overwrite(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 20])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


def drop_key(path: Path, chance: random.Random) -> None:
    def drop(found: dict[str, Any]) -> None:
        name = chance.choice(list(found))
        if isinstance(found[name], dict) and chance.random() < 0.5:
            return drop(found[name])
        del found[name]

    change_json(path, drop)


def change_number(path: Path, chance: random.Random) -> None:
    text = path.read_text()
    number = chance.choice(list(re.finditer(r"\d+", text)))
    value = chance.choice([-1, 0, 1, 7, 2**31, 2**70, 1.5, chance.randrange(100)])
    path.write_text(text[: number.start()] + str(value) + text[number.end() :])


def damage(directory: Path, chance: random.Random, bytes_too: bool) -> str:
    """Damage one file, and say how; bytes of columns only where checksums can tell."""
    path = chance.choice(files_of(directory))
    ways = [empty, delete, grow] + [cut] * (path.stat().st_size > 0)
    if path.suffix != ".memmap" or bytes_too:
        ways += [overwrite] * 3
    if path.suffix == ".json":
        ways += [drop_key, change_number] * 2
    way = chance.choice(ways)
    way(path, chance)
    return f"{way.__name__} {path.relative_to(directory)}"


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("kind", "verify"),
    [*((kind, False) for kind in KINDS), ("dataset", True), ("saved", True)],
)
def test_damaged_at_random_files_give_the_right_frames_or_an_error(
    kind: str, verify: bool, tmp_path: Path
) -> None:
    options = {"verify": True} if verify else {}
    expected = written(tmp_path / "whole", kind, **({"checksum": True} if verify else {}))
    outcomes: Counter[str] = Counter()
    end, seed = time.monotonic() + SECONDS / 5, 0
    while time.monotonic() < end or seed < 20:
        directory, chance = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(tmp_path / "whole", directory)
        what = f"seed {seed}: {damage(directory, chance, verify)}"
        before = bytes_of(directory)
        try:
            assert loaded(directory, kind, **options) == expected, what
            outcomes["right"] += 1
        except UsageError:
            assert bytes_of(directory) == before, what
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{what} raised {type(error).__name__}") from error
        shutil.rmtree(directory)
        seed += 1
    assert outcomes["refused"]
