"""The table of TorchRL: what people who come from there write, and what becomes of it here.

What is there for their sake alone stands here and nowhere else; how a row works is in
`translation.py`. What swath itself means by a name belongs to `Options` or to the collectors.
`scripts/torchrl_table.py` writes the rows into docs/coming-from/torchrl.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.torchrl_members import MEMBERS
from swath.collectors.translation import ANY, Given, Option, Row, Variable

__all__ = ["ROWS"]

# -- translations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _VersionAtRoot:
    """Writes the version of each frame where TorchRL's `PolicyVersion` has it, then goes on."""

    then: Callable[[Any], Any] | None

    def __call__(self, batch: TensorDictBase) -> Any:
        version = batch["collector", "policy_version"]
        batch["policy_version"] = version
        batch["next", "policy_version"] = version.clone()
        return batch if self.then is None else self.then(batch)


@dataclass(frozen=True)
class _WithoutIds:
    """Leaves the ids of trajectories out of a batch, then goes on."""

    then: Callable[[Any], Any] | None

    def __call__(self, batch: TensorDictBase) -> Any:
        batch = batch.exclude(("collector", "traj_ids"))
        return batch if self.then is None else self.then(batch)


def _without_warmup(value: Given, given: Given) -> Given:
    return {"compile_policy": {name: one for name, one in value.items() if name != "warmup"}}


def _on_a_gpu(value: Given, given: Given) -> Given:
    return {"cudagraph_policy": torch.cuda.is_available()}


# -- tests of values ------------------------------------------------------------------------------


def _is_mapping(value: Any, given: Given) -> bool:
    return isinstance(value, Mapping)


def _has_warmup(value: Any, given: Given) -> bool:
    return isinstance(value, Mapping) and "warmup" in value


def _beside_sub_threads(value: Any, given: Given) -> bool:
    return given.get("num_sub_threads") is not None


def _of_the_policy_alone(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and set(value) <= {"policy"})


def _is_collector(value: Any) -> bool:
    return getattr(value, "__name__", value) in (None, "single", "Collector", "SyncDataCollector")


# -- the table ------------------------------------------------------------------------------------

_LOCAL = ("workers",)
_MACHINES = ("cluster", "ray")
_OPENS = (
    "only Collector itself can open another collector; make a MultiSyncCollector, a "
    "MultiAsyncCollector or a collector of swath.collectors.distributed."
)
_PUBLISHES = (
    "swath publishes weights itself: call update_policy_weights_(weights), or give "
    "update_at_each_batch=True."
)

_SAME = """
    create_env_kwargs collector_kwargs compact_obs device env_device exploration_type
    frames_per_batch init_fn init_random_frames launcher max_frames_per_traj num_workers
    num_workers_per_collector policy_device policy_factory post_collect_hook postproc
    pre_collect_hook preemptive_threshold ray_init_config remote_configs replay_buffer
    reset_at_each_iter reset_when_done set_truncated slurm_kwargs split_trajs storing_device
    tcp_port tensorpipe_options total_frames traj_format trajs_per_batch trust_policy
    update_at_each_batch visible_devices
"""

_OPTIONS: tuple[Row, ...] = (
    *(Row(name=name, kind="option") for name in _SAME.split()),
    Option(
        name="auto_register_policy_transforms",
        nothing=ANY,
        says="swath keeps the recurrent state of a policy, whatever transforms the env has.",
    ),
    Option(
        name="extend_buffer",
        nothing=ANY,
        says="Whole batches are always written to the replay buffer.",
    ),
    Option(
        name="interruptor",
        nothing=(None,),
        says="a collector interrupts its workers itself; see preemptive_threshold.",
        tried=("an interruptor",),
    ),
    Option(
        name="local_init_rb",
        nothing=ANY,
        says="The replay buffer is in your process, and the first batch allocates its memory.",
    ),
    Option(
        name="no_cuda_sync",
        nothing=ANY,
        says="swath synchronises with the GPU only where it has to.",
    ),
    Option(name="replay_buffer_chunk", nothing=ANY, says="Batches are written whole."),
    Option(
        name="return_same_td",
        nothing=(False, None),
        says="a batch never changes after it was delivered, so each batch is a new TensorDict; "
        "leave it out.",
        tried=(True,),
    ),
    Option(
        name="track_policy_version",
        nothing=(False, None),
        when=lambda value, given: not isinstance(value, bool),
        page="A version tracker of TorchRL is refused, since the version is always in "
        '`("collector", "policy_version")`.',
        says='the version of each frame is always in ("collector", "policy_version"); True also '
        "stores it at the root.",
        tried=("a PolicyVersion",),
    ),
    Option(
        name="track_policy_version",
        nothing=(False, None),
        page='`("collector", "policy_version")` is always there; with `True` it stands under '
        '`"policy_version"` and `("next", "policy_version")`, too.',
        outcome="translated",
        into=lambda value, given: {"postproc": _VersionAtRoot(given.get("postproc"))},
        says='`("collector", "policy_version")` is always there; with `True` it stands under '
        '`"policy_version"` and `("next", "policy_version")`, too.',
        tried=(True,),
    ),
    Option(
        name="track_traj_ids",
        nothing=(True, None),
        page='With `False`, `("collector", "traj_ids")` is left out of what is delivered.',
        outcome="translated",
        into=lambda value, given: {"postproc": _WithoutIds(given.get("postproc"))},
        says='With `False`, `("collector", "traj_ids")` is left out of what is delivered.',
        tried=(False,),
    ),
    Option(
        name="trajs_per_write",
        nothing=ANY,
        says="TorchRL's buffers get all trajectories that are complete after a rollout at once.",
    ),
    Option(
        name="use_buffers", nothing=ANY, says="Rollouts are written once, to memory that is kept."
    ),
    Option(
        name="weight_recv_schemes",
        nothing=(None,),
        says="swath's workers get weights only from their collector.",
        tried=({"policy": "a scheme"},),
    ),
    Option(
        name="weight_sync_schemes",
        nothing=_of_the_policy_alone,
        page="A scheme for `policy` has no effect, since swath publishes the weights of the policy "
        "itself. Schemes for other models are refused: change those in the workers by `map_fn`.",
        says="swath publishes the weights of the policy, without a scheme; change other models in "
        "the workers by map_fn.",
        tried=({"critic": "a scheme"},),
    ),
    Option(name="weight_updater", nothing=(None,), says=_PUBLISHES, tried=("an updater",)),
    Option(
        name="worker_idx",
        nothing=ANY,
        says="It is kept as an attribute; swath numbers its workers itself.",
    ),
    # -- other values ---------------------------------------------------------------------------
    Option(
        name="compile_policy",
        outcome="translated",
        when=_has_warmup,
        into=_without_warmup,
        says="The argument `warmup` has no effect: swath decides how often the policy is called "
        "before.",
        tried=({"warmup": 1, "backend": "eager"},),
    ),
    Option(
        name="cudagraph_policy",
        outcome="translated",
        when=_is_mapping,
        into=_on_a_gpu,
        says="A mapping means `True` where there is a GPU, and has no effect elsewhere.",
        tried=({"warmup": 10},),
    ),
    Option(
        name="num_sub_threads",
        outcome="translated",
        page="Another name of `num_threads`, the number of torch threads in each worker.",
        scopes=_LOCAL,
        nothing=(None,),
        alias_of="num_threads",
        says="Threads of torch in each worker.",
        tried=(1,),
    ),
    Option(
        name="num_threads",
        scopes=_LOCAL,
        when=_beside_sub_threads,
        page="The number of torch threads in each worker. Together with `num_sub_threads` it "
        "means the threads of your process and has no effect, since swath does not change "
        "those.",
        nothing=ANY,
        says="Together with `num_sub_threads` it means the threads of your process, which swath "
        "does not change; alone, those of each worker.",
    ),
    Option(
        name="collector_class",
        scopes=_LOCAL,
        nothing=_is_collector,
        page="`Collector` has no effect. A class of your own is refused, since each worker runs "
        "swath's own loop; use `init_fn`, `postproc` and `map_fn`, or subclass the "
        "collector.",
        says="each worker runs swath's own loop. Use init_fn, postproc and map_fn instead, or "
        "subclass this collector.",
        tried=(dict,),
    ),
    Option(
        name="cat_results",
        owners=("MultiAsyncCollector",),
        nothing=("stack", None),
        says="a batch holds the rollout of one worker, so there is nothing to concatenate; "
        "leave it out.",
        tried=(0,),
    ),
    Option(
        name="preemptive_threshold",
        owners=("MultiAsyncCollector",),
        nothing=ANY,
        says="A batch holds the rollout of one worker, and does not wait for the others.",
    ),
    Option(
        name="sync",
        scopes=_LOCAL,
        owners=("MultiSyncCollector",),
        nothing=(True, None),
        page="`True` has no effect. `False` is refused; use MultiAsyncCollector. "
        "`MultiCollector(sync=...)` makes either of them.",
        says="its batches hold rollouts of all workers; for batches of one worker use "
        "MultiAsyncCollector.",
        tried=(False,),
    ),
    Option(
        name="sync",
        scopes=_LOCAL,
        owners=("MultiAsyncCollector",),
        nothing=(False, None),
        page="`False` has no effect. `True` is refused; use MultiSyncCollector.",
        says="its batches hold the rollout of one worker; for batches of all workers use "
        "MultiSyncCollector.",
        tried=(True,),
    ),
    Option(
        name="backend",
        outcome="translated",
        owners=("RPCCollector",),
        into=lambda value, given: {"backend": "rpc"},
        says="Rollouts and weights are always sent with torch.distributed.rpc.",
        tried=("gloo",),
    ),
    Option(
        name="use_env_creator",
        scopes=("ray",),
        nothing=ANY,
        says="Functions that make envs are sent to workers as they are.",
    ),
    # -- the front door of Collector ------------------------------------------------------------
    Option(
        name="backend",
        scopes=("inline",),
        nothing=(None, "direct"),
        page="`Collector(backend=...)` makes another collector. `process` (or "
        "`multiprocessing`) makes a MultiAsyncCollector, or with `sync=True` a "
        "MultiSyncCollector; `rpc`, `distributed`, `submitit` and `ray` make a collector "
        "of `swath.collectors.distributed`. Subclasses of Collector refuse the option.",
        says=_OPENS,
    ),
    Option(
        name="backend_options",
        scopes=("inline",),
        nothing=(None, {}),
        page="More options for the collector that `backend` makes.",
        says=_OPENS,
    ),
    Option(
        name="num_collectors",
        scopes=("inline",),
        nothing=(None, 1),
        page="The number of workers of the collector that `backend` makes; the default of "
        "`backend` is then `process`.",
        says=_OPENS,
    ),
    Option(
        name="sync",
        scopes=("inline",),
        nothing=(None,),
        page="Whether the collector that `backend` makes waits for all workers.",
        says=_OPENS,
    ),
    # -- other names ----------------------------------------------------------------------------
    Option(
        name="exploration_mode",
        outcome="translated",
        alias_of="exploration_type",
        tried=("mode",),
    ),
    Option(name="devices", outcome="translated", alias_of="device", tried=("cpu",)),
    Option(name="passing_devices", outcome="translated", alias_of="storing_device", tried=("cpu",)),
    Option(name="storing_devices", outcome="translated", alias_of="storing_device", tried=("cpu",)),
    Option(
        name="update_after_each_batch",
        outcome="translated",
        alias_of="update_at_each_batch",
        tried=(True,),
    ),
    Option(
        name="update_interval",
        outcome="translated",
        scopes=_MACHINES,
        alias_of="max_weight_update_interval",
        says="The default of DistributedSyncCollector is to publish after every batch.",
        tried=(2,),
    ),
    Option(
        name="pin_memory",
        outcome="refused",
        nothing=(None, False),
        says="batches on the CPU are views of shared memory, which cannot be pinned. Move them "
        "with batch.pin_memory().to(device), or give storing_device.",
        tried=(True,),
    ),
)

_VARIABLES: tuple[Row, ...] = (
    Variable(
        name="TCP_PORT",
        outcome="same",
        option="tcp_port",
        scopes=("cluster",),
        says="The port that workers connect to if `tcp_port` is not given.",
    ),
    Variable(
        name="MAX_IDLE_COUNT",
        outcome="no effect",
        says="swath does not count idle rounds; see `worker_timeout`.",
    ),
    Variable(
        name="RCP_IDLE_TIMEOUT",
        outcome="no effect",
        says="See `link_timeout` and `launch_timeout`.",
    ),
    Variable(
        name="TORCHRL_WEIGHT_SYNC_TIMEOUT",
        outcome="no effect",
        says="Publishing does not wait; `update_policy_weights_(wait=True)` waits as long as "
        "the workers are alive.",
    ),
)


def _no_such(name: str, says: str) -> Row:
    return Row(name=name, kind="name", outcome="refused", says=says)


_NAMES: tuple[Row, ...] = (
    _no_such(
        "AsyncBatchedCollector",
        "for envs that step at their own pace under one policy on a GPU, write "
        'Collector(ParallelEnv(n, make), policy, policy_device="cuda"), or a MultiAsyncCollector.',
    ),
    *(
        _no_such(
            name,
            "to evaluate, make a second collector: Collector(env, policy, "
            'exploration_type="deterministic", trajs_per_batch=n, frames_per_batch=m).',
        )
        for name in ("Evaluator", "RayEvalWorker")
    ),
    _no_such(
        "ProfileConfig",
        'put torch.profiler.profile() around the iteration; stats()["time"] says how the '
        "workers spend their time.",
    ),
    *(
        _no_such(name, _PUBLISHES)
        for name in (
            "DistributedWeightUpdater",
            "MultiProcessedWeightUpdater",
            "RPCWeightUpdater",
            "RayWeightUpdater",
            "RemoteModuleWeightUpdater",
            "VanillaWeightUpdater",
            "WeightUpdaterBase",
        )
    ),
)

ROWS: tuple[Row, ...] = (*_OPTIONS, *_VARIABLES, *MEMBERS, *_NAMES)
"""All rows; of several of one option, the first that is about a collector and a value holds."""
