"""The Ray cluster that this process is connected to, by itself or by its user."""

from __future__ import annotations

import inspect
import os
import socket
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from swath.errors import UsageError, nearest
from swath.shield import Shield
from swath.system import after_fork_in_child, usable_cpus

__all__ = ["enter", "leave", "needed", "needs_of", "no_place", "session"]

_UNITS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
_entering = threading.Lock()
_ours: Any = None  # the session that we have begun
_users = 0  # of it
_begun_with: Mapping[str, Any] = {}


def needed() -> Any:
    """Return the module `ray`, imported on first use."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("Ray is not installed: pip install 'swath[ray]'") from error
    return ray


def enter(
    address: str | None, config: Mapping[str, Any] | None, cpus: float, limit: float | None
) -> Any:
    """Use the cluster that this process is connected to, or connect, or start one here.

    Args:
        address: Of a cluster that runs; by default what `RAY_ADDRESS` says, if anything.
        config: Further arguments of `ray.init`.
        cpus: That a cluster of our own must offer, whatever the machine has.
        limit: Seconds for a cluster to answer that is to be at that address.

    Returns:
        What `leave` is to be called with.
    """
    global _ours, _users, _begun_with
    ray, given = needed(), _checked(address, config)
    with _entering:
        now = session()
        if now is None:
            _begin(ray, given, cpus, limit)
            _ours, _users, _begun_with = session(), 1, given
            return _ours
        _compare(now[0], given, now == _ours)
        _users += now == _ours
        return now


def leave(entered: Any) -> None:
    """End what `enter` has begun, when nobody else uses it; nothing, if it is over already."""
    global _ours, _users
    with _entering:
        if entered is not None and entered == _ours:
            _users -= 1
            if not _users:
                _ours = None
                if session() == entered:
                    needed().shutdown()


def _forget() -> None:
    """In a fork of this process: the session is not ours to end."""
    global _ours, _entering
    _ours, _entering = None, threading.Lock()


after_fork_in_child(_forget)


def session() -> Any:
    """Return what this process is to the cluster that it is connected to; None if to none."""
    ray = needed()
    if not ray.is_initialized():
        return None
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


def needs_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options takes."""
    named = {unit: config.get(name) or 0 for name, unit in _UNITS.items()}
    return {name: one for name, one in {**named, **(config.get("resources") or {})}.items() if one}


def no_place(needs: Mapping[str, float], limit: float | None, option: str) -> str:
    """Say why an actor has not begun yet; `option` is where its resources are given."""
    late = "in time" if limit is None else f"within {limit:g} s (launch_timeout)"
    if not needs:
        return f"has not started {late}; wait longer."
    ray = needed()
    free, total = ray.available_resources(), ray.cluster_resources()
    offers = {name: f"{free.get(name, 0):g} of {total.get(name, 0):g}" for name in needs}
    return (
        f"was not scheduled {late}: it needs {dict(needs)}, and the cluster has {offers} free. "
        f"Ask for less in {option}, add a node, or wait longer."
    )


def _checked(address: Any, config: Any) -> dict[str, Any]:
    """Return arguments of `ray.init`, those that the user has given."""
    if not (address is None or isinstance(address, str)):
        raise UsageError(f'address must be a string such as "10.0.0.1:6379"; got {address!r}.')
    if not (config is None or isinstance(config, Mapping)):
        raise UsageError(
            f"ray_init_config must be a dict of arguments of ray.init; got {config!r}."
        )
    given, known = dict(config or {}), inspect.signature(needed().init).parameters
    for name in given:
        if name not in known and not str(name).startswith("_"):
            raise UsageError(f"ray.init has no argument {name!r}.{nearest(str(name), [*known])}")
    if address is not None:
        if given.setdefault("address", address) != address:
            raise UsageError(
                f"address is {address!r}, but {given['address']!r} in ray_init_config; give one."
            )
    return given


def _begin(ray: Any, given: Mapping[str, Any], cpus: float, limit: float | None) -> None:
    options = {"logging_level": "error", "log_to_driver": False, **given}
    options["address"] = options.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    if options["address"] != "local":
        _reach(options["address"], limit)
        ray.init(**options)
        return
    options.setdefault("include_dashboard", False)
    options.setdefault("num_cpus", max(int(-(-cpus // 1)), usable_cpus()))
    options.setdefault("object_store_memory", 1 << 30)
    try:
        with Shield():  # what is half started could not be ended
            ray.init(**options)
    except BaseException:
        ray.shutdown()
        raise


def _reach(address: str, limit: float | None) -> None:
    """Raise if nothing answers at an address; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # such as "auto"
        return
    try:
        socket.create_connection((host, int(port)), limit).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster answers at {address!r}: {error}. Is `ray start --head` running there, "
            "and is this the address that it printed?"
        ) from error


def _compare(connected: str, given: Mapping[str, Any], ours: bool) -> None:
    """Refuse another address than that of the cluster which is used; warn of what has no effect."""
    before = _begun_with if ours else {}
    address = given.get("address", "auto")
    same = address in ("auto", "local", before.get("address"))
    if not same and _resolved(address) != _resolved(connected):
        raise UsageError(
            f"address is {address!r}, but this process is connected to the cluster at "
            f"{connected!r}; leave it out, or call ray.shutdown() before."
        )
    idle = [name for name in given if name != "address" and given[name] != before.get(name)]
    if idle:
        warnings.warn(
            f"ray_init_config has no effect ({', '.join(idle)}): this process is connected to a "
            "cluster already.",
            stacklevel=5,
        )


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    try:
        return socket.gethostbyname(host), port
    except OSError:
        return host, port
