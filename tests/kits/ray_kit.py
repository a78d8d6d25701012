"""How tests start Ray and end it; scripts import it, too."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import warm_kit

from swath.links.door import Door

INSTALLED = importlib.util.find_spec("ray") is not None
# Ray would start a process for each CPU at once, each of which imports all of Ray.
os.environ.update(RAY_enable_worker_prestart="0", RAY_prestart_worker_first_driver="0")

LEAN = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": 256 << 20,
    "logging_level": "error",
    "log_to_driver": False,
}


# On a busy machine Ray learns late how an actor ended; by default it waits a second for that.
_PATIENT = {"timeout_ms_task_wait_for_death_info": 30_000}


def cluster() -> Any:
    """Return Ray, with one lean cluster of this process; no test waits for one of its CPUs."""
    import ray

    if not ray.is_initialized():
        with warm_workers():
            ray.init(num_cpus=8, resources={"rare": 1}, _system_config=_PATIENT, **LEAN)
        gc.collect()
        gc.freeze()  # as conftest.py does with what was imported before Ray
    return ray


_warm: warm_kit.Server | None = None


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Let nodes of clusters that are started here take their workers from a server of forks."""
    global _warm
    from ray._private.parameter import RayParams

    _warm = _warm or warm_kit.Server()
    init = RayParams.__init__

    def with_path(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{"setup_worker_path": warm_kit.__file__, **options})

    RayParams.__init__ = with_path
    try:
        yield
    finally:
        RayParams.__init__ = init


def leave() -> None:
    """End the cluster of this process, if it has one; the server of workers stays for the next."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        end(ray.shutdown)


def close() -> None:
    """End the cluster of this process and the server of its workers."""
    global _warm
    leave()
    if _warm is not None:
        _warm.close()
        _warm = None


def lead_nowhere(monkeypatch: Any) -> None:
    """Make doors that lead nowhere, as on systems that have none."""

    def nowhere(door: Any) -> None:
        door.name = door._socket = None

    monkeypatch.setattr(Door, "__init__", nowhere)


def end(shutdown) -> None:
    """End Ray, which lets go of its processes without having waited for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        shutdown()
        gc.collect()


def descendants(of: int | None = None) -> list[int]:
    """Return the processes below one, this one by default."""
    found, waiting = [], [of or os.getpid()]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = list(map(int, path.read_text().split()))
                found += children
                waiting += children
    return found


def command(pid: int) -> str:
    """Return the command line of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
