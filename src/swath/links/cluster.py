"""The Ray cluster that this process is connected to, by itself or by its user."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["enter", "leave", "needed", "session"]

_users, _entering = 0, threading.Lock()


def needed() -> Any:
    """Return the module `ray`, imported on first use."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("Ray is not installed; this needs it: pip install swath[ray]") from error
    return ray


def enter(address: str | None, config: Mapping[str, Any], cpus: float) -> None:
    """Use the cluster that this process is connected to, or connect, or start one here.

    Args:
        address: Of a cluster that runs; by default what `RAY_ADDRESS` says, if anything.
        config: Further arguments of `ray.init`.
        cpus: That a cluster of our own must offer, whatever the machine has.
    """
    global _users
    ray = needed()
    with _entering:
        if not ray.is_initialized():
            _users = 0
            options = {"logging_level": "error", "log_to_driver": False, **config}
            options.setdefault("address", address or os.environ.get("RAY_ADDRESS"))
            if options["address"] in (None, "local"):
                options["address"] = "local"
                options.setdefault("include_dashboard", False)
                options.setdefault("num_cpus", max(int(-(-cpus // 1)), os.cpu_count() or 1))
                options.setdefault("object_store_memory", 1 << 30)
            ray.init(**options)
            _users = 1
        elif _users:
            _users += 1


def leave() -> None:
    """End what `enter` has begun, when nobody else uses it."""
    global _users
    with _entering:
        if _users:
            _users -= 1
            if not _users and needed().is_initialized():
                needed().shutdown()


def session() -> Any:
    """Return what this process is to the cluster that it is connected to; None if to none."""
    ray = needed()
    if not ray.is_initialized():
        return None
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()
