"""What a killed run has stored is not lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swath.cli import main
from swath.collectors import Collector
from swath.data import DatasetWriter, load_dataset, recover_dataset
from swath.envs import SerialEnv
from swath.errors import DamagedFileError, UsageError
from swath.testing import CountingEnv, check_transitions

WRITE = """
from swath.preload import preload; preload()
import os, signal, sys
from swath.collectors import Collector
from swath.data import DatasetWriter
from swath.envs import SerialEnv
from swath.testing import CountingEnv

writer = DatasetWriter("data", env_id="counting")
with Collector(SerialEnv(3, CountingEnv), frames_per_batch=60, seed=0) as collector:
    for batches in range(1, 9):
        writer.write(collector.next())
        if batches == 4:
            print("four", flush=True)
            sys.stdin.readline()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """Return where a writer was killed, after it was seen that nobody may recover it before."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", WRITE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "four\n"
        with pytest.raises(UsageError, match="a process is still writing to"):
            recover_dataset("data")
        process.communicate("\n", timeout=20)
    return tmp_path / "data"


def test_a_killed_runs_frames_become_a_dataset(killed, capsys):
    assert main(["info", "data"]) == 2
    assert f"swath recover {killed.name}" in capsys.readouterr().err
    with pytest.raises(UsageError, match="or keep its frames with `swath recover"):
        DatasetWriter("data")
    assert main(["recover", "data"]) == 0
    assert capsys.readouterr().out.startswith(f"frames: 240\ndata: {killed}\n")
    assert check_transitions(load_dataset("data")) == 240
    assert json.loads((killed / "swath.json").read_text())["env_id"] == "counting"
    assert not Path("data.partial").exists()
    with pytest.raises(UsageError, match="is a complete dataset"):
        recover_dataset("data")


def unfinished(batches: int) -> Path:
    """Write batches to `data` and go away without an end."""
    writer = DatasetWriter("data")
    with Collector(SerialEnv(2, CountingEnv), frames_per_batch=40, seed=0) as collector:
        for _ in range(batches):
            writer.write(collector.next())
    return Path("data.partial")


def test_columns_that_a_batch_had_not_reached_yet_lose_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    partial = unfinished(3)
    for name, kept in (("action", 2.5), ("next/reward", 2.2)):
        file = next(partial.glob(f"{name}.memmap"))
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * kept / 3) + 1])
    assert recover_dataset("data.partial") == 88
    frames = load_dataset("data")
    assert frames.shape == (88,)
    assert check_transitions(frames) == 88


def test_where_there_is_nothing_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"data\.partial does not exist"):
        recover_dataset("data")
    unfinished(0)
    with pytest.raises(UsageError, match=r"data\.partial has no frames"):
        recover_dataset("data")


def test_what_is_not_finished_is_read_by_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unfinished(1)
    with pytest.raises(UsageError, match=r"it has no swath\.json"):
        load_dataset("data.partial")


@pytest.mark.parametrize("name", ["action.memmap", "next"])
def test_files_elsewhere_are_left_alone(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = unfinished(3) / name
    found.rename("elsewhere")
    found.symlink_to(Path("elsewhere").absolute())
    inside = [path for path in Path("elsewhere").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in inside or [Path("elsewhere")]}
    with pytest.raises(UsageError, match=f"{found.name} is a link"):
        recover_dataset("data")
    assert {path: path.read_bytes() for path in before} == before


def test_a_column_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (unfinished(2) / "action.memmap").unlink()
    with pytest.raises(DamagedFileError, match=r"action\.memmap is missing"):
        recover_dataset("data")
