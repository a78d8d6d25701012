"""All options of all collectors, declared once.

A collector takes its keyword arguments through `Options.parse`, which writes in swath's way what
comes from TorchRL, refuses unknown names with the nearest known, and reads values and checks their
combinations at construction. What values an option takes stands beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from tensordict.nn import InteractionType

from swath.collectors import from_torchrl
from swath.collectors.translation import translated
from swath.collectors.values import (
    Choice,
    Count,
    Device,
    Exploration,
    Flag,
    Function,
    Kind,
    Port,
    Real,
    Sink,
    Text,
    Whatever,
)
from swath.errors import UsageError, nearest
from swath.memory import MemoryOrder
from swath.rollout import Devices

__all__ = ["Options", "Scope"]

_CLASHES = {
    ("trajs_per_batch", "split_trajs"): "trajs_per_batch already delivers whole trajectories",
    ("trajs_per_batch", "compact_obs"): "whole trajectories always hold their next observations",
    ("trajs_per_batch", "reset_when_done"): "an env that is never reset has only one trajectory",
    ("trajs_per_batch", "max_lag"): (
        "max_lag can hold back rollouts, but a whole trajectory has to wait for its end while "
        "you publish new versions; leave max_lag out, or trajs_per_batch"
    ),
    ("reset_at_each_iter", "reset_when_done"): (
        "reset_at_each_iter resets the envs that reset_when_done=False does not reset"
    ),
    ("update_at_each_batch", "max_weight_update_interval"): (
        "the first publishes before each batch in any case"
    ),
}
"""Pairs of options that cannot both be other than by default or -1, and why."""
_ENVS = (
    "say how many envs there are where you make them: SerialEnv(8, make), a list of makers, or "
    "num_workers"
)
_FRAMES = "give frames_per_batch, the frames of all envs in one batch"
_ELSEWHERE = {
    "n_envs": _ENVS,
    "num_envs": _ENVS,
    "n_steps": _FRAMES,
    "num_steps": _FRAMES,
    "rollout_length": _FRAMES,
    "batch_size": _FRAMES,
    "total_timesteps": "give total_frames, which counts the steps of all envs",
    "env": "it is the first argument, create_env_fn",
}
"""What other libraries call things, and what to write here."""
_LONGEST = 1e6
"""Seconds that can be waited for; the system cannot count many more in milliseconds."""
Where: TypeAlias = "str | torch.device | None"
Scope = Literal["inline", "workers", "cluster", "ray"]
"""Where workers run: in this process, in processes, on other machines, on a Ray cluster."""
_SCOPES: dict[Scope, str] = {
    "inline": "",
    "workers": "is for collectors with workers",
    "cluster": "is for the collectors of swath.collectors.distributed",
    "ray": "is for RayCollector",
}


_WORKERS: tuple[Scope, ...] = ("workers", "cluster", "ray")
_CLUSTER: tuple[Scope, ...] = ("cluster",)
_RAY: tuple[Scope, ...] = ("ray",)
_MACHINES: tuple[Scope, ...] = ("cluster", "ray")


def _option(default: Any, takes: Kind, scopes: tuple[Scope, ...] | None = None) -> Any:
    """Declare an option: its default, the values that it takes, and which collectors have it."""
    about = {"takes": takes} if scopes is None else {"takes": takes, "scopes": scopes}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all collectors; each is a keyword argument."""

    frames_per_batch: int | Sequence[int] = _option(
        MISSING, Count(1, "frames over all envs in a batch", each=True)
    )
    """Frames in one batch, over all envs. It is rounded up to a multiple of the envs, with a
    warning. A list gives each worker its own number."""
    total_frames: int = _option(-1, Count(1, "or -1 to collect for ever", negative=-1))
    """Frames to collect in all, rounded up to one step of all envs; the last batch is cut to reach
    it exactly. -1 collects for ever."""
    max_frames_per_traj: int | None = _option(None, Count(1, "or None", zero=None, negative=None))
    """Trajectories of this length are truncated, and their env is reset."""
    init_random_frames: int = _option(0, Count(0, negative=0))
    """The first n frames use random actions; `("collector", "random")` marks them."""
    reset_at_each_iter: bool = _option(False, Flag())
    """Start each batch with new episodes; those that were still running are marked truncated."""
    reset_when_done: bool = _option(True, Flag())
    """If False, each env plays one episode and then stops; its later rows are masked."""
    split_trajs: bool = _option(False, Flag())
    """Split each batch into trajectories: `[trajectories, T_max]`, padded with zeros, with
    `("collector", "mask")`."""
    trajs_per_batch: int | None = _option(None, Count(1, "or None"))
    """Deliver exactly this many whole trajectories per batch, in the order in which they end."""
    traj_format: Literal["padded", "cat"] = _option("padded", Choice(("padded", "cat")))
    """Shape of whole trajectories: "padded" is `[n, T_max]` with a mask, "cat" is `[sum T]`."""
    exploration_type: InteractionType | str = _option(InteractionType.RANDOM, Exploration())
    """How probabilistic policies choose an action: "random", "mode", "median", "mean" or
    "deterministic"."""
    set_truncated: bool = _option(False, Flag())
    """Mark the last step of each batch as truncated, though the episode continues in the next
    batch. With `trajs_per_batch` it needs `reset_at_each_iter`, where the episode does end."""
    compact_obs: bool = _option(False, Flag())
    """Leave next observations out of batches, which halves them;
    `swath.collectors.utils.restore_next` puts them back."""
    memory_order: MemoryOrder = _option("time", Choice(("time", "batch")))
    """Order in memory: "time" stores `[T, N]`, so that a step is contiguous; "batch" stores `[N,
    T]`."""
    postproc: Callable[[Any], Any] | None = _option(None, Function())
    """A function that is called with each batch; the batch that it returns is delivered."""
    pre_collect_hook: Callable[[], Any] | None = _option(None, Function())
    """A function without arguments that is called before each rollout, in your process."""
    post_collect_hook: Callable[[Any], Any] | None = _option(None, Function())
    """A function that is called with each batch before it is delivered, in your process; its result
    is ignored."""
    replay_buffer: Any = _option(None, Sink())
    """Write batches to this buffer (any object with `extend`); iteration then yields None."""
    policy_factory: Callable[[], Any] | None = _option(None, Function(each=True))
    """A function that makes the policy, instead of `policy`. Each worker calls it."""
    trust_policy: bool = _option(False, Flag())
    """Call the policy with a TensorDict, even if its signature does not say that it takes one."""
    env_groups: int = _option(1, Count(1))
    """Split the envs into this many groups that take turns: one group steps while a GPU computes
    the actions of another. Batches do not change."""
    compile_policy: bool | Mapping[str, Any] = _option(False, Whatever())
    """Compile the policy with `torch.compile`; a mapping holds its keyword arguments."""
    cudagraph: bool | Literal["auto"] = _option("auto", Choice((True, False, "auto")))
    """Run whole rollouts of torch-native envs on a GPU as one CUDA graph. "auto" does so where it
    is possible and the policy is a module; True raises an error where it is not possible."""
    cudagraph_policy: bool = _option(False, Flag())
    """Run the policy as a CUDA graph, for envs on the CPU with a policy on a CUDA device."""
    update_at_each_batch: bool = _option(False, Flag())
    """Call `update_policy_weights_()` before each batch but the first."""
    device: Where | Sequence[Where] = _option(None, Device())
    """The default of `env_device`, `policy_device` and `storing_device`. A list gives each worker
    its own device, also in the other three options."""
    env_device: Where | Sequence[Where] = _option(None, Device())
    """Device of torch-native envs. Gymnasium envs are always on the CPU."""
    policy_device: Where | Sequence[Where] = _option(None, Device())
    """Device of the policy; by default the one that its weights are on. On another device it is a
    copy, which `update_policy_weights_` brings up to date."""
    storing_device: Where | Sequence[Where] = _option(None, Device())
    """Device of batches; by default that of envs and policy if they share one, else the CPU."""
    create_env_kwargs: Mapping[str, Any] | None = _option(None, Whatever())
    """Keyword arguments for the function that makes the env."""
    seed: int | None = _option(None, Count(0, "or None"))
    """Seed of envs, random actions and the random numbers that the policy draws."""
    progress: bool = _option(False, Flag())
    """Show frames, speed and returns: in one line on a terminal or in a notebook, else in a line
    on stderr every five seconds."""
    num_workers: int | None = _option(None, Count(1, "or None"), _WORKERS)
    """Number of workers; by default one for each entry of `create_env_fn`, or one for each core."""
    cat_results: Literal["stack", 0, -1] = _option("stack", Choice(("stack", 0, 1, -1)), _WORKERS)
    """Shape of a batch of W workers: "stack" is `[W, N, T]`, 0 is `[W * N, T]`, -1 is `[N, W *
    T]`."""
    preemptive_threshold: float | None = _option(None, Real(1.0, above=False), _WORKERS)
    """Deliver the batch once this share of the workers is done; rows that the others have not
    filled are masked."""
    collect_ahead: bool = _option(False, Flag(), _WORKERS)
    """Collect the next batch while you train on this one. The policy then lags by one version."""
    max_lag: int | None = _option(None, Count(0, "or None"), _WORKERS)
    """Hold workers back so that no batch is more than this many versions old when it is delivered,
    if you publish once per batch."""
    num_threads: int = _option(1, Count(1), _WORKERS)
    """Number of torch threads in each worker."""
    init_fn: Callable[[], Any] | None = _option(None, Function(), _WORKERS)
    """A function without arguments that is called first in each worker."""
    on_worker_failure: Literal["raise", "restart"] = _option(
        "raise", Choice(("raise", "restart")), _WORKERS
    )
    """What to do when a worker fails or is killed: "raise" an error, or "restart" the worker."""
    max_restarts: int = _option(3, Count(0), _WORKERS)
    """Restart workers at most this many times in total."""
    worker_timeout: float | None = _option(None, Real(_LONGEST), _WORKERS)
    """Kill a worker that needs more than this many seconds for one rollout."""
    sync: bool = _option(False, Flag(), _MACHINES)
    """True: a batch holds rollouts of all workers. False: a batch is a rollout of the worker that
    is done first."""
    collector_class: str | type = _option("single", Whatever(), _MACHINES)
    """Workers of a node: "single" for one, "sync" or "async" for `num_workers_per_collector`."""
    num_workers_per_collector: int = _option(1, Count(1), _MACHINES)
    """Number of worker processes on each node; each makes its own envs."""
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = _option(
        None, Whatever(), _MACHINES
    )
    """More options as a mapping, or a list with one mapping for each node."""
    max_weight_update_interval: int | None = _option(
        None, Count(1, "or -1: never", zero=1, negative=-1), _MACHINES
    )
    """Publish the weights after this number of batches. With -1 you publish them yourself. None
    means -1, but `DistributedSyncCollector` then publishes after each batch."""
    launch_timeout: float | None = _option(None, Real(_LONGEST), _MACHINES)
    """Raise an error if a worker has not connected after this many seconds."""
    backend: str = _option("gloo", Whatever(), _CLUSTER)
    """What rollouts and weights are sent with: "gloo", "nccl", "mpi" or "rpc"."""
    launcher: str | None = _option(None, Whatever(), _CLUSTER)
    """How workers are started: "mp" as processes of this machine, "submitit" as jobs,
    "submitit_delayed" by `submitit_delayed_launcher`, "wait" by hand with `python -m
    swath.workers.join`. By default they are the other ranks if this process was started by
    `torchrun` or `mpirun`, else "mp"."""
    slurm_kwargs: Mapping[str, Any] | None = _option(None, Whatever(), _CLUSTER)
    """Parameters of submitit, such as `slurm_partition` and `timeout_min` (a day by default). Its
    files go to `folder`, which all nodes must see. `cluster="local"` starts processes instead of
    jobs."""
    host: str | None = _option(None, Text(), _CLUSTER)
    """Address of this machine that workers connect to; by default loopback, or that of the node in
    a Slurm job."""
    tcp_port: int = _option(0, Port(0, "0 for any that is free", 65535), _CLUSTER)
    """Port that workers connect to; 0 for any that is free."""
    link_timeout: float = _option(60.0, Real(_LONGEST), _CLUSTER)
    """Give up on a host that does not answer, or a transfer that has stalled, after this many
    seconds."""
    secret: str | None = _option(None, Text(), _CLUSTER)
    """Secret that workers must know to connect; by default the environment variable SWATH_SECRET,
    or a random one."""
    visible_devices: Sequence[Any] | None = _option(None, Whatever(), _CLUSTER)
    """CUDA devices of each worker, with backend="rpc"."""
    tensorpipe_options: Mapping[str, Any] | None = _option(None, Whatever(), _CLUSTER)
    """More arguments of TensorPipeRpcBackendOptions, with backend="rpc"."""
    num_collectors: int | Literal["auto"] | None = _option(
        None, Count(1, 'or "auto"', also=("auto",)), _RAY
    )
    """Number of collectors, each with `num_workers_per_collector` actors; by default one for each
    entry of `create_env_fn`, else "auto": as many as the cluster has room for, also when it grows,
    or one actor for each CPU if actors reserve no resources."""
    max_collectors: int = _option(64, Count(1), _RAY)
    """Largest number of collectors with num_collectors="auto"."""
    address: str | None = _option(None, Whatever(), _RAY)
    """Address of the Ray cluster. By default it is the one that this process is connected to, or
    the one that RAY_ADDRESS names, or a new one that is started on this machine."""
    ray_init_config: Mapping[str, Any] | None = _option(None, Whatever(), _RAY)
    """More arguments of `ray.init`."""
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = _option(
        None, Whatever(), _RAY
    )
    """Ray options of the actors, as one mapping for all or a list with one mapping for each
    collector: `num_cpus` (1 by default), `num_gpus`, `memory`, `resources` and others, except names
        and restarts."""
    placement: Literal["pack", "spread"] = _option("pack", Choice(("pack", "spread")), _RAY)
    """Where Ray puts actors: "spread" uses different nodes as far as possible, "pack" fills nodes
    first."""

    without_effect: Mapping[str, Any] = field(
        default_factory=dict, compare=False, metadata={"scopes": ()}
    )
    """What was given beside these, and changes nothing."""

    @classmethod
    def parse(
        cls,
        owner: type,
        given: Mapping[str, Any],
        scope: Scope = "inline",
        without: Mapping[str, str] | None = None,
    ) -> Options:
        """Return the options from keyword arguments, checked.

        Args:
            owner: The class of the collector.
            given: The keyword arguments.
            scope: Where its workers run.
            without: Further options that make no sense there, and why.
        """
        said = translated(from_torchrl.ROWS, owner, scope, given)
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in said.options.items():
            shown = said.names.get(name, name)
            _check_known(owner.__name__, name, shown, scope, without or {})
            values[name] = _read(known[name], shown, value)
        if values.get("frames_per_batch") is None:
            raise UsageError(
                f"frames_per_batch is missing: give {owner.__name__} the number of frames in one "
                "batch, over all envs."
            )
        return cls(**values, without_effect=said.aside)

    @classmethod
    def signature(cls, scope: Scope = "inline") -> inspect.Signature:
        """Return the signature of a collector, for help() and editors."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter("create_env_fn", kind),
            inspect.Parameter("policy", kind, default=None),
        ]
        for f in fields(cls):
            if scope not in f.metadata.get("scopes", (scope,)):
                continue
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            parameters.append(
                inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=f.type
                )
            )
        return inspect.Signature(parameters)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _read(f, f.name, getattr(self, f.name)))
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Refuse pairs of options of which one takes away what the other is for."""
        for names, reason in _CLASHES.items():
            if all(getattr(self, name) not in (_default(name), -1) for name in names):
                raise UsageError(f"{' and '.join(names)} do not go together: {reason}.")
        if self.trajs_per_batch and self.set_truncated and not self.reset_at_each_iter:
            raise UsageError(
                "trajs_per_batch and set_truncated do not go together: an episode that is "
                "marked truncated at the end of a rollout continues in the next one, so parts "
                "of it would look like whole trajectories. Leave set_truncated out, or give "
                "reset_at_each_iter=True as well, which ends the episodes there."
            )
        if self.traj_format != "padded" and self.trajs_per_batch is None:
            raise UsageError("traj_format goes with trajs_per_batch; give that, or leave it out.")

    def check_policy(self, policy: Any) -> None:
        """Refuse a policy beside a `policy_factory`."""
        if policy is not None and self.policy_factory is not None:
            raise UsageError("policy and policy_factory are both given; give one of them.")

    @property
    def interaction_type(self) -> InteractionType:
        """How probabilistic policies choose, as tensordict's enum."""
        assert isinstance(self.exploration_type, InteractionType)
        return self.exploration_type

    def devices(self, worker: int | None = None) -> Devices:
        """Return where things are to live, for a worker or for the one process."""

        def said(name: str) -> torch.device | None:
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                if worker is None:
                    raise UsageError(f"{name} as a list is for collectors with workers.")
                value = value[worker % len(value)]  # for workers that come later, too
            return None if value is None else torch.device(value)

        names = ("env_device", "policy_device", "storing_device")
        env, policy, storing = [said(name) or said("device") for name in names]
        if self.assembles:
            storing = torch.device("cpu")
        return Devices(env, policy, storing)

    @property
    def publishes_every(self) -> int:
        """Weights are published after so many batches; -1 for never, 0 if nothing is said of it."""
        return 1 if self.update_at_each_batch else self.max_weight_update_interval or 0

    @property
    def assembles(self) -> bool:
        """Trajectories are put together on the host; batches go to where they are stored then."""
        return self.split_trajs or self.trajs_per_batch is not None

    @property
    def compile_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments for `torch.compile`, or None to leave the policy as it is."""
        if isinstance(self.compile_policy, Mapping):
            return dict(self.compile_policy)
        return {} if self.compile_policy else None


def _read(option: Field[Any], name: str, value: Any) -> Any:
    """Return the value of an option; None is the default of one that cannot be None.

    Args:
        option: The option.
        name: What it is called for messages.
        value: What was given.
    """
    if value is None:
        return None if option.default is MISSING else option.default
    takes: Kind | None = option.metadata.get("takes")
    return value if takes is None else takes.read(name, value)


def _check_known(
    owner: str, name: str, shown: str, scope: Scope, without: Mapping[str, str]
) -> None:
    """Refuse an option that a collector does not have."""
    known = {f.name: f.metadata.get("scopes", (scope,)) for f in fields(Options)}
    if name in _ELSEWHERE and name not in known:
        raise UsageError(f"{owner} has no option {shown!r}: {_ELSEWHERE[name]}.")
    if not known.get(name):
        theirs = [row.name for row in from_torchrl.ROWS if row.kind == "option"]
        raise UsageError(f"{owner} has no option {shown!r}.{nearest(name, [*known, *theirs])}")
    if name in without:
        raise UsageError(f"{owner} has no option {shown!r}: {without[name]}.")
    if scope not in known[name]:
        raise UsageError(f"{owner} has no option {shown!r}: it {_SCOPES[known[name][0]]}.")


def _default(name: str) -> Any:
    return next(f.default for f in fields(Options) if f.name == name)
