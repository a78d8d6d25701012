"""swath collects experience for reinforcement learning in PyTorch.

An environment and a policy go in, TensorDict batches come out:

    from swath import Collector

    with Collector("CartPole-v1", frames_per_batch=200, total_frames=10_000) as collector:
        for batch in collector:
            ...

`swath.collectors` has the collectors, `swath.envs` the environments, `swath.policies` random and
recurrent policies, `swath.data` replay buffers and datasets, and `swath.testing` envs and checks
for tests. The names that are used most can be imported from `swath` itself.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swath.collectors import AsyncCollector as AsyncCollector
    from swath.collectors import Collector as Collector
    from swath.collectors import MultiAsyncCollector as MultiAsyncCollector
    from swath.collectors import MultiSyncCollector as MultiSyncCollector
    from swath.data import ReplayBuffer as ReplayBuffer
    from swath.envs import GymEnv as GymEnv
    from swath.envs import ParallelEnv as ParallelEnv
    from swath.envs import SerialEnv as SerialEnv

_HOMES = {
    "AsyncCollector": "swath.collectors",
    "Collector": "swath.collectors",
    "GymEnv": "swath.envs",
    "MultiAsyncCollector": "swath.collectors",
    "MultiSyncCollector": "swath.collectors",
    "ParallelEnv": "swath.envs",
    "ReplayBuffer": "swath.data",
    "SerialEnv": "swath.envs",
}
"""Where names are that can be imported from here, too; importing swath imports none of them."""

__all__ = [
    "AsyncCollector",
    "Collector",
    "GymEnv",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "ParallelEnv",
    "ReplayBuffer",
    "SerialEnv",
    "__version__",
    "filter_warnings_subprocess",
]

try:
    __version__ = version("swath")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

filter_warnings_subprocess = True
"""Whether warnings raised in worker processes are hidden."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'swath' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
