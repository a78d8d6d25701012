"""Who takes part. A further contestant is one class in one file, and one line here."""

from __future__ import annotations

from importlib import import_module

from bench.contestants.base import Contestant

SWATH, TORCHRL, HAND = "swath", "TorchRL", "hand loop"

# Name, where the class is. Files are imported one by one, so that a peer may be missing.
ENTRIES = {
    SWATH: "bench.contestants.swath_collector:Swath",
    TORCHRL: "bench.contestants.torchrl_collector:TorchRL",
    HAND: "bench.contestants.hand_loop:HandLoop",
    "SyncVectorEnv": "bench.contestants.sync_vector:SyncVector",
    "Stable-Baselines3": "bench.contestants.sb3:StableBaselines",
}


def load() -> tuple[dict[str, type[Contestant]], dict[str, str]]:
    """The contestants that can be imported, and why the others cannot."""
    available, missing = {}, {}
    for name, where in ENTRIES.items():
        module, attribute = where.split(":")
        try:
            available[name] = getattr(import_module(module), attribute)
        except ImportError as error:
            missing[name] = str(error)
    return available, missing
