"""Collectors over a Ray cluster: the delivery of the process collectors, with workers in actors.

```
  RayCollector(sync=True)    = MultiSyncCollector  + RayPlace(resources)
  RayCollector(sync=False)   = MultiAsyncCollector + the same
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from swath.collectors.distributed.paired import PairedCollector
from swath.collectors.jobs import check_entries, node_options, sources_of
from swath.collectors.options import Options
from swath.collectors.torchrl_members import called_as_in_torchrl
from swath.collectors.turns import between_batches
from swath.collectors.values import Count, mappings_of
from swath.errors import UsageError
from swath.links.cluster import enter, leave, needed, needs_of
from swath.workers.place import Place
from swath.workers.ray import RayPlace, actor_of

__all__ = ["RayCollector"]

_LOOK_EVERY = 5.0
"""Seconds between two checks of what the cluster has free."""
_MOST = 1e14
"""Largest amount of a resource that Ray accepts."""
_RESTARTS = 3
"""For each actor, unless the user says how many in all."""
_REPLACED = "swath replaces actors itself; see on_worker_failure and max_restarts of the collector"
_COUNT = Count(1)
_STRATEGY = "give scheduling_strategy=PlacementGroupSchedulingStrategy(...) instead"
_OURS = {
    "name": "all actors would have the same name",
    "max_restarts": _REPLACED,
    "max_task_retries": _REPLACED,
    "max_concurrency": "swath sets the number of threads of each actor",
    "max_pending_calls": "swath limits the number of pending calls itself",
    "object_store_memory": "the object store belongs to a node; see ray_init_config",
    "placement_group": _STRATEGY,
    "placement_group_bundle_index": _STRATEGY,
    "placement_group_capture_child_tasks": _STRATEGY,
    "lifetime": "actors end with the collector, or with the process that made it",
}
"""Options of actors that are not the user's, and why."""


class RayCollector(PairedCollector):
    """Collect with the actors of a Ray cluster.

    With `sync=True` batches are those of `MultiSyncCollector`, otherwise those of
    `MultiAsyncCollector`, with the same promises and the same data. An actor that is lost is
    replaced: `on_worker_failure` is "restart" by default, with three restarts for each actor, and
    `launch_timeout` is 120 s.

    After `start()` with a `swath.data.RayReplayBuffer`, the actors write to it themselves.

    Args:
        create_env_fn: An id or a callable that makes an env, for all collectors, or a list of
            such with one entry for each.
        policy: As for `MultiSyncCollector`.
        **options: See [options](options.md); `frames_per_batch` is required.

    Example:
        ```python
        with RayCollector(
            "CartPole-v1", policy, num_collectors=8, frames_per_batch=4096, sync=True
        ) as collector:
            for data in collector:
                train(data)
                collector.update_policy_weights_()
        ```
    """

    _scope = "ray"
    _defaults: Mapping[str, Any] = {"on_worker_failure": "restart", "launch_timeout": 120.0}

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        needed()
        inner = options.get("collector_kwargs")
        options = {**self._defaults, **node_options(options)}
        given = Options.parse(type(self), options, "ray", self._without)
        self._configs, self._each = _configs(given), given.num_workers_per_collector
        makers, self._follows = _makers(given, create_env_fn)
        for name, value in (("collector_kwargs", inner), ("remote_configs", given.remote_configs)):
            check_entries(name, value, None if self._follows else len(makers))
        self._next_look = monotonic() + _LOOK_EVERY
        self._restarts_each = 0 if "max_restarts" in options else _RESTARTS
        cpus = _cpus(self._configs) * self._each * (1 if self._follows else len(makers))
        entered = enter(given.address, given.ray_init_config, cpus, given.launch_timeout)
        try:
            if self._follows:
                count = max(1, min(self._room(0, 0) // self._each, given.max_collectors))
                makers = [makers[number % len(makers)] for number in range(count)]
            options.setdefault("max_restarts", _RESTARTS * self._each * len(makers))
            super().__init__(makers, policy, **{**options, "num_workers": None})
        except BaseException:
            if not hasattr(self, "_crew"):  # which leaves by itself
                leave(entered)
            raise

    def _place(self, count: int) -> Place:
        return RayPlace(self._configs, self.options.launch_timeout)

    # -- more and fewer actors ------------------------------------------------------------------

    @called_as_in_torchrl
    @between_batches
    def add_collectors(self, num_collectors: int) -> None:
        """Start more actors; each takes part once Ray has scheduled it.

        With `sync=True`, batches then also hold the frames of its envs.

        Args:
            num_collectors: How many; each has `num_workers_per_collector` actors.
        """
        self._check_open()
        self._add(_COUNT.read("num_collectors", num_collectors))

    @between_batches
    def remove_collectors(self, num_collectors: int, timeout: float = 5.0) -> None:
        """End the newest actors; the frames that they have collected are delivered first.

        Afterwards `num_collectors="auto"` no longer adds collectors.

        Args:
            num_collectors: How many, as for `add_collectors`; at least one remains.
            timeout: Seconds that each actor has to close its envs.
        """
        self._check_open()
        count = _COUNT.read("num_collectors", num_collectors)
        there = self.num_workers // self._each
        if count >= there:
            raise UsageError(
                f"remove_collectors({count}) would leave none of {there}; shutdown() ends them all."
            )
        self._follows = False  # or they would come again
        self._retire(self._numbers[-count * self._each :], timeout)

    def stop_remote_collectors(self) -> None:
        """End all actors; the same as `shutdown`."""
        self.shutdown()

    def _collect(self, frames_left: float) -> tuple[Any, int] | None:
        self._crew.place.check()
        if self._follows and monotonic() >= self._next_look:
            self._next_look = monotonic() + _LOOK_EVERY
            room = self._room(self.num_workers, len(self._starting)) // self._each
            room = min(room, self.options.max_collectors - self.num_workers // self._each)
            if room > 0:
                self._add(room)
        return super()._collect(frames_left)

    def _add(self, num_collectors: int) -> None:
        actors = num_collectors * self._each
        self._supervisor.max_restarts += actors * self._restarts_each
        self._hire(actors)

    def _room(self, actors: int, waiting: int) -> int:
        """Return for how many more actors the cluster has room.

        Those that take nothing find room anywhere; there is one of them for each CPU.

        Args:
            actors: How many there are.
            waiting: How many of these may have no place yet.
        """
        needs = needs_of(self._configs[0])
        if not needs:
            return int(needed().cluster_resources().get("CPU", 0)) - actors
        free = needed().available_resources()
        fits = [free.get(name, 0) / one for name, one in needs.items()]
        return int(min(fits) + 1e-6) - waiting  # 0.3 / 0.1 is a little less than 3


def _makers(given: Options, create_env_fn: Any) -> tuple[list[Any], bool]:
    """Return what makes the envs of each collector, and whether the cluster says how many.

    If it does, the makers are to be taken in turn.
    """
    ours, general = given.num_collectors, given.num_workers
    if None not in (ours, general) and ours != general:
        raise UsageError(
            f"num_collectors is {ours!r} and num_workers is {general!r}, which are two names of "
            "one thing; give one of them."
        )
    count = general if ours is None else ours
    listed = isinstance(create_env_fn, (list, tuple))
    if count == "auto" or (count is None and not listed):
        return sources_of(create_env_fn, None if listed else 1), True
    name = "num_workers" if ours is None else "num_collectors"
    return sources_of(create_env_fn, count, name), False


def _cpus(configs: Sequence[Mapping[str, Any]]) -> float:
    """Return how many CPUs an actor takes, on average."""
    return sum(needs_of(one).get("CPU", 0) for one in configs) / len(configs)


def _configs(given: Options) -> list[dict[str, Any]]:
    """Return options of the actors: one for all of them, or one for each."""
    spread = {"scheduling_strategy": "SPREAD"} if given.placement == "spread" else {}
    configs = []
    for one in mappings_of("remote_configs", given.remote_configs):
        said = {name: value for name, value in one.items() if value is not None}
        _check_config(said)
        configs.append({"num_cpus": 1, **spread, **said})
        actor_of(configs[-1])  # Ray looks at the rest
    each_worker = range(given.num_workers_per_collector if len(configs) > 1 else 1)
    return [one for one in configs for _ in each_worker]


def _check_config(config: Mapping[str, Any]) -> None:
    for name in config:
        if name in _OURS:
            raise UsageError(f"remote_configs must not have {name!r}: {_OURS[name]}.")
    named = config.get("resources", {})
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise UsageError(
            "'resources' in remote_configs must be a dict with a number for each name; got "
            f"{named!r}."
        )
    units = {name: config[name] for name in ("num_cpus", "num_gpus", "memory") if name in config}
    for name, value in {**units, **named}.items():
        _check_amount(name, value)
    strategy = config.get("scheduling_strategy", "DEFAULT")
    if isinstance(strategy, str) and strategy not in ("DEFAULT", "SPREAD"):
        raise UsageError(
            "'scheduling_strategy' in remote_configs must be DEFAULT, SPREAD or an object of "
            f"ray.util.scheduling_strategies; got {strategy!r}."
        )


def _check_amount(name: str, value: Any) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not 0 <= value <= _MOST:
        raise UsageError(
            f"{name!r} in remote_configs must be a number from 0 to {_MOST:g}; got {value!r}."
        )
    if name == "num_gpus" and value > 1 and value != int(value):
        raise UsageError(
            f"'num_gpus' in remote_configs must be whole, or less than 1; got {value!r}."
        )
