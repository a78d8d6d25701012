"""Collectors: environments and a policy in, TensorDict batches out."""

from swath.collectors import from_torchrl
from swath.collectors.base import BaseCollector
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.options import Options
from swath.collectors.single import Collector
from swath.collectors.translation import missing_name
from swath.policies import RandomPolicy

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
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "Options",
    "RandomPolicy",
    "SyncDataCollector",
    "aSyncDataCollector",
]


def __getattr__(name: str) -> object:
    raise missing_name(from_torchrl.ROWS, __name__, name)
