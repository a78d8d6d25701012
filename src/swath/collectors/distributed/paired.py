"""A collector that is one of two deliveries, as `sync` says, with workers elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from swath.collectors.jobs import node_options
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.options import Options

__all__ = ["PairedCollector", "paired"]


class PairedCollector(MultiCollector):
    """Says where workers run; with one of two deliveries it is a collector."""

    _defaults: Mapping[str, Any] = {}
    _deliveries: tuple[type, type] | None = None
    """What delivers first come first served, and what delivers from all."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return a collector that delivers as `sync` says."""
        sync = {**cls._defaults, **node_options(options)}.get("sync") is True
        return object.__new__(cls if cls._deliveries is None else cls._deliveries[sync])


Kind = TypeVar("Kind", bound=type[PairedCollector])


def paired(kind: Kind) -> Kind:
    """Make both collectors of a class, and its signature."""
    kind.__signature__ = Options.signature(kind._scope)  # type: ignore[attr-defined]
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_deliveries": None}
    kind._deliveries = (
        type(kind.__name__, (kind, MultiAsyncCollector), about),
        type(kind.__name__, (kind, MultiSyncCollector), about),
    )
    return kind
