"""`Collector(num_collectors=, backend=, sync=)` and `MultiCollector(sync=)` open what they name."""

from __future__ import annotations

import pytest

import swath.collectors as names
from swath.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    distributed,
)
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions

OPTIONS = {"frames_per_batch": 20, "total_frames": 40, "seed": 1}


@pytest.mark.parametrize(
    ("makers", "named", "kind", "workers"),
    [
        (CountingEnv, {"num_collectors": 2, "sync": True}, MultiSyncCollector, 2),
        (CountingEnv, {"num_collectors": 2}, MultiAsyncCollector, 2),
        ([CountingEnv] * 2, {"backend": "process", "sync": True}, MultiSyncCollector, 2),
        ([CountingEnv] * 2, {"backend": "multiprocessing"}, MultiAsyncCollector, 2),
        (CountingEnv, {"backend": "process", "sync": False}, MultiAsyncCollector, 1),
    ],
)
def test_processes(makers, named, kind, workers):
    with Collector(makers, None, **named, **OPTIONS) as collector:
        assert type(collector) is kind
        assert collector.num_workers == workers
        assert check_transitions(list(collector)) == 40


def test_options_of_a_backend_are_options_and_stay_as_they_were():
    inner = {"cat_results": 0}
    named = {"num_collectors": 2, "sync": True, "backend_options": inner}
    with Collector([[CountingEnv] * 2] * 2, **named, **OPTIONS) as collector:
        assert collector.next().batch_size == (4, 5)
    assert inner == {"cat_results": 0}


def test_this_process():
    for named in ({"backend": "direct"}, {"backend": "direct", "num_collectors": 1}):
        with Collector(CountingEnv(), backend_options=None, sync=None, **named, **OPTIONS) as one:
            assert type(one) is Collector
            assert check_transitions(list(one)) == 40


@pytest.mark.parametrize(
    ("where", "kind", "expected"),
    [
        ("rpc", "RPCCollector", {"sync": False}),
        ("distributed", "DistributedCollector", {"sync": False}),
        ("submitit", "DistributedCollector", {"sync": False, "launcher": "submitit"}),
        ("ray", "RayCollector", {"sync": False}),
    ],
)
def test_other_machines(where, kind, expected, monkeypatch):
    monkeypatch.setattr(distributed, kind, lambda *given, **options: (given, options))
    made = Collector(CountingEnv, None, backend=where, num_collectors=2, frames_per_batch=20)
    assert made == (([CountingEnv] * 2, None), {"frames_per_batch": 20, **expected})


@pytest.mark.cluster
def test_other_machines_in_earnest():
    named = {"backend": "distributed", "backend_options": {"backend": "gloo", "launcher": "mp"}}
    with Collector([CountingEnv] * 2, sync=True, **named, **OPTIONS) as collector:
        assert isinstance(collector, distributed.DistributedCollector)
        assert check_transitions(list(collector)) == 40


@pytest.mark.parametrize(
    ("makers", "given", "message"),
    [
        ([CountingEnv], {"num_collectors": 2}, "num_collectors is 2, but 1 env makers were given"),
        (CountingEnv, {"num_collectors": 0}, "num_collectors must be an int of at least 1"),
        (CountingEnv, {"num_collectors": True}, "num_collectors must be an int of at least 1"),
        (CountingEnv, {"backend": "proces"}, "backend must be one of .*Did you mean 'process'"),
        (
            CountingEnv,
            {"backend": "direct", "num_collectors": 2},
            "means one collector in this process",
        ),
        (CountingEnv, {"sync": True}, "sync=True is for collectors with workers"),
        (
            CountingEnv,
            {"backend_options": {"seed": 1}},
            "backend_options=.* is for collectors with",
        ),
        (
            CountingEnv,
            {"num_collectors": 1, "backend_options": {"sync": True}},
            "backend_options must not have 'sync'",
        ),
        (
            CountingEnv,
            {"num_collectors": 1, "backend_options": {"frames_per_batch": 5}},
            "'frames_per_batch' is given twice",
        ),
        (
            CountingEnv,
            {"backend": "submitit", "backend_options": {"launcher": "mp"}},
            "backend='submitit' requires launcher='submitit'; got 'mp'",
        ),
        (CountingEnv, {"num_collectors": 1, "sync": 3}, "sync must be True or False; got 3"),
    ],
)
def test_what_does_not_go_together_is_refused(makers, given, message):
    with pytest.raises(UsageError, match=message):
        Collector(makers, frames_per_batch=10, **given)


class Mine(Collector):
    """A user's own."""


def test_a_subclass_opens_nothing_else():
    with pytest.raises(UsageError, match="only Collector itself can open another collector"):
        Mine(CountingEnv, frames_per_batch=10, num_collectors=2)


def test_both_deliveries_by_one_name():
    for sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector([CountingEnv] * 2, sync=sync, **OPTIONS) as collector:
            assert type(collector) is kind
            assert isinstance(collector, MultiCollector)
            assert check_transitions(list(collector)) == 40
    with pytest.raises(UsageError, match="needs the option sync: True makes a MultiSyncCollector"):
        MultiCollector([CountingEnv] * 2, **OPTIONS)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiCollector])
def test_options_go_by_name(kind):
    with pytest.raises(UsageError, match=r"by position and the rest by name.*third argument is 20"):
        kind([CountingEnv], None, 20, **({"sync": True} if kind is MultiCollector else {}))


def test_a_constructor_of_ones_own_may_take_what_it_likes():
    class Further(Collector):
        def __init__(self, env, policy, frames):
            super().__init__(env, policy, frames_per_batch=frames)

    with Further(CountingEnv(), None, 20) as collector:
        assert collector.frames_per_batch == 20


def test_modules_in_which_old_scripts_look():
    from swath.collectors import collectors
    from swath.collectors.distributed import default_configs

    assert collectors.SyncDataCollector is Collector
    assert collectors.RandomPolicy is names.RandomPolicy
    assert distributed.DEFAULT_SLURM_CONF is default_configs.DEFAULT_SLURM_CONF


@pytest.mark.parametrize(
    "statement",
    [
        "from swath.collectors import Evaluator",
        "from swath.collectors.collectors import WeightUpdaterBase",
        "from swath.collectors.distributed import RPCWeightUpdater",
        "import swath.collectors as c; c.AsyncBatchedCollector",
    ],
)
def test_names_that_are_not_here_say_what_to_write(statement):
    name = statement.replace(".", " ").split()[-1]
    with pytest.raises(ImportError, match=rf"^swath\.collectors.* has no {name}: "):
        exec(statement)


def test_other_names_are_missing_as_ever():
    assert not hasattr(names, "NoSuchThing")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchThing'"):
        exec("from swath.collectors import NoSuchThing")


def test_a_random_policy_may_be_given_a_spec():
    with Collector(CountingEnv(), names.RandomPolicy("a spec"), **OPTIONS) as collector:
        assert check_transitions(list(collector)) == 40
