"""What the workers of a collector are to be: who makes which envs, with which policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import swath
from swath.collectors.options import Options
from swath.collectors.values import mappings_of
from swath.envs import is_env
from swath.envs.registry import pack_registered
from swath.errors import UsageError
from swath.links import pack
from swath.memory.weights import named_weights
from swath.policies import MadeWith, policy_module
from swath.system import usable_cpus
from swath.workers.messages import Job, Ready

__all__ = [
    "check_entries",
    "check_equal",
    "each_of",
    "jobs_of",
    "node_options",
    "sources_of",
    "split",
]

_CLASSES = {
    "Collector": "single",
    "MultiSyncCollector": "sync",
    "MultiAsyncCollector": "async",
    "AsyncCollector": "async",
}
_NODES = ("single", "sync", "async")


def node_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those of `collector_kwargs` among them: for all nodes, or for each."""
    options, differing = dict(given), []
    each = mappings_of("collector_kwargs", options.get("collector_kwargs"))
    for name in dict.fromkeys(name for one in each for name in one):
        if name in options:
            raise UsageError(f"{name!r} is given twice: among the options and in collector_kwargs.")
        values = [one.get(name) for one in each]
        alike = all(value is values[0] or value == values[0] for value in values)
        options[name] = values[0] if alike else values
        differing += [] if alike else [name]
    options.pop("collector_kwargs", None)
    workers = _workers_of_a_node(options)
    for name in differing if isinstance(workers, int) else []:
        options[name] = [value for value in options[name] for _ in range(workers)]
    return options


def _workers_of_a_node(options: Mapping[str, Any]) -> Any:
    """Return `num_workers_per_collector`, unchecked but for what goes with `collector_class`."""
    said = {name: value for name, value in options.items() if value is not None}
    given = said.get("collector_class", "single")
    name = getattr(given, "__name__", given)
    kind = _CLASSES.get(name, name) if isinstance(name, str) else None
    if kind not in _NODES:
        raise UsageError(
            f"collector_class must be one of {', '.join(_NODES)} or a collector; got {given!r}."
        )
    workers = said.get("num_workers_per_collector", 1)
    if kind == "single" and isinstance(workers, int) and workers > 1:
        raise UsageError(
            "num_workers_per_collector needs collector_class='sync' or 'async': a node with "
            "collector_class='single' has one worker."
        )
    return workers


def check_entries(name: str, value: Any, count: int | None) -> None:
    """Refuse a list with other than one entry for all nodes, or one for each.

    Args:
        name: Of the option.
        value: Of the option, which may be no list.
        count: How many nodes there are; None if that depends on the cluster.
    """
    if isinstance(value, (list, tuple)) and len(value) not in (1, count):
        nodes = (
            "as many collectors as there is room for" if count is None else f"{count} collectors"
        )
        raise UsageError(
            f"{name} has {len(value)} entries for {nodes}; give one entry for all or one for each."
        )


def sources_of(create_env_fn: Any, num_workers: int | None, name: str = "num_workers") -> list[Any]:
    """Return what each worker makes its envs from; `name` is what their number is called."""
    if isinstance(create_env_fn, (list, tuple)):
        if num_workers not in (None, len(create_env_fn)):
            raise UsageError(
                f"{name} is {num_workers}, but {len(create_env_fn)} env makers were given, one "
                f"for each worker. Leave {name} out, or pass one maker."
            )
        sources = list(create_env_fn)
    else:
        sources = [create_env_fn] * (num_workers or usable_cpus())
    for one in _flat(sources):
        if not (is_env(one) or isinstance(one, str) or callable(one)):
            raise UsageError(
                f"the envs are {one!r}; workers make their own, so pass an id, a callable that "
                "makes an env, or a list of these with one entry for each worker."
            )
    if not sources:
        raise UsageError("the list of env makers is empty; it needs one entry for each worker.")
    return sources


def _flat(makers: Sequence[Any]) -> Iterator[Any]:
    for maker in makers:
        if isinstance(maker, (list, tuple)):
            yield from _flat(maker)
        else:
            yield maker


def jobs_of(sources: Sequence[Any], policy: Any, options: Options, refreshes: bool) -> list[Job]:
    """Return what each worker is to be, packed."""
    count = len(sources)
    makes_policy = options.policy_factory is not None
    policies = each_of("policy_factory", options.policy_factory if makes_policy else policy, count)
    if makes_policy and (module := policy_module(policy)) is not None:
        weights = {name: value.detach().cpu() for name, value in named_weights(module).items()}
        made = {id(factory): MadeWith(factory, weights) for factory in policies}
        policies = [made[id(factory)] for factory in policies]
    kwargs = each_of("create_env_kwargs", options.create_env_kwargs, count)
    for name in ("device", "env_device", "policy_device", "storing_device"):
        each_of(name, getattr(options, name), count)
    init_fn, registered = pack(options.init_fn, "init_fn"), pack_registered()
    parcels: dict[int, bytes] = {}  # the same object is packed once

    def packed(thing: Any, name: str) -> bytes:
        return parcels.get(id(thing)) or parcels.setdefault(id(thing), pack(thing, name))

    return [
        Job(
            number=number,
            envs=packed(sources[number], "create_env_fn"),
            copies_envs=any(is_env(one) for one in _flat([sources[number]])),
            env_kwargs=packed(kwargs[number], "create_env_kwargs"),
            policy=packed(policies[number], "policy_factory" if makes_policy else "policy"),
            init_fn=init_fn,
            registered=registered,
            makes_policy=makes_policy,
            num_threads=options.num_threads,
            quiet=swath.filter_warnings_subprocess,
            refreshes=refreshes,
        )
        for number in range(count)
    ]


def each_of(name: str, value: Any, count: int) -> list[Any]:
    """Return the value of an option for each worker: one for all, or a list of them."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise UsageError(f"{name} has {len(value)} entries for {count} workers.")
    return list(value)


def split(total: int, firsts: Sequence[int], envs: Sequence[int]) -> list[int]:
    """Share the first frames of all envs, in order of time and then of env, among workers."""
    steps, rest = divmod(total, sum(envs))
    pairs = zip(firsts, envs, strict=True)
    return [steps * count + min(max(rest - first, 0), count) for first, count in pairs]


def check_equal(first: Ready, other: Ready, number: int) -> None:
    """Refuse workers whose rollouts cannot be put together."""
    if list(first.fields) != list(other.fields):
        ours, theirs = ({(f.key, f.shape, f.dtype) for f in r.fields} for r in (first, other))
        raise UsageError(
            f"worker {number} collects other data than worker 0: it has "
            f"{sorted(theirs - ours, key=str)}, worker 0 has {sorted(ours - theirs, key=str)}. "
            "All workers need envs with equal spaces, and equal policies."
        )
    if first.weights != other.weights:
        raise UsageError(f"the policy of worker {number} has other weights than that of worker 0.")
