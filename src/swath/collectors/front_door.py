"""`Collector(num_collectors=, backend=, backend_options=, sync=)`: TorchRL's way to any collector.

A function beside `Collector` and not part of it: it names the class that is meant, and calls that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swath.collectors.values import Choice, Count, Flag
from swath.errors import UsageError

__all__ = ["opened"]

_SAID_HERE = ("backend", "backend_options", "num_collectors", "sync")
_BACKENDS = ("direct", "process", "multiprocessing", "ray", "rpc", "distributed", "submitit")


def opened(positional: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Return the collector that is meant where it is none of this process; else None.

    Args:
        positional: What `Collector` was given by position.
        given: What it was given by name.
    """
    said = {name: given[name] for name in _SAID_HERE if given.get(name) is not None}
    if not said:
        return None
    count = said.get("num_collectors")
    if count is not None:
        count = Count(1).read("num_collectors", count)
    backend = said.get("backend", "direct" if count is None else "process")
    backend = Choice(_BACKENDS).read("backend", backend)
    options = _merged(positional, given, said.get("backend_options", {}))
    if backend == "direct":
        return _checked_direct(count, said)
    sync = Flag().read("sync", said.get("sync", False))
    makers = _makers(positional[0] if positional else options.pop("create_env_fn", None), count)
    if backend == "submitit" and options.setdefault("launcher", "submitit") != "submitit":
        raise UsageError(
            f"backend='submitit' requires launcher='submitit'; got {options['launcher']!r}. Give "
            "backend='distributed' for the other launchers."
        )
    return _kind(backend, sync)(makers, *positional[1:], **options)


def _checked_direct(count: int | None, said: Mapping[str, Any]) -> None:
    """Refuse what is for collectors with workers, beside one without."""
    if count not in (None, 1):
        raise UsageError(
            "backend='direct' means one collector in this process, but num_collectors is "
            f"{count}. Give backend='process' for workers."
        )
    for name in ("sync", "backend_options"):
        if said.get(name) not in (None, {}):
            raise UsageError(
                f"{name}={said[name]!r} is for collectors with workers; give num_collectors or "
                "another backend as well."
            )


def _merged(
    positional: Sequence[Any], given: Mapping[str, Any], inner: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of the collector that is meant."""
    outer = {name: value for name, value in given.items() if name not in _SAID_HERE}
    for name in inner:
        if name in ("backend_options", "num_collectors", "num_workers", "sync"):
            raise UsageError(
                f"backend_options must not have {name!r}, which is reserved; give it to Collector."
            )
        if name in outer or name in ("create_env_fn", "policy")[: len(positional)]:
            raise UsageError(
                f"{name!r} is given twice: backend_options duplicates what Collector was given."
            )
    return {**outer, **inner}


def _makers(create_env_fn: Any, count: int | None) -> list[Any]:
    """Return one maker for each worker."""
    if not isinstance(create_env_fn, (list, tuple)):
        return [create_env_fn] * (count or 1)
    if count not in (None, len(create_env_fn)):
        raise UsageError(
            f"num_collectors is {count}, but {len(create_env_fn)} env makers were given, one "
            "for each worker. Leave num_collectors out, or pass one maker."
        )
    return list(create_env_fn)


def _kind(backend: str, sync: bool) -> Callable[..., Any]:
    """Return what makes a collector over a backend; these import what they need."""
    from swath.collectors import MultiAsyncCollector, MultiSyncCollector, distributed

    if backend in ("process", "multiprocessing"):
        return MultiSyncCollector if sync else MultiAsyncCollector
    kinds: dict[str, type] = {"ray": distributed.RayCollector, "rpc": distributed.RPCCollector}
    kind = kinds.get(backend, distributed.DistributedCollector)
    return lambda *arguments, **options: kind(*arguments, sync=sync, **options)
