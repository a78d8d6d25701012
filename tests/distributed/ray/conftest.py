"""One lean cluster for all tests here, on this machine; without Ray they are skipped."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from ray_kit import LEAN, command, descendants, end

from swath.links.door import Door

for _folder in ("collectors", "links"):  # their kits, in actors too
    sys.path.insert(0, str(Path(__file__).parents[2] / _folder))

if importlib.util.find_spec("ray") is None:

    def pytest_collection_modifyitems(items):
        """Skip what needs Ray, and say how to get it."""
        skip = pytest.mark.skip(reason="Ray is not installed: pip install swath[ray]")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with so many CPUs that no test waits for one."""

    import ray

    # On a busy machine Ray learns late how an actor ended; by default it waits a second for that.
    patient = {"timeout_ms_task_wait_for_death_info": 30_000}
    ray.init(num_cpus=8, resources={"rare": 1}, _system_config=patient, **LEAN)
    yield ray
    end(ray.shutdown)


@pytest.fixture
def far(monkeypatch):
    """Let no actor come in by a door, as if all were on other machines."""
    monkeypatch.setattr(Door, "__init__", nowhere)


def nowhere(door):
    """Make a door that leads nowhere, as on systems that have none."""
    door.name = door._socket = None


@pytest.fixture(params=["near", "far"])
def anywhere(request):
    """Run a test with actors that come in by a door, and with actors that do not."""
    if request.param == "far":
        request.getfixturevalue("far")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail on left-over actors, threads and descriptors; what Ray itself has open is its own."""
    before, opened = set(threading.enumerate()), _opened()
    yield
    deadline = time.monotonic() + 30  # Ray ends actors when it comes to it
    while (left := _left(before) + _more(opened)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not left, "a test left something behind"


def _opened():
    """Count the descriptors that only we have: memory, processes, doors."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    doors = {f"socket:[{one[6]}]" for one in sockets if one[-1].startswith("@swath-")}
    found = Counter()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            kind = os.readlink(f"/proc/self/fd/{one}")
            if kind in doors:
                found["door"] += 1
            elif "memfd:swath" in kind or "pidfd" in kind:
                found[kind] += 1
    return found


def _more(before):
    return [f"{count} of {kind}" for kind, count in (_opened() - before).items() if count]


def _left(before):
    threads = {t.name for t in set(threading.enumerate()) - before}
    found = [f"thread {name}" for name in threads if "swath" in name]
    for pid in descendants():
        name = command(pid)
        found += [name] if name.startswith(("ray::Host", "ray::Keeper")) else []
    return found
