"""The table of TorchRL, continued: how the methods of a collector are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from swath.collectors.torchrl_attributes import WITH_WORKERS, is_alone, one_env
from swath.collectors.translation import Attribute, Call, Method, Row
from swath.envs import is_env
from swath.errors import UsageError, nearest
from swath.rollout import Filled, keys

__all__ = ["ARGUMENTS", "METHODS", "NotHereError"]


class NotHereError(UsageError, NotImplementedError):
    """A method of TorchRL's collectors that swath's do not have; it says what to write instead."""


# -- methods that swath has not -------------------------------------------------------------------


def _zeros(collector: Any) -> Any:
    """Return a batch like those that will be delivered, all zero; no env is stepped."""
    if collector._assembler is not None:
        raise NotHereError(
            "with trajs_per_batch the length of the trajectories in a batch is not known in "
            "advance, so there is no fake_tensordict(). Look at the first batch, or leave "
            "trajs_per_batch out."
        )
    runner = collector._runner
    slab = runner.pool.make()
    for column in slab.tensors.values():
        column.zero_()
    batch = runner.view(Filled(slab, runner.plan.steps, 0)).clone()
    if runner.plan.set_truncated or runner.plan.reset_at_each_iter:
        for key in (keys.NEXT_TRUNCATED, keys.NEXT_DONE):
            batch[key][..., -1, :] = True
    return collector._output.finishing(batch.to(runner.devices[2]))


_NO_FAKE = (
    "the envs are in the workers, so there is no fake_tensordict() here; use the first batch: "
    "collector.next().clone().zero_()."
)
_NO_PROFILE = (
    "swath runs no profiler itself. Put torch.profiler.profile() around the iteration; "
    'stats()["time"] says which shares of the time go to the envs and to the policy.'
)


def _refused(says: str) -> Callable[..., NoReturn]:
    """Return a method that does nothing but say what to write instead."""

    def call(collector: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotHereError(says)

    return call


def _no_remote(name: str) -> Callable[[Any], Any]:
    def read(collector: Any) -> NoReturn:
        raise AttributeError(
            f"RayCollector has no {name}: its actors are swath's own workers. map_fn(function) "
            "calls a function in each of them, with its envs and its policy; the attribute "
            "policy is the one of this process."
        )

    return read


def _set_hook(collector: Any, hook: Any) -> None:
    collector.post_collect_hook = hook


def _frames_of_worker(collector: Any, *, worker_idx: int | None = None) -> int:
    plan = collector._plans[worker_idx or 0]
    return int(plan.steps * collector._envs[worker_idx or 0])


def _model(collector: Any, model_id: str) -> Any:
    if model_id != "policy":
        raise UsageError(f"a collector has one model, 'policy'; got {model_id!r}.")
    return collector._policy


def _of_env(collector: Any, attr: str) -> Any:
    return _first(collector, f"env.{attr}")


def _of_policy(collector: Any, attr: str) -> Any:
    return _first(collector, f"policy.{attr}")


def _first(collector: Any, path: str) -> Any:
    found = collector.get_distant_attr(path)
    return found if is_alone(collector) else found[0]


METHODS: tuple[Row, ...] = (
    Method(name="iterator", call=iter, says="The same as `iter(collector)`."),
    Method(
        name="increment_version",
        call=lambda collector: collector.update_policy_weights_(),
        says="The same as `update_policy_weights_()`, which increases the version.",
    ),
    Method(name="get_policy_version", call=lambda collector: collector.policy_version),
    Method(name="set_post_collect_hook", call=_set_hook),
    Method(name="fake_tensordict", call=_zeros, owners=("Collector",)),
    Method(
        name="fake_tensordict",
        call=_refused(_NO_FAKE),
        owners=WITH_WORKERS,
        outcome="refused",
        says=_NO_FAKE,
    ),
    Method(name="getattr_env", call=_of_env, says="With workers, of the first."),
    Method(name="getattr_policy", call=_of_policy, says="With workers, of the first."),
    Method(
        name="getattr_rb",
        call=lambda collector, attr: getattr(collector.options.replay_buffer, attr),
    ),
    Method(name="get_model", call=_model),
    Method(name="frames_per_batch_worker", call=_frames_of_worker, owners=WITH_WORKERS),
    *(
        Method(
            name=name,
            call=_refused(_NO_PROFILE),
            outcome="refused",
            says=_NO_PROFILE,
        )
        for name in ("enable_profile", "disable_profile")
    ),
    *(
        Attribute(
            name=name,
            read=_no_remote(name),
            owners=("RayCollector",),
            outcome="refused",
            says="use map_fn(function), which calls a function in each actor.",
        )
        for name in ("remote_collectors", "local_policy")
    ),
)

# -- other arguments of methods that swath has ----------------------------------------------------


def _update(
    collector: Any, call: Callable[..., int], policy_or_weights: Any = None, **more: Any
) -> int:
    names = ("policy_weights", "weights", "policy", "weights_dict")
    given = {"policy_or_weights": policy_or_weights}
    given |= {name: more.pop(name) for name in names if name in more}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise UsageError(f"weights are given as {' and as '.join(given)}; give only one of them.")
    model, by_model = more.pop("model_id", None), given.get("weights_dict", {})
    _check_models([*by_model, *([] if model is None else [model])])
    source = by_model["policy"] if by_model else next(iter(given.values()), None)
    schemes = collector.options.without_effect.get("weight_sync_schemes") or {}
    if type(schemes.get("policy")).__name__ == "NoWeightSyncScheme":
        return int(collector.policy_version)
    if is_alone(collector):
        more.pop("worker_ids", None)
    if isinstance(source, dict) and len(source) and all(type(key) is int for key in source):
        return _update_each(collector, call, source, more)
    return call(source, **more)


def _check_models(names: Sequence[str]) -> None:
    others = sorted({name for name in names if name != "policy"})
    if others:
        raise UsageError(
            f"swath publishes the weights of the policy; change {others} in the workers by map_fn."
        )


def _update_each(
    collector: Any, call: Callable[..., int], weights: Mapping[int, Any], more: dict[str, Any]
) -> int:
    """Publish to each worker weights of its own, each as a version of its own."""
    if "worker_ids" in more:
        raise UsageError(
            "a dictionary of weights by worker already names the workers; leave out worker_ids."
        )
    if is_alone(collector):
        if set(weights) != {0}:
            raise UsageError(
                "this collector has no workers; only 0 (itself) may be named, but got "
                f"{sorted(weights)}."
            )
        return call(weights[0], **more)
    unknown = sorted(set(weights) - set(collector._numbers))
    if unknown:
        raise UsageError(f"workers {unknown} do not exist; workers are {collector._numbers}.")
    return [call(one, worker_ids=[worker], **more) for worker, one in weights.items()][-1]


def _stats(
    collector: Any, call: Callable[[], dict[str, Any]], workers: str = "aggregate", **more: Any
) -> dict[str, Any]:
    _drop("stats", more, "timeout")
    if workers not in ("aggregate", "per_worker", "both"):
        raise UsageError(
            f"workers must be one of aggregate, per_worker, both; got {workers!r}."
            f"{nearest(str(workers), ('aggregate', 'per_worker', 'both'))}"
        )
    stats = call()
    rows = stats.get("per_worker", ()) if workers != "aggregate" else ()
    flat = {f"worker_{row['worker']}/{key}": one for row in rows for key, one in row.items()}
    if workers == "per_worker":
        stats = {key: one for key, one in stats.items() if key in ("workers", "workers_alive")}
    return {**stats, **flat}


def _ray_stats(collector: Any, call: Callable[[], dict[str, Any]], *args: Any, **more: Any) -> Any:
    plain = call()
    frames = sum(row["frames"] for row in plain["per_worker"])
    return {**_stats(collector, lambda: plain, *args, **more), "worker_frames": frames}


def _drop(method: str, more: dict[str, Any], *names: str) -> None:
    """Drop arguments that have no effect; refuse others."""
    for name in names:
        more.pop(name, None)
    if more:
        raise TypeError(f"{method}() got an unexpected keyword argument {next(iter(more))!r}")


def _shutdown(
    collector: Any,
    call: Callable[..., None],
    timeout: float | None = 5.0,
    close_env: bool = True,
    raise_on_error: bool = True,
    **more: Any,
) -> None:
    _drop("shutdown", more, "shutdown_ray")
    try:
        call(timeout, close_env)
    except UsageError:
        raise
    except Exception:
        if raise_on_error:
            raise


def _without(*names: str) -> Callable[..., Any]:
    """Return what calls a method without arguments that have no effect."""

    def called(collector: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **{name: one for name, one in kwargs.items() if name not in names})

    return called


def _load(collector: Any, call: Callable[..., Any], state: Any, strict: bool = True) -> Any:
    return call(state)


def _add(collector: Any, call: Callable[[Any], None], *args: Any, **kwargs: Any) -> None:
    others = [*kwargs] if not args else ["a maker" for _ in args[1:]] + [*kwargs]
    others = [name for name in others if name not in ("num_collectors", "num_envs")]
    count = kwargs.get("num_collectors", kwargs.get("num_envs", args[0] if args else None))
    if others or callable(count):
        raise UsageError(
            "add_collectors takes only a count: new collectors have the env makers, policy and "
            "options of the existing ones."
        )
    call(count)


def _map(
    collector: Any,
    call: Callable[[Any], list[Any]],
    function: Any = None,
    list_of_args: Sequence[Any] | None = None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    *,
    method_name: str | None = None,
) -> list[Any]:
    function = method_name if function is None else function
    if not isinstance(function, str):
        return call(function)
    return _map_text(collector, function, list_of_args, list_of_kwargs)


def _map_text(
    collector: Any,
    path: str,
    list_of_args: Sequence[Any] | None = None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Call what a path names: with each of the arguments here, or with its own in each worker."""
    given = list_of_args if list_of_kwargs is None else list_of_kwargs
    count = 1 if given is None else len(given)
    count = count if is_alone(collector) else collector.num_workers
    lengths = [len(each) for each in (list_of_args, list_of_kwargs) if each is not None]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"list_of_args and list_of_kwargs must have the same length; got {lengths}."
        )
    all_args = [()] * count if list_of_args is None else list(list_of_args)
    all_kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
    for name, entries in (("list_of_args", all_args), ("list_of_kwargs", all_kwargs)):
        if len(entries) != count:
            raise UsageError(
                f"{name} must have {count} entries, one for each "
                f"{'call' if is_alone(collector) else 'worker'}; got {len(entries)}."
            )
    asked = [
        _Asked(path, tuple(args), dict(kwargs), called=True)
        for args, kwargs in zip(all_args, all_kwargs, strict=True)
    ]
    return _ask(collector, asked)


def _distant(collector: Any, call: Callable[[str], Any], attr: str) -> Any:
    count = 1 if is_alone(collector) else collector.num_workers
    found = _ask(collector, [_Asked(attr) for _ in range(count)])
    return found[0] if is_alone(collector) else found


class _Asked:
    """What is asked of each worker, by the path to it: an attribute, or what a call returns."""

    def __init__(
        self, path: str, args: tuple[Any, ...] = (), kwargs: Any = None, called: bool = False
    ) -> None:
        if path == "get_distant_attr" and called and args:
            path, args, called = str(args[0]), (), False
        self.path, self.args, self.kwargs, self.called = path, args, kwargs or {}, called

    @property
    def is_there(self) -> bool:
        """Whether only a worker can answer."""
        return self.path.split(".")[0] in ("env", "envs", "policy", "worker", "worker_idx")

    def __call__(self, about: Any) -> tuple[str, Any]:
        """Answer in a worker; what is missing is told, since the worker itself is well."""
        start: dict[str, Any] = {"worker_idx": about.worker, "worker": about.worker}
        start |= {"envs": about.envs, "policy": about.policy, "env": _env_among(about.envs)}
        first, *names = self.path.split(".")
        try:
            return "found", self.answer(start[first], names)
        except AttributeError as error:
            return "missing", str(error)

    def answer(self, value: Any, names: Sequence[str]) -> Any:
        """Follow the path from a value, and call what is there if that is asked for."""
        for name in names:
            value = getattr(value, name)
        if not self.called or not (callable(value) or self.args or self.kwargs):
            return value  # an attribute was asked for, though by the name of a call
        return value(*self.args, **self.kwargs)


def _env_among(envs: Sequence[Any]) -> Any:
    """Return the one env of a worker, or all of them; a group stands for what it steps."""
    if len(envs) > 1:
        return list(envs)
    return envs[0] if is_env(envs[0]) else one_env(envs[0])


def _ask(collector: Any, asked: Sequence[_Asked]) -> list[Any]:
    """Return the answer to each question: of the collector, or of worker after worker."""
    if is_alone(collector):
        return [one.answer(collector, one.path.split(".")) for one in asked]
    if not all(one.is_there for one in asked):
        return [_of_worker(collector, place, one) for place, one in enumerate(asked)]
    answers = collector._call_each(asked)
    for how, value in answers:
        if how == "missing":
            raise AttributeError(value)
    return [value for _, value in answers]


def _of_worker(collector: Any, place: int, one: _Asked) -> Any:
    """Answer here what this process knows of a worker."""
    if one.is_there:
        return _ask(collector, [one] * collector.num_workers)[place]
    if one.path == "stats" and one.called:
        row: dict[str, Any] = collector.stats()["per_worker"][place]
        return row
    if one.path == "frames_per_batch":
        return _frames_of_worker(collector, worker_idx=collector._numbers[place])
    return one.answer(collector, one.path.split("."))


_PATHS = (
    "A string names a method or an attribute: of the collector, or of its `env`, `policy`, "
    "`replay_buffer` or `worker_idx`."
)
ARGUMENTS: tuple[Row, ...] = (
    Call(
        name="update_policy_weights_",
        call=_update,
        outcome="translated",
        says="It also takes `policy_weights`, `weights`, `policy`, `weights_dict`, `model_id` "
        "and `{worker: weights}`; the only model is `policy`. `Collector` ignores "
        "`worker_ids`. It returns the version.",
    ),
    Call(
        name="stats",
        call=_ray_stats,
        owners=("RayCollector",),
        outcome="translated",
        says="As those of the others; `worker_frames` is the sum over all workers, too.",
    ),
    Call(
        name="stats",
        call=_stats,
        outcome="translated",
        says='With `workers="both"` or `"per_worker"` the values of the workers have keys such as '
        "`worker_0/frames`; `timeout` has no effect.",
    ),
    Call(
        name="shutdown",
        call=_shutdown,
        outcome="translated",
        says="`raise_on_error=False` ignores errors while closing; `shutdown_ray` has no effect.",
    ),
    Call(
        name="async_shutdown",
        call=_shutdown,
        outcome="translated",
        says="As `shutdown`.",
    ),
    Call(
        name="load_state_dict",
        call=_load,
        outcome="translated",
        says="It only takes states of swath. `strict` has no effect, since a state is always "
        "complete.",
    ),
    Call(name="map_fn", call=_map, outcome="translated", owners=WITH_WORKERS, says=_PATHS),
    Call(
        name="get_distant_attr",
        call=_distant,
        outcome="translated",
        owners=WITH_WORKERS,
        says="A path may also begin with `worker_idx`, `env` or `replay_buffer`.",
    ),
    Method(name="map_fn", call=_map_text, owners=("Collector",), says=_PATHS),
    Method(
        name="get_distant_attr",
        call=lambda collector, attr: _distant(collector, str, attr),
        owners=("Collector",),
    ),
    Call(
        name="pause",
        call=_without("timeout", "resume"),
        outcome="translated",
        says="It returns when the current batch is complete, however long that takes; `timeout` "
        "has no effect.",
    ),
    Call(
        name="add_collectors",
        call=_add,
        owners=("RayCollector",),
        outcome="translated",
        says="`num_envs` is the number of new collectors, which are made like the existing ones.",
    ),
)
