"""Collectors over machines: the delivery of the process collectors, with workers elsewhere.

```
  DistributedCollector(sync=True)   = MultiSyncCollector  + RemotePlace(gate, medium, launcher)
  DistributedCollector(sync=False)  = MultiAsyncCollector + the same
  RPCCollector                      = either, with TensorPipe as the medium
```
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from swath.collectors.distributed.paired import PairedCollector
from swath.collectors.jobs import check_entries, each_of, node_options, sources_of
from swath.collectors.options import Options
from swath.errors import UsageError
from swath.links.gate import Gate, guess_host, new_secret
from swath.links.media import medium_for
from swath.workers.delayed import delayed_options
from swath.workers.launchers import launcher_for
from swath.workers.place import Place
from swath.workers.remote import Invitation, RemotePlace
from swath.workers.worlds import find_world

__all__ = ["DistributedCollector", "DistributedSyncCollector", "RPCCollector"]


class DistributedCollector(PairedCollector):
    """Collect with workers on other machines, or with processes that share no memory with yours.

    With `sync=True` batches are those of `MultiSyncCollector`, otherwise those of
    `MultiAsyncCollector`, with the same promises and the same data.

    Args:
        create_env_fn: A list with an id or a callable for each node, or one for `num_workers`.
        policy: As for `MultiSyncCollector`.
        **options: See [options](options.md); `frames_per_batch` is required.

    Examples:
        >>> makers = ["CartPole-v1", "CartPole-v1"]
        >>> with DistributedCollector(
        ...     makers, frames_per_batch=100, total_frames=200, sync=True, launcher="mp"
        ... ) as collector:
        ...     [data.batch_size for data in collector]
        [torch.Size([2, 50]), torch.Size([2, 50])]
    """

    _scope = "cluster"

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        inner, options = options.get("collector_kwargs"), node_options(options)
        delayed = delayed_options() if options.get("launcher") == "submitit_delayed" else {}
        options = {**delayed, **self._defaults, **options}
        self._world = find_world() if options.get("launcher") is None else None
        if self._world is not None:
            if self._world.rank:
                self._world.serve()
        given = Options.parse(type(self), options, self._scope, self._without)
        if self._world is not None and not isinstance(create_env_fn, (list, tuple)):
            each = given.num_workers_per_collector
            options.setdefault("num_workers", max(1, (self._world.size - 1) // each))
        nodes = len(sources_of(create_env_fn, options.get("num_workers")))
        check_entries("collector_kwargs", inner, nodes)
        if given.on_worker_failure == "restart":
            self._check_restart(given.backend)
        super().__init__(create_env_fn, policy, **options)

    def _check_restart(self, backend: Any) -> None:
        reason = None
        if self._world is not None:
            reason = "only torchrun or mpirun can restart their ranks; give launcher='mp'"
        elif backend == "rpc":
            reason = "a process cannot rejoin a group of torch.distributed.rpc; give backend='gloo'"
        if reason is not None:
            raise UsageError(f"on_worker_failure='restart' is not possible here: {reason}.")

    def _place(self, count: int) -> Place:
        options = self.options
        told = options.secret or os.environ.get("SWATH_SECRET")
        if told is None and options.launcher == "wait":
            raise UsageError(
                "launcher='wait' needs a secret that the workers know: give secret=, or set "
                "SWATH_SECRET here and for the workers."
            )
        secret = told.encode() if told else new_secret()
        world = self._world
        devices = each_of("visible_devices", options.visible_devices, count)
        slurm = {"cluster": "slurm", **(options.slurm_kwargs or {})}
        on_slurm = options.launcher == "submitit" and slurm["cluster"] == "slurm"
        host = options.host or (world and world.host) or guess_host(on_slurm)
        launcher = launcher_for(
            options.launcher, options.slurm_kwargs, world, options.num_workers_per_collector
        )
        gate = Gate(host, options.tcp_port, secret, options.link_timeout, count)
        try:
            medium = medium_for(
                options.backend,
                host,
                new_secret().hex(),
                options.link_timeout,
                world is not None and world.is_mpi,
                visible_devices=devices,
                tensorpipe_options=options.tensorpipe_options,
            )
        except BaseException:
            gate.close()
            raise
        invitation = Invitation(host, gate.port, secret, options.link_timeout)
        return RemotePlace(gate, medium, launcher, invitation, options.launch_timeout)


class DistributedSyncCollector(DistributedCollector):
    """`DistributedCollector` with `sync=True`, which publishes the weights after every batch.

    `max_weight_update_interval` changes the interval; -1 leaves publishing to you. It is also left
    to you if only `policy_factory` is given, and while `start()` collects in the background.

    Args:
        create_env_fn: As for `DistributedCollector`.
        policy: As for `DistributedCollector`.
        **options: See [options](options.md); `frames_per_batch` is required.
    """

    _defaults: Mapping[str, Any] = {"sync": True}

    def _publishes_every(self) -> int:
        there = self._module() is not None or not self._forms.weights.shapes
        return 0 if self._in_background() or not there else 1


class RPCCollector(DistributedCollector):
    """`DistributedCollector` that sends rollouts and weights with `torch.distributed.rpc`.

    Args:
        create_env_fn: As for `DistributedCollector`.
        policy: As for `DistributedCollector`.
        **options: See [options](options.md); `frames_per_batch` is required.
    """

    _defaults: Mapping[str, Any] = {"backend": "rpc"}
