"""Files that were damaged, or made to harm: the right frames or an error, and no file changed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from file_kit import CAPACITY, KINDS, bytes_of, change_json, files_of, loaded, opened, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_kit import check, contents, numbered, trajectories
from tensordict import NonTensorData, TensorDict

from swath.data import DatasetWriter, ReplayBuffer, SliceSampler, describe, load_dataset
from swath.data.ledger import Word
from swath.errors import DamagedFileError, UsageError


def refused(directory: Path, kind: str, message: str, **options: Any) -> None:
    """Check that every way to read a directory is refused, and leaves it as it is."""
    before = bytes_of(directory)
    ways: list[Callable[[], object]] = [lambda: load_dataset(directory, **options)]
    if kind != "dataset":
        ways.append(lambda: opened(directory, kind, **options))
    for way in ways:
        with pytest.raises(DamagedFileError, match=message):
            way()
    assert bytes_of(directory) == before


# -- what is missing, too short or too long -------------------------------------------------------

KINDS_OF_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (os.remove, "is missing"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes"),
    "short": (lambda path: os.truncate(path, path.stat().st_size - 1), "has .* bytes"),
    "long": (lambda path: os.truncate(path, path.stat().st_size + 1), "has .* bytes"),
}


@pytest.mark.parametrize("damage", KINDS_OF_DAMAGE)
@pytest.mark.parametrize("name", ["observation", "next/reward"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_not_whole_is_named_and_left_alone(
    kind: str, name: str, damage: str, tmp_path: Path
) -> None:
    written(tmp_path / "data", kind)
    path = tmp_path / f"data/{name}.memmap"
    expected = path.stat().st_size
    inflict, found = KINDS_OF_DAMAGE[damage]
    inflict(path)
    refused(tmp_path / "data", kind, rf"{name}\.memmap {found}; {expected} bytes were expected")


@pytest.mark.parametrize("damage", KINDS_OF_DAMAGE)
def test_a_ledger_that_is_not_whole_is_refused(damage: str, tmp_path: Path) -> None:
    written(tmp_path / "data", "buffer")
    inflict, found = KINDS_OF_DAMAGE[damage]
    inflict(tmp_path / "data/replay.bin")
    refused(tmp_path / "data", "buffer", rf"replay\.bin {found}")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff", "[" * 100_000, '{"shape": 1}', "{}"])
@pytest.mark.parametrize("name", ["swath.json", "meta.json", "next/meta.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_metadata_that_is_nonsense_is_refused(
    kind: str, name: str, content: str, tmp_path: Path
) -> None:
    written(tmp_path / "data", kind)
    (tmp_path / "data" / name).write_bytes(content.encode(errors="surrogateescape"))
    refused(tmp_path / "data", kind, name)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.qint8"},
        {"dtype": "os.system"},
        {"dtype": 3},
        {"dtype": ["torch.int64"]},
        {"shape": [20, -3]},
        {"shape": [20, 3.0]},
        {"shape": [20, True]},
        {"shape": [20, 1 << 61, 1 << 61]},
        {"shape": [10, 6]},
        {"shape": [20, 4]},
        {"shape": []},
        {"shape": "20"},
        {"shape": None},
        {"shape": [20] + [1] * 1000},
    ],
    ids=lambda change: str(change)[:40],
)
def test_descriptions_that_cannot_be_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path / "data", "dataset")
    meta = tmp_path / "data/meta.json"
    change_json(meta, lambda found: found["observation"].update(change))
    refused(tmp_path / "data", "dataset", "observation")


@pytest.mark.parametrize("key", ["../outside", "..", "/etc/passwd", "", "next/../../outside"])
def test_no_key_leads_out_of_the_directory(key: str, tmp_path: Path) -> None:
    written(tmp_path / "data", "dataset")
    path = tmp_path / "data/observation.memmap"
    shutil.copy(path, tmp_path / "outside.memmap")
    path.unlink()
    rename = lambda found: found.update({key: found.pop("observation")})  # noqa: E731
    change_json(tmp_path / "data/meta.json", rename)
    refused(tmp_path / "data", "dataset", "is missing")


@pytest.mark.parametrize("name", ["observation", "next"])
def test_a_key_that_metadata_has_lost_is_missed(name: str, tmp_path: Path) -> None:
    written(tmp_path / "data", "dataset")
    change_json(tmp_path / "data/meta.json", lambda found: found.pop(name))
    refused(tmp_path / "data", "dataset", r"meta\.json does not name")


def test_a_dataset_inside_of_another_is_none_of_its_columns(tmp_path: Path) -> None:
    frames = written(tmp_path / "data", "dataset")
    written(tmp_path / "data/other", "dataset")
    assert loaded(tmp_path / "data", "dataset") == frames


def test_what_a_mac_has_put_beside_the_columns_is_no_column(tmp_path: Path) -> None:
    written(tmp_path / "data", "dataset")
    for path in list((tmp_path / "data").rglob("*.*")):
        path.with_name(f"._{path.name}").write_bytes(b"its finder's")
    load_dataset(tmp_path / "data")


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04" + bytes(50)])
def test_a_state_that_cannot_be_read_is_refused(content: bytes, tmp_path: Path) -> None:
    written(tmp_path / "data", "saved")
    (tmp_path / "data/replay.pt").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"replay\.pt cannot be read"):
        opened(tmp_path / "data", "saved")


def test_the_state_of_another_save_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "data", "saved")
    with ReplayBuffer(CAPACITY, sampler="prioritized") as buffer:
        buffer.extend(numbered(0, 7))
        buffer.save(tmp_path / "other")
    shutil.copy(tmp_path / "other/replay.pt", tmp_path / "data/replay.pt")
    with pytest.raises(DamagedFileError, match="not about these frames; the numbers of 20 were"):
        opened(tmp_path / "data", "saved")


# -- the ledger -----------------------------------------------------------------------------------


def ledger(directory: Path) -> np.ndarray:
    return np.memmap(directory / "replay.bin", np.int64, "r+", shape=(16 + 3 * CAPACITY,))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (Word.CLAIMED, 3),
        (Word.FLOOR, 1 << 40),
        (Word.HELD, 19),
        (Word.WRITTEN, -1),
        (Word.BUSY, 7),
        (Word.RUNS, 2),
        (Word.ERROR, 1 << 20),
        (16, 22),
        (17, 0),
        (18, 3),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(
    place: int, value: int, tmp_path: Path
) -> None:
    written(tmp_path / "data", "buffer")
    ledger(tmp_path / "data")[place] = value
    refused(tmp_path / "data", "buffer", r"replay\.bin contradicts itself")


def test_what_a_killed_writer_leaves_is_no_damage(tmp_path: Path) -> None:
    frames = written(tmp_path / "data", "buffer")
    words = ledger(tmp_path / "data")
    words[Word.BUSY], words[Word.STATE] = 1, 0
    words[16:19] *= -1  # frames 20 to 22 were being written; they are counted yet
    words[Word.CLAIMED] += 4  # rows for 4 more were claimed, and had no new stamps yet
    left = [one for one in frames if one not in range(20, 23)]
    assert check(load_dataset(tmp_path / "data")).tolist() == left
    with opened(tmp_path / "data", "buffer") as buffer:
        assert contents(buffer) == left[4:]
    assert loaded(tmp_path / "data", "buffer") == left[4:]


def test_a_buffer_is_read_while_it_is_written(tmp_path: Path) -> None:
    with ReplayBuffer(CAPACITY, storage="memmap", directory=tmp_path / "data") as buffer:
        buffer.extend(numbered(0, 5))
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                buffer.extend(numbered(0, 7))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(100):
                assert len(load_dataset(tmp_path / "data")) <= CAPACITY
        finally:
            stop.set()
            writer.join()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    todo=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), st.integers(1, 50)),
            st.tuples(st.sampled_from(["empty", "load", "reopen", "sample"]), st.just(0)),
        ),
        max_size=12,
    )
)
def test_no_ledger_that_was_left_in_peace_is_refused(
    todo: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("ring") / "data"

    def fresh() -> ReplayBuffer:
        storage = {"storage": "memmap", "directory": directory}
        return ReplayBuffer(CAPACITY, sampler=SliceSampler(slice_len=1), seed=0, **storage)

    buffer, other, count = fresh(), ReplayBuffer(CAPACITY, sampler=SliceSampler(slice_len=1)), 0
    other.extend(trajectories([3], [0], 4, {3}))
    for what, size in [*todo, ("extend", 1), ("reopen", 0)]:
        if what == "extend":
            buffer.extend(trajectories([count, count + 1], [0, 0], size, {count}))
            count += 1
        elif what == "reopen":
            buffer.close()
            buffer = fresh()
        elif what == "sample" and len(buffer):
            buffer.sample(3)
        elif what == "load":
            buffer.load_state_dict(other.state_dict())
        elif what == "empty":
            buffer.empty()
        if (directory / "replay.bin").exists():
            assert len(load_dataset(directory)) == len(buffer)
    buffer.close()


# -- nothing is unpickled -------------------------------------------------------------------------


class Trap:
    """What it is made of when it is unpickled: a file that tells of it."""

    sprung: ClassVar[str]

    def __reduce__(self) -> Any:
        return open, (self.sprung, "w")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_directory_brings_is_unpickled(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trap, "sprung", str(tmp_path / "sprung"), raising=False)
    written(tmp_path / "data", kind)
    TensorDict({"note": NonTensorData(Trap(), batch_size=[20])}, [20]).memmap(tmp_path / "evil")
    (tmp_path / "evil/note").rename(tmp_path / "data/note")
    entry = json.loads((tmp_path / "evil/meta.json").read_text())["note"]
    change_json(tmp_path / "data/meta.json", lambda found: found.update(note=entry))
    ways = [load_dataset, describe, *[lambda path: opened(path, kind)] * (kind != "dataset")]
    for way in ways:
        with pytest.raises(UsageError, match=r"'note' is a .*can run code"):
            way(tmp_path / "data")
    assert not (tmp_path / "sprung").exists()


def test_a_state_is_not_unpickled_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trap, "sprung", str(tmp_path / "sprung"), raising=False)
    written(tmp_path / "data", "saved")
    for write in (torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))):
        write({"numbers": Trap()}, tmp_path / "data/replay.pt")
        with pytest.raises(DamagedFileError, match=r"replay\.pt cannot be read"):
            opened(tmp_path / "data", "saved")
    assert not (tmp_path / "sprung").exists()


def test_an_error_that_a_ledger_brings_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trap, "sprung", str(tmp_path / "sprung"), raising=False)
    frames, error = written(tmp_path / "data", "buffer"), pickle.dumps(Trap())
    words = ledger(tmp_path / "data")
    words[Word.STATE], words[Word.ERROR] = 2, len(error)  # as a buffer that has failed
    with (tmp_path / "data/replay.bin").open("r+b") as file:
        file.seek(words.nbytes)
        file.write(error)
    assert loaded(tmp_path / "data", "buffer") == frames
    assert not (tmp_path / "sprung").exists()


# -- checksums ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dataset", "saved"])
def test_a_changed_byte_is_found_by_its_checksum(kind: str, tmp_path: Path) -> None:
    frames = written(tmp_path / "data", kind, checksum=True)
    assert loaded(tmp_path / "data", kind, verify=True) == frames
    whole = bytes_of(tmp_path / "data")
    for path in whole:
        if path.name != "checksums.json":
            content = bytearray(whole[path])
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
            with pytest.raises(DamagedFileError, match=path.name):
                load_dataset(tmp_path / "data", verify=True)
            path.write_bytes(whole[path])
    assert loaded(tmp_path / "data", kind, verify=True) == frames


def test_checksums_are_those_of_the_frames_that_were_kept(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", checksum=True) as writer:
        for first in (0, 5):
            writer.write(numbered(first, 5))
            with pytest.raises(UsageError, match="all must have the same keys"):
                writer.write(numbered(0, 5).exclude("half"))
    assert check(load_dataset(tmp_path / "data", verify=True)).tolist() == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_to_verify_without_checksums_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    written(tmp_path / "data", kind)
    with pytest.raises(UsageError, match=r"has no checksums, so only the sizes .* checksum=True"):
        load_dataset(tmp_path / "data", verify=True)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"algorithm": "md5"}', '{"algorithm": "crc32", "files": {"../x": "0"}}']
)
def test_checksums_that_are_damaged_are_refused(content: str, tmp_path: Path) -> None:
    frames = written(tmp_path / "data", "dataset", checksum=True)
    (tmp_path / "data/checksums.json").write_text(content)
    refused(tmp_path / "data", "dataset", r"checksums\.json", verify=True)
    assert loaded(tmp_path / "data", "dataset") == frames


# -- what writers do ------------------------------------------------------------------------------


def test_what_tensordict_itself_has_written_is_read(tmp_path: Path) -> None:
    frames = numbered(0, CAPACITY)
    frames["nothing"] = torch.zeros(CAPACITY, 0)
    frames["a b/c"] = torch.zeros(CAPACITY)
    frames.memmap(tmp_path / "data")
    (tmp_path / "data/swath.json").write_text(json.dumps({"swath": "0.1.0", "frames": CAPACITY}))
    (tmp_path / "data/nothing.memmap").touch()
    found = load_dataset(tmp_path / "data")
    assert set(found.keys(True, True)) == set(frames.keys(True, True))
    assert check(found.exclude("nothing", "a b/c")).tolist() == list(range(CAPACITY))


def test_what_newer_tensordicts_note_of_their_folders_is_passed_over(tmp_path: Path) -> None:
    numbered(0, CAPACITY).memmap(tmp_path / "data")
    for path in (tmp_path / "data").rglob("meta.json"):
        notes = {"_format_version": 1, "_class": "tensordict:TensorDict"}
        path.write_text(json.dumps({**json.loads(path.read_text()), **notes}))
    (tmp_path / "data/swath.json").write_text(json.dumps({"swath": "0.1.0", "frames": CAPACITY}))
    assert check(load_dataset(tmp_path / "data")).tolist() == list(range(CAPACITY))


@pytest.mark.parametrize("key", ["shape", ("next", "device"), ("_type", "x")])
def test_a_key_that_metadata_needs_itself_is_refused(key: Any, tmp_path: Path) -> None:
    batch = TensorDict({key: torch.zeros(3)}, [3])
    with pytest.raises(UsageError, match="describes a folder"):
        DatasetWriter(tmp_path / "data").write(batch)
    with ReplayBuffer(5, storage="memmap", directory=tmp_path / "ring") as buffer:
        with pytest.raises(UsageError, match="describes a folder"):
            buffer.extend(batch)


def test_what_the_writer_notes_itself_cannot_be_noted_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\['frames'\] are stored by the writer itself"):
        DatasetWriter(tmp_path / "data", frames=3)
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_tidied_up_under_a_writer_is_missed(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "data")
    writer.write(numbered(0, 5))
    (tmp_path / "data.partial/observation.memmap").unlink()
    writer.write(numbered(5, 5))
    with pytest.raises(DamagedFileError, match=r"observation\.memmap has 60 bytes; 120 bytes were"):
        writer.close()


def test_files_that_the_disk_has_no_room_for_are_an_error_before_any_is_written(
    tmp_path: Path,
) -> None:
    capacity = shutil.disk_usage(tmp_path).free // 8  # the ledger has 24 bytes for each
    with ReplayBuffer(capacity, storage="memmap", directory=tmp_path / "data") as buffer:
        with pytest.raises(OSError, match=r"need [\d,]+ bytes more on disk, and [\d,]+ are free"):
            buffer.extend(TensorDict({"x": torch.zeros(3, dtype=torch.uint8)}, [3]))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_in_the_end_is_an_error_too(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ReplayBuffer(10_000, storage="memmap", directory=tmp_path / "data") as buffer:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
            with pytest.raises(OSError, match=r"need [\d,]+ bytes more on disk"):
                buffer.extend(numbered(0, 3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(tmp_path.iterdir())
        buffer.extend(numbered(0, 3))  # there is room again
        assert len(buffer) == 3


def test_the_files_of_a_buffer_have_their_room_on_disk(tmp_path: Path) -> None:
    with ReplayBuffer(10_000, storage="memmap", directory=tmp_path / "data") as buffer:
        buffer.extend(numbered(0, 3))
        sparse = [p for p in files_of(tmp_path) if p.stat().st_blocks * 512 < p.stat().st_size]
        assert sparse == []


def test_a_file_system_that_cannot_take_room_is_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    frames = written(tmp_path / "data", "buffer")
    assert loaded(tmp_path / "data", "buffer") == frames


def test_holes_that_a_copy_has_left_are_filled_when_a_buffer_is_opened(tmp_path: Path) -> None:
    written(tmp_path / "data", "buffer")
    pixels = tmp_path / "data/pixels.memmap"
    size = pixels.stat().st_size
    os.truncate(pixels, 0)
    os.truncate(pixels, size)
    assert not pixels.stat().st_blocks
    with opened(tmp_path / "data", "buffer"):
        assert pixels.stat().st_blocks * 512 >= size == pixels.stat().st_size


def test_a_save_for_which_there_is_no_room_leaves_the_one_before_and_nothing_else(
    tmp_path: Path,
) -> None:
    frames = written(tmp_path / "data", "saved")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ReplayBuffer(1000) as buffer:
        buffer.extend(numbered(0, 1000))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                buffer.save(tmp_path / "data")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert loaded(tmp_path / "data", "saved") == frames
