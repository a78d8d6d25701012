"""Collectors whose workers are on other machines, or could be."""

from swath.collectors.distributed.generic import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCCollector,
)
from swath.collectors.distributed.ray import RayCollector
from swath.workers.delayed import submitit_delayed_launcher

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RPCCollector",
    "RPCDataCollector",
    "RayCollector",
    "submitit_delayed_launcher",
]
