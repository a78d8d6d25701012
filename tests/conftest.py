"""Around every test: nothing may be left behind."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from swath.links.launch import server_pid

torch.set_num_threads(1)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended since
        return ""


def _children(of: int | None = None) -> set[str]:
    """Return the children of this process, and the workers of its fork server."""
    pid, server = of or os.getpid(), server_pid()
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    found = {child for path in paths for child in _text(path).split()}
    if of is None and server is not None:  # it stays for the next test; its workers may not
        found = (found - {str(server)}) | _children(server)
    return found


def _shared_memory() -> set[str]:
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    # Semaphores of multiprocessing are unlinked as soon as they are open, segments of MPI live as
    # long as its job: others' pass by here, and nothing of ours has such a name.
    return {name for name in names if not name.startswith(("sem.mp-", "sm_segment."))}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


# Started once by libraries, for the life of the process.
_KEPT_THREADS = ("MainThread", "ThreadPoolExecutor", "Thread-autotuning", "QueueFeeder")


def _left(before: tuple[set[str], set[threading.Thread], set[str], int]) -> list[str]:
    children, threads, shared, descriptors = before
    names = [t.name for t in set(threading.enumerate()) - threads if t.is_alive()]
    left = [f"process {pid}" for pid in _children() - children]
    left += [f"thread {name}" for name in names if not name.startswith(_KEPT_THREADS)]
    left += [f"/dev/shm/{name}" for name in _shared_memory() - shared]
    # Imports on first use may keep a file open; a leak per env or batch shows as many.
    if _descriptors() > descriptors + 3:
        left.append(f"{_descriptors() - descriptors} file descriptors")
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on left-over processes, threads, shared memory and descriptors."""
    before = (_children(), set(threading.enumerate()), _shared_memory(), _descriptors())
    yield
    if request.node.get_closest_marker("slow") or request.node.get_closest_marker("gpu"):
        return  # the compiler keeps its own workers, and the driver its own descriptors
    if _left(before):
        gc.collect()
        started = time.monotonic()
        while left := _left(before):
            # Names of other processes, of tests beside this one for example, come and go.
            shared = all(name.startswith("/dev/shm/") for name in left)
            if time.monotonic() > started + (20 if shared else 5):
                break
            time.sleep(0.05)
        assert not left, "a test left something behind"


@pytest.fixture(autouse=True)
def untouched_surroundings() -> Iterator[None]:
    """Fail when a test changes the learner's thread count or grad mode."""
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
