"""Random collections as plain data: what to collect, how, and what to do on the way.

A case is drawn from its number alone, so that it can be run again and made smaller.
"""

from __future__ import annotations

import importlib.util
import math
import pprint
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from telling_kit import ACTIONS_OF_GYMNASIUM, COUNTING, OF_GYMNASIUM, OF_TEAMS

__all__ = ["KNOWN", "Case", "drawn", "without_one"]


@dataclass(frozen=True)
class Case:
    """One collection."""

    owner: str
    """Class of the collector."""
    envs: dict[str, Any]
    policy: str
    options: dict[str, Any]
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    number: int = -1

    @property
    def inline(self) -> bool:
        return self.owner == "Collector"

    @property
    def counts(self) -> list[int]:
        """How many envs each worker has."""
        return self.envs["counts"]

    @property
    def sync(self) -> bool:
        remote = self.options.get("sync", False)
        return self.owner in ("MultiSyncCollector", "DistributedSyncCollector") or remote

    def get(self, name: str) -> Any:
        return self.options.get(name, _DEFAULTS.get(name))

    def __str__(self) -> str:
        """Return it as an expression."""
        return pprint.pformat(vars(self), width=110, sort_dicts=False)


_DEFAULTS = {"reset_when_done": True, "total_frames": -1, "cat_results": "stack"}


KNOWN: dict[str, Callable[[Case], bool]] = {}
"""Faults that are known and not mended yet, as the cases that may show them: none, for now."""


def without_one(case: Case) -> Iterator[Case]:
    for place in reversed(range(len(case.ops))):
        yield replace(case, ops=case.ops[:place] + case.ops[place + 1 :])
    for name in set(case.options) - {"frames_per_batch", "launcher", "sync"}:
        options = {key: value for key, value in case.options.items() if key != name}
        yield replace(case, options=options)
    if case.policy != "none":
        yield replace(case, policy="none")
    plain = {"form": "numbers", "action": "discrete", "time_limit": None, "reuses": False}
    if case.envs["kind"] == "torchrl":
        plain = {"action": "discrete", "flags": "root"}
    for name, value in plain.items():
        if case.envs.get(name, value) != value:
            yield replace(case, envs={**case.envs, name: value})


# -- drawing cases --------------------------------------------------------------------------------

_POLICIES = "none function module module noisy tensordict recurrent wrapped".split()
_POLICIES += [*COUNTING]
_TORCHRL = ("torchrl",) * (importlib.util.find_spec("torchrl") is not None)
_SINGLE = ("maker", "object", "gymenv")
_INLINE = (*_SINGLE, *"list serial serials next same disabled stubborn parallel".split())
_INLINE += _TORCHRL * 3


def _drawn_envs(r: random.Random, kinds: tuple[str, ...], workers: int) -> dict[str, Any]:
    kind = r.choice(kinds)
    if kind == "torchrl":
        return _drawn_teams(r, workers)
    count = 1 if kind in _SINGLE else r.randint(2, 5)
    counts = [count] * workers
    if workers > 1 and r.random() < 0.2:
        counts = [r.randint(1, 3) for _ in counts]
    if workers > 1 and kind == "maker" and r.random() < 0.3:
        counts = [2] * workers
    return {
        "kind": kind,
        "counts": counts,
        "form": r.choice(["numbers"] * 4 + list(OF_GYMNASIUM)),
        "action": r.choice(["discrete"] * 4 + list(ACTIONS_OF_GYMNASIUM)),
        "longest": r.choice([1, 2, 3, 5, 7, 7]),
        "time_limit": r.choice([None, None, None, 1, 2, 4]),
        # Gymnasium's vector env keeps the last observation as it is, and resets the env then.
        "reuses": r.random() < 0.2 and kind != "same",
        "info": kind in ("gymenv", "serial", "parallel") and r.random() < 0.3,
        "processes": r.choice([None, 1, 2]),
    }


def _drawn_teams(r: random.Random, workers: int) -> dict[str, Any]:
    lead = r.choice([(), (), (1,), (3,), (2, 2), (2, 1, 2)])
    joined = r.choice(["alone", "alone", "list", "parallel"]) if workers == 1 else "alone"
    if joined != "alone":
        lead = lead[:1] if joined == "list" else ()
    several = 1 if joined == "alone" else 2
    return {
        "kind": "torchrl",
        "joined": joined,
        "lead": lead,
        "counts": [math.prod(lead) * several] * workers,
        "form": "teams",
        "action": r.choice(OF_TEAMS),
        "longest": r.choice([1, 2, 3, 5, 7, 7]),
        "flags": r.choice(["root", "root", "agents", "both"]),
    }


_RARE: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "total_frames": (0.4, lambda r: r.randint(1, 150)),
    "max_frames_per_traj": (0.3, lambda r: r.randint(1, 6)),
    "init_random_frames": (0.25, lambda r: r.randint(1, 60)),
    "reset_at_each_iter": (0.15, lambda r: True),
    "reset_when_done": (0.08, lambda r: False),
    "split_trajs": (0.15, lambda r: True),
    "trajs_per_batch": (0.2, lambda r: r.randint(1, 4)),
    "set_truncated": (0.12, lambda r: True),
    "compact_obs": (0.15, lambda r: True),
    "memory_order": (0.2, lambda r: "batch"),
    "env_groups": (0.08, lambda r: r.randint(1, 2)),
    "seed": (0.6, lambda r: r.randint(0, 10_000)),
    "update_at_each_batch": (0.25, lambda r: True),
    "exploration_type": (0.2, lambda r: r.choice(["deterministic", "mode", "mean"])),
    "postproc": (0.1, lambda r: "marked"),
    "pre_collect_hook": (0.1, lambda r: "nothing"),
    "post_collect_hook": (0.1, lambda r: "nothing"),
    "replay_buffer": (0.15, lambda r: r.choice(["kept", *_TORCHRL])),
    "policy_factory": (0.1, lambda r: "made"),
    "create_env_kwargs": (0.1, lambda r: {"longest": r.randint(1, 7)}),
    "storing_device": (0.1, lambda r: "cpu"),
    "device": (0.1, lambda r: "cpu"),
}
_RARE_OF_WORKERS: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "cat_results": (0.4, lambda r: r.choice([0, -1])),
    "preemptive_threshold": (0.2, lambda r: r.choice([0.3, 0.5, 0.9, 1.0])),
    "collect_ahead": (0.25, lambda r: True),
    "max_lag": (0.4, lambda r: r.randint(0, 3)),
    "on_worker_failure": (0.3, lambda r: "restart"),
    "worker_timeout": (0.1, lambda r: 30.0),
    "num_threads": (0.1, lambda r: 2),
    "init_fn": (0.1, lambda r: "nothing"),
}
_REMOTE = {"DistributedCollector": {"launcher": "mp"}, "RayCollector": {}}
_NOT_OF = {
    "MultiSyncCollector": {"max_lag"},
    "MultiAsyncCollector": {"cat_results", "preemptive_threshold", "collect_ahead"},
    "AsyncCollector": {"cat_results", "preemptive_threshold", "collect_ahead"},
}


def _drawn_options(r: random.Random, owner: str, envs: dict[str, Any]) -> dict[str, Any]:
    rare = {**_RARE, **({} if owner == "Collector" else _RARE_OF_WORKERS)}
    without = _NOT_OF.get(owner, set())
    if envs["kind"] not in ("maker", "object"):
        without = {*without, "create_env_kwargs"}
    number, remote = sum(envs["counts"]), owner in _REMOTE
    sync = owner == "MultiSyncCollector" or (remote and r.random() < 0.5)
    if remote:
        without = _NOT_OF["MultiSyncCollector" if sync else "MultiAsyncCollector"] | without
    steps = r.choice([1, 2, 3, 5, 8, 13])
    first_come = owner not in ("Collector", "AsyncCollector") and not sync
    frames: Any = steps * (max(envs["counts"]) if first_come else number)
    if not first_come and r.random() < 0.1:
        frames = r.randint(1, 40)
    if sync and r.random() < 0.1:
        frames = [r.randint(1, 8) * count for count in envs["counts"]]
    options: dict[str, Any] = {"frames_per_batch": frames, **_REMOTE.get(owner, {})}
    if remote:
        options["sync"] = sync
    for name, (chance, value) in rare.items():
        drawn = value(r)
        if r.random() < chance * 0.8 and name not in without:
            options[name] = drawn
    if "trajs_per_batch" in options and r.random() < 0.5:
        options["traj_format"] = "cat"
    return _fitting(options, number)


def _fitting(options: dict[str, Any], number: int) -> dict[str, Any]:
    """Return options that go with one another."""
    if options.get("on_worker_failure") == "restart":
        options["max_restarts"] = 50
    if options.get("replay_buffer") != "torchrl":
        return options
    # A row of TorchRL's storages has a fixed length, and a table of last observations no place.
    for name in ("total_frames", "preemptive_threshold", "split_trajs", "compact_obs"):
        options.pop(name, None)
    if isinstance(options["frames_per_batch"], list):
        options["frames_per_batch"] = 4 * number
    return options


def _drawn_op(r: random.Random, case: Case) -> tuple[Any, ...]:
    names = "next next next next iterate iterate reset set_seed rollout resume partial publish"
    names += " publish pause len drop scribble hold hold save episodes reset_some"
    if case.get("on_worker_failure") == "restart":
        names += " kill kill kill"
    if case.inline:
        names += " fail fail"
    name = r.choice(names.split())
    workers = None if r.random() < 0.7 else r.randrange(len(case.counts))
    arguments: dict[str, tuple[Any, ...]] = {
        "next": (r.randint(1, 4),),
        "iterate": (r.randint(1, 3),),
        "hold": (r.randrange(10**6),),
        "reset_some": (
            r.randrange(1, 2 ** (sum(case.counts) if case.inline else len(case.counts))),
        ),
        "set_seed": (r.randint(20_000, 10**9),),
        "resume": (r.choice(["same", "fresh", "begun"]), r.randint(1, 4), r.random() < 0.3),
        "publish": (r.choice(["own", "module", "state_dict"]), workers, r.random() < 0.3),
        "fail": (r.randint(0, 40), r.random() < 0.3),
        "kill": (r.randrange(8), r.choice([0.0, 0.001, 0.003, 0.01, 0.03])),
    }
    return (name, *arguments.get(name, ()))


def drawn(owners: tuple[str, ...], number: int) -> Case:
    """Return the case of this number, of one of these collectors."""
    r = random.Random(f"{owners} {number}")
    owner = r.choice(owners)
    if owner == "Collector":
        envs = _drawn_envs(r, _INLINE, 1)
    elif owner == "AsyncCollector":
        envs = _drawn_envs(r, ("maker", "list"), 1)
    else:
        kinds = ("maker", "listed", "serial") * 2 + _TORCHRL  # whose workers import it first
        envs = _drawn_envs(r, kinds, r.randint(1, 3))
    case = Case(owner, envs, r.choice(_POLICIES), _drawn_options(r, owner, envs), [], number)
    if case.policy == "none":
        case.options.pop("policy_factory", None)
    ops = [_drawn_op(r, case) for _ in range(r.randint(1, 9))]
    resumable = case.get("on_worker_failure") != "restart" and owner != "RayCollector"
    case.ops.extend(op for op in ops if op[0] != "resume" or resumable)
    case.ops.append(("next", 2))
    return case
