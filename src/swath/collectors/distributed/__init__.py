"""Collectors whose workers are on other machines, or could be."""

from swath.collectors import from_torchrl
from swath.collectors.distributed.default_configs import (
    DEFAULT_SLURM_CONF,
    DEFAULT_SLURM_CONF_MAIN,
)
from swath.collectors.distributed.generic import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCCollector,
)
from swath.collectors.distributed.ray import RayCollector
from swath.collectors.translation import missing_name
from swath.workers.delayed import submitit_delayed_launcher

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RPCCollector",
    "RPCDataCollector",
    "RayCollector",
    "submitit_delayed_launcher",
]


def __getattr__(name: str) -> object:
    raise missing_name(from_torchrl.ROWS, __name__, name)
