"""`DistributedCollector` and its kin: the delivery of the process collectors, on other machines."""

from __future__ import annotations

from typing import Any

from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.options import Options
from swath.links.gate import Gate, new_secret
from swath.links.torch_distributed import TorchMedium
from swath.workers.launchers import LocalLauncher
from swath.workers.place import Place
from swath.workers.remote import Invitation, RemotePlace

__all__ = ["DistributedCollector", "DistributedSyncCollector"]


class DistributedCollector(MultiCollector):
    def __new__(cls, *args: Any, sync: bool = False, **options: Any) -> Any:
        if cls is DistributedCollector:
            cls = DistributedSyncCollector if sync else _DistributedAsyncCollector
        return object.__new__(cls)

    def __init__(self, *args, sync=False, **options):
        super().__init__(*args, **options)

    def _place(self, count: int) -> Place:
        secret = new_secret()
        patience = 60.0
        gate = Gate("127.0.0.1", 0, secret, patience)
        medium = TorchMedium("gloo", "127.0.0.1", new_secret().hex(), patience)
        invitation = Invitation("127.0.0.1", gate.port, secret, patience)
        return RemotePlace(gate, medium, LocalLauncher(), invitation, 30)


class DistributedSyncCollector(DistributedCollector, MultiSyncCollector):
    pass


class _DistributedAsyncCollector(DistributedCollector, MultiAsyncCollector):
    pass
