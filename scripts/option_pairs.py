"""Try every pair of options of every collector, and write down which go together.

    python scripts/option_pairs.py                         # writes docs/reference/option-pairs.md
    python scripts/option_pairs.py MultiSyncCollector      # this section only; the others stay

Each pair collects a few batches, which `tests/kits/model_kit.py` checks row by row. The collectors
of a cluster, which are tried on request, share one world of ranks or one Ray cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kits"))

import cases_kit  # noqa: E402
import explore_kit  # noqa: E402
import fuzz_kit  # noqa: E402

from swath.collectors.options import Options  # noqa: E402

__all__ = ["LOCAL", "TABLE", "VALUES", "case_of", "options_of", "outcome", "pairs_of", "refusals"]

TABLE = ROOT / "docs" / "reference" / "option-pairs.md"
LOCAL = ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector")
CLUSTER = ("DistributedCollector", "RPCCollector", "RayCollector")
VALUES: dict[str, Any] = {
    "frames_per_batch": 10,
    "total_frames": 40,
    "max_frames_per_traj": 3,
    "init_random_frames": 7,
    "reset_at_each_iter": True,
    "reset_when_done": False,
    "split_trajs": True,
    "trajs_per_batch": 2,
    "traj_format": "cat",
    "exploration_type": "deterministic",
    "set_truncated": True,
    "compact_obs": True,
    "memory_order": "batch",
    "postproc": "marked",
    "pre_collect_hook": "nothing",
    "post_collect_hook": "nothing",
    "replay_buffer": "kept",
    "policy_factory": "made",
    "trust_policy": True,
    "env_groups": 2,
    "compile_policy": {"backend": "eager"},
    "cudagraph": True,
    "cudagraph_policy": True,
    "update_at_each_batch": True,
    "device": "cpu",
    "env_device": "cpu",
    "policy_device": "cpu",
    "storing_device": "cpu",
    "create_env_kwargs": {"longest": 3},
    "seed": 3,
    "progress": True,
    "num_workers": 2,
    "cat_results": 0,
    "preemptive_threshold": 0.5,
    "collect_ahead": True,
    "max_lag": 1,
    "num_threads": 2,
    "init_fn": "nothing",
    "on_worker_failure": "restart",
    "max_restarts": 1,
    "worker_timeout": 30.0,
    "sync": True,
    "collector_class": "sync",
    "num_workers_per_collector": 2,
    "collector_kwargs": {"frames_per_batch": 12},
    "max_weight_update_interval": 2,
    "launch_timeout": 60.0,
    "backend": "rpc",
    "launcher": "mp",
    "slurm_kwargs": {"cluster": "local"},
    "host": "127.0.0.1",
    "tcp_port": 29_871,
    "link_timeout": 30.0,
    "secret": "a secret",
    "visible_devices": [[], []],
    "tensorpipe_options": {"num_worker_threads": 4},
    "num_collectors": 2,
    "max_collectors": 3,
    "address": "local",
    "ray_init_config": {"include_dashboard": False},
    "remote_configs": {"num_cpus": 0.1},
    "placement": "spread",
}
"""A value of each option that is not its default, and that a CPU can try."""
_COMPANIONS = {
    "traj_format": {"trajs_per_batch": 2},
    "num_workers_per_collector": {"collector_class": "sync"},
}
_OF_BATCHES_OF_ALL = {"cat_results": {"sync": True}, "collect_ahead": {"sync": True}}
_IN_A_WORLD = {**_OF_BATCHES_OF_ALL, "on_worker_failure": {"launcher": "mp"}}
_COMPANIONS_OF = {
    "DistributedCollector": _IN_A_WORLD,  # whose ranks cannot be started again
    "RPCCollector": _IN_A_WORLD,
    "RayCollector": _OF_BATCHES_OF_ALL,
}
"""Without which an option is refused whatever stands beside it."""
_SLOW_IN_WORKERS = ("compile_policy",)
"""Tried alone in collectors with workers: each worker would import torch's compiler."""
_SLOW_TO_START = ("RPCCollector", "RayCollector")
"""Of these, pairs are tried of the options that process collectors do not have."""


def options_of(owner: str) -> list[str]:
    """Return the options that a collector has."""
    known = fuzz_kit.collector_class(owner)
    without = set(getattr(known, "_without", ()))
    scope = getattr(known, "_scope", "inline")
    return [
        one.name
        for one in fields(Options)
        if scope in one.metadata.get("scopes", (scope,)) and one.name not in without
    ]


def pairs_of(owner: str) -> list[tuple[str, ...]]:
    """Return each option of a collector alone, and each pair of two."""
    names = options_of(owner)
    if owner in CLUSTER:  # the other pairs are those of the process collectors
        local = {name for one in LOCAL for name in options_of(one)}
        tried = [name for name in names if name not in _SLOW_IN_WORKERS]
        pairs = itertools.combinations(tried, 2)
        most = 0 if owner in _SLOW_TO_START else 1
        return [
            *((name,) for name in tried),
            *(pair for pair in pairs if len(local.intersection(pair)) <= most),
        ]
    others = [name for name in names if owner == "Collector" or name not in _SLOW_IN_WORKERS]
    return [*((name,) for name in names), *itertools.combinations(others, 2)]


def case_of(owner: str, names: tuple[str, ...]) -> cases_kit.Case:
    """Return a small collection with these options."""
    kind, counts = ("list", [2]) if owner in ("Collector", "AsyncCollector") else ("maker", [1, 1])
    envs = {"kind": kind, "counts": counts, "form": "numbers", "action": "discrete", "longest": 5}
    options: dict[str, Any] = {"frames_per_batch": 12}
    companions = {**_COMPANIONS, **_COMPANIONS_OF.get(owner, {})}
    for name in names:
        options.update({**companions.get(name, {}), **options, name: VALUES[name]})
    if "collector_kwargs" in options and "frames_per_batch" not in names:
        del options["frames_per_batch"]
    ops = [("next", 3), ("publish", "own", None, False), ("next", 2), ("partial",)]
    policy = "tensordict" if "trust_policy" in names else "module"
    return cases_kit.Case(owner, envs, policy, options, ops)


@contextlib.contextmanager
def cluster_of(owner: str) -> Iterator[None]:
    """Have what the collectors of a cluster work with; the same for all of them."""
    if owner == "RayCollector":
        import ray_kit

        was_there = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        ray_kit.cluster()
        try:
            yield
        finally:
            if not was_there:
                ray_kit.leave()
    elif owner in CLUSTER:
        with _world():
            yield
    else:
        yield


@contextlib.contextmanager
def _world(ranks: int = 5) -> Iterator[None]:
    """Be rank 0 of a world, as torchrun makes one."""
    from swath.workers import worlds

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_PORT": f"{port}"}
    said |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    serve = "import fuzz_kit; from swath.workers.worlds import find_world; find_world().serve()"
    before = dict(os.environ)
    os.environ.update({**said, "RANK": "0"})
    worlds._find.cache_clear()
    others = []
    try:
        world = worlds.find_world()
        assert world is not None
        for rank in range(1, ranks):
            there = {**before, **said, **paths, "RANK": f"{rank}"}
            others.append(subprocess.Popen([sys.executable, "-c", serve], env=there))
        yield
        atexit.unregister(world._end)
        world._end()
        for other in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(30)
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.environ.clear()
        os.environ.update(before)
        worlds._find.cache_clear()


def outcome(owner: str, names: tuple[str, ...]) -> str:
    """Return "works", "known", the sentence that refuses it, or "FAULT: ..."."""
    case = case_of(owner, names)
    if any(shows(case) for shows in cases_kit.KNOWN.values()):
        return "known"
    seen: Counter[str] = Counter()
    try:
        sentence = fuzz_kit.run(case, seen)
    except (Exception, fuzz_kit.Hangs) as error:
        return f"FAULT: {explore_kit.cause_of(error)}"
    refused = [one.partition(": ")[2] for one in seen if one.startswith("refused ")]
    return _plain(sentence or (refused[0] if refused else "")) or "works"


def _plain(sentence: str) -> str:
    """Return a sentence without what it says of this case alone."""
    sentence = re.sub(r" \[worker \d+\]( \(.*\))?$", "", sentence.replace("|", "/"))
    return re.sub(r"\S+:\d+", "an address", sentence)


# -- the table ------------------------------------------------------------------------------------

_HEAD = """# Which options go together

Written by `scripts/option_pairs.py`, which tries each pair of options of a collector: it collects
a few batches and checks them row by row. A pair either works or is refused, at construction or by
the call that it does not go with, with the sentence given here. Values are those that a CPU can
try; what needs a GPU is refused.
"""


def section(owner: str, found: dict[tuple[str, ...], str]) -> str:
    """Return the part of the page about one collector."""
    alone = {names[0]: said for names, said in found.items() if len(names) == 1}
    pairs = {names: said for names, said in found.items() if len(names) == 2}
    lines = [f"## {owner}", ""]
    single = {name: said for name, said in alone.items() if said not in ("works", "known")}
    if single:
        lines += ["| option | is refused |", "|---|---|"]
        lines += [f"| `{name}` | {said} |" for name, said in single.items()] + [""]
    # What is refused alone is refused with any other: only where that differs is it said again.
    apart = {
        names: said
        for names, said in pairs.items()
        if said not in ("works", "known") and said not in [single.get(name) for name in names]
    }
    works = Counter(pairs.values())["works"]
    if apart:
        lines += ["| option | beside | is refused |", "|---|---|---|", *_grouped(apart), ""]
    known = Counter(found.values())["known"]
    lines += [f"{works} of {len(pairs)} pairs work; the others are refused as said above."]
    if owner in CLUSTER:
        tried = "neither is" if owner in _SLOW_TO_START else "one is not"
        lines += [
            f"These are the pairs of which {tried} an option of `MultiSyncCollector` or "
            "`MultiAsyncCollector`, whose sections have the others."
        ]
    slow = [f"`{name}`" for name in _SLOW_IN_WORKERS if (name,) in found]
    if slow and owner in LOCAL[1:]:
        lines += [f"{', '.join(slow)} was tried alone."]
    lines += [f"{known} were not tried: they show faults that are known."] if known else []
    return "\n".join(lines) + "\n"


def _grouped(apart: dict[tuple[str, ...], str]) -> list[str]:
    """Return a row for each option and sentence, with all that it is refused beside."""
    rows, left = [], dict(apart)
    while left:
        groups: dict[tuple[str, str], set[str]] = defaultdict(set)
        for names, said in left.items():
            for one, other in itertools.permutations(names):
                groups[one, said].add(other)
        (name, said), others = max(groups.items(), key=lambda item: (len(item[1]), item[0]))
        for other in others:
            left.pop((name, other), None)
            left.pop((other, name), None)
        rows.append(f"| `{name}` | {', '.join(f'`{one}`' for one in sorted(others))} | {said} |")
    return sorted(rows)


def sections(text: str) -> dict[str, str]:
    """Return the parts of the page by collector."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: f"## {part}".rstrip("\n") + "\n" for part in parts}


def refusals(owner: str) -> dict[frozenset[str], str]:
    """Return which options and pairs the page says are refused, and with which sentence."""
    found: dict[frozenset[str], str] = {}
    for line in sections(TABLE.read_text()).get(owner, "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = [re.findall(r"`(\w+)`", cell) for cell in cells[:-1]]
        if not line.startswith("| `"):
            continue
        for group in itertools.product(*names):
            found[frozenset(group)] = cells[-1]
    return found


def main(owners: list[str]) -> None:
    """Try all pairs of these collectors, and write what was found."""
    for owner in owners or LOCAL:
        found = {}
        with cluster_of(owner):
            for names in pairs_of(owner):
                found[names] = outcome(owner, names)
                if found[names].startswith("FAULT"):
                    sys.stderr.write(f"{owner} {' and '.join(names)}: {found[names]}\n")
        known = sections(TABLE.read_text()) if TABLE.exists() else {}
        known[owner] = section(owner, found)
        ordered = [known[one] for one in (*LOCAL, *CLUSTER) if one in known]
        TABLE.write_text("\n".join([_HEAD, *ordered]))


if __name__ == "__main__":
    main(sys.argv[1:])
