"""The table of TorchRL, continued: what is read of a collector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from swath.collectors.translation import Attribute
from swath.envs import is_env

__all__ = ["ATTRIBUTES", "MACHINES", "WITH_WORKERS", "is_alone", "one_env"]

WITH_WORKERS = ("MultiCollector",)
MACHINES = ("DistributedCollector", "RayCollector")


def _option(name: str) -> Callable[[Any], Any]:
    return lambda collector: getattr(collector.options, name)


def _device(name: str) -> Callable[[Any], Any]:
    """Return what reads a device: one, or with workers one for each."""

    def read(collector: Any) -> Any:
        def one(worker: int | None) -> Any:
            return getattr(collector.options.devices(worker), name)

        if is_alone(collector):
            return one(None)
        return tuple(one(number) for number in range(collector.num_workers))

    return read


def is_alone(collector: Any) -> bool:
    """Tell whether a collector works without workers."""
    return not hasattr(type(collector), "num_workers")


def _count(name: str) -> Callable[[Any], Any]:
    """Return what reads a count, of which None is 0 for TorchRL."""
    return lambda collector: getattr(collector.options, name) or 0


def _total(collector: Any) -> float:
    total: int = collector.options.total_frames
    return math.inf if total == -1 else total


def _env(collector: Any) -> Any:
    """Return the env that was passed, or the one that was made of what was."""
    source = collector._create_env_fn
    return source if is_env(source) else one_env(collector.group)


def one_env(group: Any) -> Any:
    """Return what a group steps: an env, or a list of such."""
    envs = getattr(group, "envs", None)
    if envs is None:
        return getattr(group, "env", group)
    return envs[0] if len(envs) == 1 else list(envs)


def _aside(name: str, otherwise: Any = None) -> Callable[[Any], Any]:
    """Return what reads an option that has no effect."""
    return lambda collector: collector.options.without_effect.get(name, otherwise)


def _num_envs(collector: Any) -> int:
    return collector.group.num_envs if is_alone(collector) else sum(collector._envs.values())


_READ_AS_GIVEN = """
    cat_results compact_obs create_env_kwargs exploration_type init_random_frames num_threads
    policy_factory postproc preemptive_threshold replay_buffer reset_at_each_iter reset_when_done
    set_truncated split_trajs traj_format trajs_per_batch update_at_each_batch
"""
_READ_OFMACHINES = """
    collector_class collector_kwargs max_weight_update_interval num_workers_per_collector
"""
_READ_OF_CLUSTERS = "backend launcher slurm_kwargs tcp_port"

ATTRIBUTES: tuple[Attribute, ...] = (
    *(Attribute(name=name, read=_option(name)) for name in _READ_AS_GIVEN.split()),
    *(
        Attribute(name=name, read=_option(name), owners=MACHINES)
        for name in _READ_OFMACHINES.split()
    ),
    *(
        Attribute(name=name, read=_option(name), owners=("DistributedCollector",))
        for name in _READ_OF_CLUSTERS.split()
    ),
    *(
        Attribute(name=f"{what}device", read=_device(part))
        for what, part in (("env_", "env"), ("policy_", "policy"), ("storing_", "storing"))
    ),
    Attribute(name="device", read=_option("device")),
    Attribute(name="closed", read=lambda collector: collector._closed),
    Attribute(name="create_env_fn", read=lambda collector: collector._create_env_fn),
    Attribute(
        name="env_constructors",
        owners=MACHINES,
        read=lambda collector: collector._create_env_fn,
    ),
    Attribute(
        name="env",
        owners=("Collector",),
        read=_env,
        says="The env that was passed or made, or a list of several.",
    ),
    Attribute(name="max_frames_per_traj", read=_count("max_frames_per_traj")),
    Attribute(name="n_env", read=_num_envs),
    Attribute(name="num_sub_threads", owners=WITH_WORKERS, read=_option("num_threads")),
    Attribute(
        name="policy",
        read=lambda collector: collector._policy,
        says="The policy that was passed or made; None for random actions, and if the workers "
        "make their policies.",
    ),
    Attribute(name="requested_frames_per_batch", read=_option("frames_per_batch")),
    Attribute(name="total_frames", read=_total, says="It is `inf` if the collection never ends."),
    Attribute(
        name="update_after_each_batch", owners=MACHINES, read=_option("update_at_each_batch")
    ),
    Attribute(name="update_interval", owners=MACHINES, read=_option("max_weight_update_interval")),
    Attribute(
        name="worker_idx",
        read=_aside("worker_idx"),
        says="The number that was given to the collector; swath numbers its workers itself.",
    ),
    Attribute(
        name="num_collectors",
        owners=("RayCollector",),
        read=lambda collector: collector.num_workers // collector._each,
    ),
    Attribute(
        name="collected_frames",
        owners=("RayCollector",),
        read=lambda collector: collector._frames,
    ),
)
