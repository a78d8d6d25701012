"""Who takes part. A further contestant is one class in one file, and one line here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from importlib import import_module

from bench.contestants.base import Contestant

SWATH, TORCHRL, HAND, HANDS = "swath", "TorchRL", "hand loop", "hand loops"
KEPT = "swath, a core kept"
Kinds = Sequence[type[Contestant]]

# Where the classes are. Files are imported one by one, so that a peer may be missing. Several
# classes of one name are for different placements.
ENTRIES = (
    "bench.contestants.swath_collector:Swath",
    "bench.contestants.swath_parallel:SwathParallel",
    "bench.contestants.swath_parallel:SwathParallelKept",
    "bench.contestants.swath_processes:SwathSync",
    "bench.contestants.swath_processes:SwathAsync",
    "bench.contestants.torchrl_collector:TorchRL",
    "bench.contestants.torchrl_processes:TorchRLParallel",
    "bench.contestants.torchrl_processes:TorchRLSync",
    "bench.contestants.torchrl_processes:TorchRLAsync",
    "bench.contestants.hand_loop:HandLoop",
    "bench.contestants.hand_loops:HandLoops",
    "bench.contestants.sync_vector:SyncVector",
    "bench.contestants.sync_vector:AsyncVector",
    "bench.contestants.sb3:StableBaselines",
    "bench.contestants.sb3:StableBaselinesProcesses",
)

# Helper processes of the peers are forked from a server that has imported this once.
PRELOAD = (
    "bench.contestants.hand_loop",
    "gymnasium.vector.async_vector_env",
    "stable_baselines3.common.vec_env.subproc_vec_env",
)


def load() -> tuple[list[type[Contestant]], dict[str, str]]:
    """The contestants that can be imported, and why the others cannot."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    available, missing = [], {}
    for where in ENTRIES:
        module, attribute = where.split(":")
        try:
            available.append(getattr(import_module(module), attribute))
        except (ImportError, OSError, RuntimeError) as error:  # built for another torch, say
            missing[attribute] = str(error)
    return available, missing


def placed(kinds: Kinds, placement: str) -> dict[str, type[Contestant]]:
    """Those that know a placement, by name."""
    return {kind.name: kind for kind in kinds if placement in kind.placements}
