"""Collectors: environments and a policy in, TensorDict batches out."""

from swath.collectors.base import BaseCollector
from swath.collectors.options import Options
from swath.collectors.single import Collector

DataCollectorBase = BaseCollector
SyncDataCollector = Collector

__all__ = ["BaseCollector", "Collector", "DataCollectorBase", "Options", "SyncDataCollector"]
