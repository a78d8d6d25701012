"""The same seed gives the same data, over whatever class, kind of envs and number of workers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import cases_kit
import explore_kit
import fuzz_kit
import pytest
from model_kit import by_env, demand
from telling_kit import ACTIONS_OF_GYMNASIUM, OF_GYMNASIUM

pytestmark = pytest.mark.fuzz

_KINDS = ("list", "serial", "serials", "next", "same", "disabled", "parallel")
_OPTIONS = {
    "max_frames_per_traj": lambda r: r.randint(1, 6),
    "set_truncated": lambda r: True,
    "reset_at_each_iter": lambda r: True,
    "split_trajs": lambda r: True,
    "memory_order": lambda r: "batch",
    "total_frames": lambda r: r.randint(30, 100),
    "init_random_frames": lambda r: r.randint(8, 40),
}


def drawn(number: int) -> cases_kit.Case:
    """Return what a list of envs collects, and in `envs["others"]` who is to collect the same."""
    r = random.Random(f"same {number}")
    count, steps = r.choice([2, 4, 6]), r.randint(1, 9)
    options = {"seed": r.randrange(10**6), "frames_per_batch": count * steps}
    options.update({name: draw(r) for name, draw in _OPTIONS.items() if r.random() < 0.25})
    envs = {
        "kind": "list",
        "counts": [count],
        "form": r.choice(OF_GYMNASIUM),
        "action": r.choice(ACTIONS_OF_GYMNASIUM),
        "longest": r.randint(1, 7),
        "time_limit": None if "max_frames_per_traj" in options else r.choice([None, 3]),
        "others": r.sample(_KINDS[1:], 2) + r.sample(["sync", "async", "one"], 1),
    }
    if "async" in envs["others"] and {"set_truncated", "reset_at_each_iter"} & set(options):
        # Who of several workers makes the last, shorter rollout is a matter of who comes first.
        options.pop("total_frames", None)
    policy = r.choice(["none", "function", "module", "recurrent"])
    return cases_kit.Case("Collector", envs, policy, options, [("next", 4)], number)


def other(case: cases_kit.Case, name: str) -> cases_kit.Case:
    """Return the same collection in another way."""
    (count,) = case.counts
    if name in _KINDS:
        return replace(case, envs={**case.envs, "kind": name})
    workers = {"sync": 2, "async": 2, "one": 1}[name]
    kind = "listed" if name != "one" else "list"
    envs = {**case.envs, "kind": kind, "counts": [count // workers] * workers}
    options = dict(case.options)
    if name == "async":
        options["frames_per_batch"] //= workers
    owner = {"sync": "MultiSync", "async": "MultiAsync", "one": "Async"}[name] + "Collector"
    return replace(case, owner=owner, envs=envs, options=options)


def collected(case: cases_kit.Case, seen: Counter[str]) -> dict[int, list[object]]:
    """Return the rows of each env."""
    with fuzz_kit.deadline(fuzz_kit.patience()), fuzz_kit.Run(case, seen) as running:
        for op in case.ops:
            running.do(op)
        batches = [batch for batch, _ in running.kept]
        return by_env(case.envs["form"], batches, [("collector", "traj_ids"), "noise"])


def judge(case: cases_kit.Case, seen: Counter[str]) -> None:
    """Demand the same rows of each env, as far as both have them, and all but of who is async."""
    expected = collected(case, seen)
    for name in case.envs["others"]:
        same = other(case, name)
        if any(shows(same) for shows in cases_kit.KNOWN.values()):
            continue
        if name in ("next", "same", "disabled") and case.policy == "recurrent":
            continue
        try:
            got = collected(same, seen)
        except fuzz_kit.UsageError as error:
            seen[f"refused: {fuzz_kit.sentence_of(error)}"] += 1
            continue
        demand(name == "async" or set(got) == set(expected), f"{name}: other envs")
        for stamp, rows in got.items():
            pairs = zip(rows, expected.get(stamp, []), strict=name != "async")
            for number, (one, two) in enumerate(pairs):
                keys = [key for key in two if one.get(key) != two[key]]
                demand(not keys, f"{name}: row {number} of env {stamp} differs in {keys}")


@pytest.mark.timeout(1.5 * explore_kit.SECONDS + 120)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_same_seed_gives_the_same_data_whoever_collects():
    found = explore_kit.explore(drawn, explore_kit.SECONDS or 4, judge)
    print(found)  # noqa: T201 - with -s, how much was tried
    assert not found.faults, str(found)
