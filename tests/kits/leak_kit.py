"""What a test may not leave behind: processes, threads, shared memory, descriptors."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

from ray_kit import command, descendants

from swath.links.launch import server_pid

# Started once by libraries, for the life of the process.
_KEPT_THREADS = ("MainThread", "ThreadPoolExecutor", "Thread-autotuning", "QueueFeeder")
_EVERY = 0.05
"""Seconds between two looks; they are counted, as in `wait_kit`."""
_TESTS = Path(__file__).parents[1]


class Everything:
    """Around a test whose processes are ours alone."""

    def __init__(self) -> None:
        self.children, self.shared = _children(), _shared_memory()
        self.threads, self.descriptors = set(threading.enumerate()), _descriptors()

    def left(self) -> list[str]:
        """Return what is there now and was not there before."""
        threads = set(threading.enumerate()) - self.threads
        found = [f"process {pid}: {name}" for pid, name in self._new_processes()]
        found += [f"thread {one.name}" for one in threads if one.is_alive() and _is_ours(one)]
        found += [f"/dev/shm/{name}" for name in _shared_memory() - self.shared]
        # Imports on first use may keep a file open; a leak per env or batch shows as many.
        if _descriptors() > self.descriptors + 3:
            found.append(f"{_descriptors() - self.descriptors} file descriptors")
        return found

    def _new_processes(self) -> list[tuple[str, str]]:
        pairs = [(pid, command(int(pid))) for pid in _children() - self.children]
        # Python keeps one such process, for whatever library was the first to need it.
        return [
            (pid, name) for pid, name in pairs if "multiprocessing.resource_tracker" not in name
        ]

    def patience(self, left: list[str]) -> float:
        """Return for how many seconds a test may be waited for."""
        # Names of other processes, of tests beside this one for example, come and go.
        return 20.0 if all(name.startswith("/dev/shm/") for name in left) else 5.0


class OfOurs:
    """Around a test with a Ray cluster: what Ray itself starts and opens is its own."""

    def __init__(self) -> None:
        self.threads, self.opened = set(threading.enumerate()), _opened()

    def left(self) -> list[str]:
        """Return which actors, threads and descriptors are left."""
        names = {one.name for one in set(threading.enumerate()) - self.threads}
        found = [f"thread {name}" for name in names if "swath" in name]
        commands = map(command, descendants())
        found += [one for one in commands if one.startswith(("ray::Host", "ray::Keeper"))]
        more = (_opened() - self.opened).items()
        return found + [f"{count} of {kind}" for kind, count in more if count]

    def patience(self, left: list[str]) -> float:
        """Return for how many seconds a test may be waited for."""
        return 30.0  # Ray ends actors when it comes to it


def wait_until_clean(before: Everything | OfOurs) -> list[str]:
    """Give what a test started some time to end; return what is left then."""
    if not before.left():
        return []
    looks = 0
    while left := before.left():
        if looks * _EVERY > before.patience(left):
            break
        gc.collect()
        time.sleep(_EVERY)
        looks += 1
    return left


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


def _is_ours(thread: threading.Thread) -> bool:
    """Tell whether a thread is one of swath or of a test, not a library's own.

    A library that starts a thread of a class of its own keeps it for its own ends, as tqdm does.
    """
    if thread.name.startswith(_KEPT_THREADS):
        return False
    module = type(thread).__module__
    return module.startswith(("threading", "swath")) or _is_a_test(module)


def _is_a_test(name: str) -> bool:
    import sys

    module = sys.modules.get(name)
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return path is not None and _TESTS in Path(path).parents


def _opened() -> Counter[str]:
    """Count the descriptors that only we have: memory, processes, doors."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    doors = {f"socket:[{one[6]}]" for one in sockets if one[-1].startswith("@swath-")}
    found: Counter[str] = Counter()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            kind = os.readlink(f"/proc/self/fd/{one}")
            if kind in doors:
                found["door"] += 1
            elif "memfd:swath" in kind or "pidfd" in kind:
                found[kind] += 1
    return found
