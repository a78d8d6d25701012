"""A collector that is one of two deliveries, as `sync` says, with workers elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swath.collectors.documented import document
from swath.collectors.jobs import node_options
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.errors import UsageError

__all__ = ["PairedCollector"]


class PairedCollector(MultiCollector):
    """Says where workers run; with one of two deliveries it is a collector.

    Both are made for each subclass, those of users included.
    """

    _defaults: Mapping[str, Any] = {}
    _deliveries: tuple[type, type] | None = None
    """What delivers first come first served, and what delivers from all."""

    def __init_subclass__(cls) -> None:
        """Make both collectors of a class, and its signature."""
        super().__init_subclass__()
        if "_deliveries" in vars(cls):  # it is one of them
            return
        if "__init__" not in vars(cls) or cls._deliveries is None:
            document(cls, cls._scope)
        about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_deliveries": None}
        cls._deliveries = (
            type(cls.__name__, (cls, MultiAsyncCollector), about),
            type(cls.__name__, (cls, MultiSyncCollector), about),
        )

    @classmethod
    def _meant(cls, options: Mapping[str, Any]) -> type[Any]:
        sync = {**cls._defaults, **node_options(options)}.get("sync") is True
        return cls if cls._deliveries is None else cls._deliveries[sync]

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        sync = {**self._defaults, **options}.get("sync") is True
        if sync != isinstance(self, MultiSyncCollector):
            raise UsageError(
                f"{type(self).__name__} was made with sync={not sync}, and its __init__ passes on "
                f"sync={sync}; let it take sync as an option."
            )
        super().__init__(create_env_fn, policy, **options)
