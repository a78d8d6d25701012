"""Collectors: environments and a policy in, TensorDict batches out."""

from swath.collectors.base import BaseCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.options import Options
from swath.collectors.single import Collector

DataCollectorBase = BaseCollector
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "Options",
    "SyncDataCollector",
    "aSyncDataCollector",
]
