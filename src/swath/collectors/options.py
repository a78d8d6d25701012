"""All options of all collectors, declared once.

A collector takes its keyword arguments through `Options.parse`, which knows the old names, refuses
unknown ones with the nearest known, and checks values and their combinations at construction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from tensordict.nn import InteractionType

from swath.errors import UsageError, nearest
from swath.memory import MemoryOrder
from swath.rollout import Devices

__all__ = ["Options", "Scope", "mappings_of"]

_LEAST = {
    "max_frames_per_traj": 1,
    "trajs_per_batch": 1,
    "seed": 0,
    "num_workers": 1,
    "max_lag": 0,
}
_CLASHES = {
    ("trajs_per_batch", "split_trajs"): "trajs_per_batch already delivers whole trajectories",
    ("trajs_per_batch", "compact_obs"): "whole trajectories hold their next observations",
    ("trajs_per_batch", "reset_when_done"): "an env that stays ended has one trajectory",
    ("trajs_per_batch", "max_lag"): (
        "it is rollouts that are held back, and whole trajectories wait for their ends and for one "
        "another while you publish; leave max_lag out, or trajs_per_batch"
    ),
    ("reset_at_each_iter", "reset_when_done"): (
        "reset_at_each_iter resets what reset_when_done=False leaves alone"
    ),
    ("update_at_each_batch", "max_weight_update_interval"): (
        "the first publishes before each batch anyway"
    ),
}
"""Pairs of options that cannot both be other than by default, and why."""
_LONGEST = 1e6
"""Seconds that can be waited for; the system cannot count many more in milliseconds."""
Device: TypeAlias = "str | torch.device | None"

_OLD_NAMES = {
    "exploration_mode": "exploration_type",
    "devices": "device",
    "passing_devices": "storing_device",
    "update_after_each_batch": "update_at_each_batch",
    "update_interval": "max_weight_update_interval",
}
Scope = Literal["inline", "workers", "cluster", "ray"]
"""Where workers run: in this process, in processes, on other machines, on a Ray cluster."""
_SCOPES: dict[Scope, str] = {
    "inline": "",
    "workers": "is for collectors with workers",
    "cluster": "is for the collectors of swath.collectors.distributed",
    "ray": "is for RayCollector",
}


def _for_workers(default: Any) -> Any:
    return field(default=default, metadata={"scopes": ("workers", "cluster", "ray")})


def _for_cluster(default: Any) -> Any:
    return field(default=default, metadata={"scopes": ("cluster",)})


def _for_ray(default: Any) -> Any:
    return field(default=default, metadata={"scopes": ("ray",)})


def _for_machines(default: Any) -> Any:
    return field(default=default, metadata={"scopes": ("cluster", "ray")})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a collection is to be like."""

    frames_per_batch: int | Sequence[int] = field(default=0)
    """Frames in one batch, over all envs; rounded up, with a warning, to a multiple of the envs. A
    list gives each worker its own number."""
    total_frames: int = -1
    """Frames to collect in all; the last batch is cut to meet it. -1 never ends."""
    max_frames_per_traj: int | None = None
    """A trajectory that reaches this length is truncated and its env reset."""
    init_random_frames: int = 0
    """So many frames, exactly, get a random action first; `("collector", "random")` says which."""
    reset_at_each_iter: bool = False
    """Start each batch with new episodes; the open ones are marked truncated."""
    reset_when_done: bool = True
    """If False, an env that ended stays ended; its later rows are masked."""
    split_trajs: bool = False
    """Deliver `[trajectories, T_max]`, zero padded, with `("collector", "mask")`."""
    trajs_per_batch: int | None = None
    """Deliver exactly so many whole trajectories per batch, in order of completion."""
    traj_format: Literal["padded", "cat"] = "padded"
    """Form of whole trajectories: `[n, T_max]` with mask, or `[sum T]`."""
    exploration_type: InteractionType | str = InteractionType.RANDOM
    """How probabilistic policies choose: random, mode, median, mean or deterministic."""
    set_truncated: bool = False
    """Mark the last step of each batch as truncated, though the episode goes on in the next; with
    `trajs_per_batch` only beside `reset_at_each_iter`, where it does not go on."""
    compact_obs: bool = False
    """Do not store next observations twice; see `swath.collectors.utils.restore_next`."""
    memory_order: MemoryOrder = "time"
    """Order in memory: "time" (`[T, N]`, a step is contiguous) or "batch" (`[N, T]`)."""
    postproc: Callable[[Any], Any] | None = None
    """Called with each batch; what it returns is delivered."""
    pre_collect_hook: Callable[[], Any] | None = None
    """Called before each rollout."""
    post_collect_hook: Callable[[Any], Any] | None = None
    """Called with each batch before it is delivered."""
    replay_buffer: Any = None
    """Anything with `extend`: batches go there, and iteration yields None."""
    policy_factory: Callable[[], Any] | None = None
    """Makes the policy; instead of `policy`."""
    env_groups: int = 1
    """Let so many groups of envs take turns: one steps while a GPU computes the actions of another.
    A batch stays as it is."""
    compile_policy: bool | Mapping[str, Any] = False
    """Run the policy through `torch.compile`; a mapping holds its keyword arguments."""
    cudagraph: bool | Literal["auto"] = "auto"
    """Run a whole rollout of torch-native envs on a GPU as one CUDA graph: where it can be and the
    policy is a module ("auto"), or else be refused (True)."""
    cudagraph_policy: bool = False
    """Run the policy of envs on the CPU as a CUDA graph; needs a policy on a CUDA device."""
    update_at_each_batch: bool = False
    """Publish the weights between two batches, when you ask for the next, as
    `update_policy_weights_()` does."""
    device: Device | Sequence[Device] = None
    """Sets the three below where they are not given. A list, here and there, is for workers."""
    env_device: Device | Sequence[Device] = None
    """Where torch-native envs live; those of gymnasium live on the CPU."""
    policy_device: Device | Sequence[Device] = None
    """Where the policy lives; where its weights are, by default. Elsewhere it is a copy that gets
    its weights by `update_policy_weights_`."""
    storing_device: Device | Sequence[Device] = None
    """Where batches are delivered; beside envs and policy if they live together, by default."""
    create_env_kwargs: Mapping[str, Any] | None = None
    """Keyword arguments for the callable that makes the env."""
    seed: int | None = None
    """Seeds envs, random actions and the policy's draws; see `set_seed`."""
    progress: bool = False
    """Show a progress bar."""
    num_workers: int | None = _for_workers(None)
    """How many workers; one for each entry of `create_env_fn` by default, or one per core."""
    cat_results: Literal["stack", 0, -1] = _for_workers("stack")
    """How a batch of all workers is put together: `[W, N, T]`, `[W * N, T]` or `[N, W * T]`."""
    preemptive_threshold: float | None = _for_workers(None)
    """Deliver once this share of the workers is done; what the others lack is masked."""
    collect_ahead: bool = _for_workers(False)
    """Collect the next batch while you use this one: the policy lags by one version."""
    max_lag: int | None = _for_workers(None)
    """Hold workers back so that no batch is older than this when it is delivered, in versions, if
    you publish once per batch."""
    num_threads: int = _for_workers(1)
    """Threads of torch in each worker."""
    init_fn: Callable[[], Any] | None = _for_workers(None)  # noqa: RUF009
    """Called first in each worker."""
    on_worker_failure: Literal["raise", "restart"] = _for_workers("raise")
    """What happens when a worker fails or is killed."""
    max_restarts: int = _for_workers(3)
    """So many restarts at most, over all workers."""
    worker_timeout: float | None = _for_workers(None)
    """Kill a worker that needs more seconds than this for one rollout."""
    sync: bool = _for_machines(False)
    """A batch holds rollouts of all workers; if not, of the one that is done first."""
    collector_class: str | type = _for_machines("single")  # noqa: RUF009
    """"single": a node runs one worker; "sync" or "async": `num_workers_per_collector` of them."""
    num_workers_per_collector: int = _for_machines(1)
    """Worker processes on each node; each makes the envs of its node's maker."""
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = _for_machines(None)
    """Further options, or one mapping of such for each node."""
    max_weight_update_interval: int = _for_machines(-1)
    """Publish the weights after every so many batches; -1 leaves it to you."""
    launch_timeout: float | None = _for_machines(None)
    """Give up when a worker has not come within so many seconds."""
    backend: str = _for_cluster("gloo")
    """What slabs and weights travel over: "gloo", "nccl", "mpi" or "rpc"."""
    launcher: str | None = _for_cluster(None)
    """"mp": processes of this machine; "submitit": jobs; "submitit_delayed": see
    `submitit_delayed_launcher`; "wait": those who run `python -m swath.workers.join`. By default
    ranks of the world that this process was started in by `torchrun` or `mpirun`, if there is one,
    else "mp"."""
    slurm_kwargs: Mapping[str, Any] | None = _for_cluster(None)
    """Parameters of submitit: `slurm_partition`, `timeout_min` (a day) and so on; its files go to
    `folder`, which all nodes see; `cluster="local"` for processes instead of Slurm."""
    host: str | None = _for_cluster(None)
    """The address of this machine that workers dial; loopback, or the node's in a Slurm job."""
    tcp_port: int = _for_cluster(0)
    """The port that workers dial; 0 for any that is free."""
    link_timeout: float = _for_cluster(60.0)
    """Seconds after which a host that does not answer, or a transfer that stands, is given up."""
    secret: str | None = _for_cluster(None)
    """What workers must know to be let in; by default the environment variable SWATH_SECRET, or
    one that nobody can guess."""
    visible_devices: Sequence[Any] | None = _for_cluster(None)
    """CUDA devices of each worker, with backend="rpc"."""
    tensorpipe_options: Mapping[str, Any] | None = _for_cluster(None)
    """Further arguments of TensorPipeRpcBackendOptions, with backend="rpc"."""
    num_collectors: int | Literal["auto"] | None = _for_ray(None)
    """How many collectors, each of `num_workers_per_collector` actors; one for each entry of
    `create_env_fn` by default, else "auto": as many as the cluster has room for, also when that
    grows, or one actor for each of its CPUs if actors take nothing of it."""
    max_collectors: int = _for_ray(64)
    """So many collectors at most, with num_collectors="auto"."""
    address: str | None = _for_ray(None)
    """Of the Ray cluster; by default the one that this process is connected to, or that RAY_ADDRESS
    names, or one on this machine that is started for the collector."""
    ray_init_config: Mapping[str, Any] | None = _for_ray(None)
    """Further arguments of `ray.init`."""
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = _for_ray(None)
    """Options of the actors, for all or one for each collector: `num_cpus` (1 by default),
    `num_gpus`, `memory`, `resources` and whatever else Ray has, but names and restarts."""
    placement: Literal["pack", "spread"] = _for_ray("pack")
    """"spread": actors go to different nodes as far as possible; "pack": Ray's own way, which fills
    nodes up to some point first."""

    @classmethod
    def parse(
        cls,
        owner: str,
        given: Mapping[str, Any],
        scope: Scope = "inline",
        without: Sequence[str] = (),
    ) -> Options:
        """Return the options from keyword arguments, checked.

        Args:
            owner: Name of the class for messages.
            given: The keyword arguments.
            scope: Where its workers run.
            without: Further options that make no sense there.
        """
        known = {f.name: f.metadata.get("scopes", (scope,)) for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            new = _OLD_NAMES.get(name, name)
            if new not in known:
                raise UsageError(
                    f"{owner} has no option {name!r}.{nearest(name, [*known, *_OLD_NAMES])}"
                )
            if new in without:
                raise UsageError(
                    f"{owner} has no option {name!r}: {owner} delivers in another way."
                )
            if scope not in known[new]:
                raise UsageError(f"{owner} has no option {name!r}: it {_SCOPES[known[new][0]]}.")
            if new in values:
                raise UsageError(f"{name!r} is the old name of {new!r}; give only one of them.")
            values[new] = value
        return cls(**values)

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
        self._check_counts()
        self._check_callables()
        self._check_choices()
        self._check_devices()
        self._check_combinations()

    def _check_counts(self) -> None:
        each = self.frames_per_batch
        for frames in each if isinstance(each, (list, tuple)) else [each]:
            _at_least("frames_per_batch", frames, 1, "frames over all envs in a batch")
        _at_least("env_groups", self.env_groups, 1, "")
        _at_least("num_threads", self.num_threads, 1, "")
        _at_least("max_restarts", self.max_restarts, 0, "")
        _at_least("num_workers_per_collector", self.num_workers_per_collector, 1, "")
        _at_least("max_collectors", self.max_collectors, 1, "")
        if self.num_collectors not in (None, "auto"):
            _at_least("num_collectors", self.num_collectors, 1, 'or "auto"')
        _at_least("tcp_port", self.tcp_port, 0, "0 for any that is free")
        if self.tcp_port > 65535:
            raise UsageError(f"tcp_port must be at most 65535; got {self.tcp_port}.")
        _at_least("max_weight_update_interval", self.max_weight_update_interval, -1, "-1: never")
        _at_least("init_random_frames", self.init_random_frames, 0, "")
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least, "or None")
        _at_least("total_frames", self.total_frames, -1, "-1 collects for ever")
        if self.total_frames == 0:
            raise UsageError("total_frames must be at least 1, or -1 to collect for ever; got 0.")

    def _check_callables(self) -> None:
        for name in (
            "postproc",
            "pre_collect_hook",
            "post_collect_hook",
            "policy_factory",
            "init_fn",
        ):
            value = getattr(self, name)
            each = (
                value if name == "policy_factory" and isinstance(value, (list, tuple)) else [value]
            )
            if not all(one is None or callable(one) for one in each):
                raise UsageError(f"{name} must be callable; got {type(value).__name__} {value!r}.")
        if self.replay_buffer is not None and not hasattr(self.replay_buffer, "extend"):
            raise UsageError(
                f"replay_buffer must have a method extend(batch); got "
                f"{type(self.replay_buffer).__name__}."
            )

    def _check_choices(self) -> None:
        for name in (
            "reset_at_each_iter",
            "reset_when_done",
            "split_trajs",
            "set_truncated",
            "compact_obs",
            "cudagraph_policy",
            "update_at_each_batch",
            "progress",
            "collect_ahead",
            "sync",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be True or False; got {value!r}.")
        for name in ("host", "secret"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise UsageError(f"{name} must be some text, or None; got {value!r}.")
        _one_of("traj_format", self.traj_format, ("padded", "cat"))
        _one_of("placement", self.placement, ("pack", "spread"))
        _one_of("memory_order", self.memory_order, ("time", "batch"))
        _one_of("cudagraph", self.cudagraph, (True, False, "auto"))
        _one_of("cat_results", self.cat_results, ("stack", 0, -1))
        _one_of("on_worker_failure", self.on_worker_failure, ("raise", "restart"))
        self._check_reals()
        self.interaction_type  # noqa: B018 - raises if it is none

    def _check_reals(self) -> None:
        for name, most in (
            ("preemptive_threshold", 1.0),
            ("worker_timeout", _LONGEST),
            ("launch_timeout", _LONGEST),
            ("link_timeout", _LONGEST),
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value <= most
            ):
                raise UsageError(f"{name} must be above 0 and at most {most:g}; got {value!r}.")

    def _check_devices(self) -> None:
        for name in ("device", "env_device", "policy_device", "storing_device"):
            given = getattr(self, name)
            for value in given if isinstance(given, (list, tuple)) else [given]:
                _check_device(name, value)

    def _check_combinations(self) -> None:
        """Refuse pairs of options of which one takes away what the other is for."""
        for names, reason in _CLASHES.items():
            if all(getattr(self, name) != _default(name) for name in names):
                raise UsageError(f"{' and '.join(names)} do not go together: {reason}.")
        if self.trajs_per_batch and self.set_truncated and not self.reset_at_each_iter:
            raise UsageError(
                "trajs_per_batch and set_truncated do not go together: what is marked truncated at "
                "the end of a rollout goes on in the next, so parts would pass for whole "
                "trajectories. Leave set_truncated out, or give reset_at_each_iter=True as well, "
                "which ends them there."
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
        value = self.exploration_type
        if isinstance(value, InteractionType):
            return value
        choices = [kind.name.lower() for kind in InteractionType]
        name = value.lower() if isinstance(value, str) else value
        _one_of("exploration_type", name, choices)
        return InteractionType[str(name).upper()]

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
    def assembles(self) -> bool:
        """Trajectories are put together on the host; batches go to where they are stored then."""
        return self.split_trajs or self.trajs_per_batch is not None

    @property
    def compile_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments for `torch.compile`, or None to leave the policy as it is."""
        if isinstance(self.compile_policy, Mapping):
            return dict(self.compile_policy)
        return {} if self.compile_policy else None


def _check_device(name: str, value: Any) -> None:
    if value is None:
        return
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} is {value!r}, which is no torch device.") from error
    there = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    if device.type != "cpu" and not there:
        raise UsageError(f"{name} is {value!r}, and there is no such device here; use 'cpu'.")


def mappings_of(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Return an option that is a mapping for all, or a list with one for each, as a list."""
    each = list(value) if isinstance(value, (list, tuple)) else [{} if value is None else value]
    if not each or not all(isinstance(one, Mapping) and _named(one) for one in each):
        raise UsageError(f"{name} must be a dict of options, or a list of such; got {value!r}.")
    return each


def _named(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in mapping)


def _default(name: str) -> Any:
    return next(f.default for f in fields(Options) if f.name == name)


def _at_least(name: str, value: Any, least: int, remark: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        remark = f" ({remark})" if remark else ""
        raise UsageError(f"{name} must be an int of at least {least}{remark}; got {value!r}.")


def _one_of(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        names = [choice for choice in choices if isinstance(choice, str)]
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise UsageError(
            f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.{hint}"
        )
