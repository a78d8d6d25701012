"""Collectors over a Ray cluster: the delivery of the process collectors, with workers in actors.

```
  RayCollector(sync=True)    = MultiSyncCollector  + RayPlace(resources)
  RayCollector(sync=False)   = MultiAsyncCollector + the same
```
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from swath.collectors.distributed.paired import PairedCollector, paired
from swath.collectors.jobs import node_options
from swath.collectors.options import Options
from swath.errors import UsageError
from swath.links.cluster import enter, leave, needed
from swath.workers.place import Place
from swath.workers.ray import RayPlace, needs_of

__all__ = ["RayCollector"]

_LOOK_EVERY = 5.0
"""Seconds between two looks at what the cluster offers."""


@paired
class RayCollector(PairedCollector):
    """Collect with the actors of a Ray cluster.

    With `sync=True` batches are those of `MultiSyncCollector`, otherwise those of
    `MultiAsyncCollector`, with the same promises and the same data. An actor that is lost is
    replaced: `on_worker_failure` is "restart" here unless you say otherwise, with three restarts
    for each actor, and `launch_timeout` is 120 s.

    With a `swath.data.RayReplayBuffer`, after `start()`, the actors write into it themselves.

    Args:
        create_env_fn: An id or a callable that makes an env, for all actors, or a list of such
            with one entry for each.
        policy: As for `MultiSyncCollector`.
        **options: See `swath.collectors.Options`; `frames_per_batch` is required.

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
        options = node_options({**self._defaults, **options})
        given = Options.parse(type(self).__name__, options, "ray", self._without)
        self._configs, makers = _configs(given), create_env_fn
        listed = isinstance(makers, (list, tuple))
        count: Any = given.num_collectors or given.num_workers
        count = count or (len(makers) if listed else "auto")
        self._follows, self._next_look = count == "auto", monotonic() + _LOOK_EVERY
        cpus = sum(needs_of(one).get("CPU", 0) for one in self._configs) / len(self._configs)
        most = 1 if count == "auto" else count * given.num_workers_per_collector
        entered = enter(given.address, given.ray_init_config, cpus * most, given.launch_timeout)
        try:
            if count == "auto":
                count = max(1, min(self._room(), given.max_collectors))
            if not listed:
                makers = [makers] * count
            elif self._follows:
                makers = [makers[number % len(makers)] for number in range(count)]
            options.setdefault("max_restarts", 3 * count)
            super().__init__(makers, policy, **{**options, "num_workers": None})
        except BaseException:
            if not hasattr(self, "_crew"):  # which leaves by itself
                leave(entered)
            raise

    def _place(self, count: int) -> Place:
        if len(self._configs) not in (1, count):
            raise UsageError(
                f"remote_configs has {len(self._configs)} entries for {count} actors; give one for "
                "all or one for each."
            )
        return RayPlace(self._configs, self.options.launch_timeout)

    # -- more and fewer actors ------------------------------------------------------------------

    def add_collectors(self, num_collectors: int) -> None:
        """Start more actors; each takes part once Ray has found a place for it.

        With `sync=True` batches grow by its envs then.
        """
        self._check_open()
        with self.pause():
            self._hire(_counted(num_collectors))

    def remove_collectors(self, num_collectors: int, timeout: float = 5.0) -> None:
        """End the newest actors; what they have collected is delivered first.

        Args:
            num_collectors: How many; one at least stays.
            timeout: Seconds that each has to close its envs.
        """
        self._check_open()
        count = _counted(num_collectors)
        if count >= self.num_workers:
            raise UsageError(
                f"remove_collectors({count}) would leave none of {self.num_workers}; shutdown() "
                "ends them all."
            )
        with self.pause():
            self._retire(self._numbers[-count:], timeout)

    def stop_remote_collectors(self) -> None:
        """End all actors; the same as `shutdown`."""
        self.shutdown()

    def _collect(self, frames_left: float) -> tuple[Any, int] | None:
        self._crew.place.check()
        if self._follows and monotonic() >= self._next_look:
            self._next_look = monotonic() + _LOOK_EVERY
            waiting = len(self._starting)
            room = min(self._room(), self.options.max_collectors - self.num_workers) - waiting
            if room > 0:
                self._hire(room)
        return super()._collect(frames_left)

    def _room(self) -> int:
        """Return for how many more actors the cluster has room."""
        free = needed().available_resources()
        needs = needs_of(self._configs[0])
        return int(min((free.get(name, 0) // one for name, one in needs.items()), default=1))


def _configs(given: Options) -> list[dict[str, Any]]:
    each: Any = given.remote_configs or {}
    each = each if isinstance(each, (list, tuple)) else [each]
    spread = {"scheduling_strategy": "SPREAD"} if given.placement == "spread" else {}
    configs = [{"num_cpus": 1, **spread, **one} for one in each]
    each_worker = range(given.num_workers_per_collector if len(configs) > 1 else 1)
    return [one for one in configs for _ in each_worker]


def _counted(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"the number of collectors must be an int of at least 1; got {number!r}.")
    return number
