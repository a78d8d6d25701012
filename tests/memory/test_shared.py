"""Memory of another process, found by its handle."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swath.memory import SharedMemory

WRITES = """
import sys
from swath.memory import SharedMemory
memory = SharedMemory.opened(eval(sys.argv[1]))
assert memory.foreign and memory.array.tolist() == [7] * 5
memory.array[:] = 9
"""


def test_another_process_sees_it_and_writes_to_it():
    memory = SharedMemory(5)
    memory.array[:] = 7
    subprocess.run([sys.executable, "-c", WRITES, repr(memory.handle)], check=True, timeout=60)
    assert memory.array.tolist() == [9] * 5
    assert not memory.foreign


def test_a_number_that_is_another_file_by_now_is_refused(tmp_path):
    memory = SharedMemory(5)
    handle = memory.handle
    memory.close_descriptor()
    taken = [SharedMemory(5)]
    assert taken[0].descriptor == handle[1]  # the lowest that is free
    with pytest.raises(FileNotFoundError, match="is gone"):
        SharedMemory.opened(handle)
    del taken[:]
    path = tmp_path / "data"
    path.write_bytes(b"12345")
    with path.open("r+b") as file:
        assert file.fileno() == handle[1]
        with pytest.raises(FileNotFoundError, match="is gone"):
            SharedMemory.opened(handle)
    assert path.read_bytes() == b"12345"
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.opened(handle)


def test_of_a_process_that_is_no_more_it_is_refused():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(60)
    with pytest.raises(OSError, match="No such"):
        SharedMemory.opened((child.pid, 3, "/memfd:swath (deleted)", 5))
    assert os.getpid() != child.pid
