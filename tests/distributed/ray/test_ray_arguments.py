"""Arguments of a RayCollector that are wrong are refused before a cluster is looked for."""

from __future__ import annotations

import pytest

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import RayCollector
from swath.collectors.distributed import ray as module
from swath.errors import UsageError
from swath.testing import CountingEnv

pytestmark = pytest.mark.cluster  # actors' options are checked by Ray itself


class Entered(Exception):
    """Raised where a cluster would be entered: the arguments are right."""


@pytest.fixture(autouse=True)
def entered(monkeypatch):
    """Start no cluster; return the arguments that one would be entered with."""
    seen = []

    def enter(address, config, cpus, limit):
        seen.append({"cpus": cpus, "limit": limit})
        raise Entered

    monkeypatch.setattr(module, "enter", enter)
    return seen


def make(makers=CountingEnv, policy=None, **options):
    return RayCollector(makers, policy, **{"frames_per_batch": 10, **options})


NODES = {"collector_class": "sync", "num_workers_per_collector": 2}
DICTS = "must be a dict of options, or a list of dicts; got"
AMOUNT = r"in remote_configs must be a number from 0 to 1e\+14; got"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", f"remote_configs {DICTS} 'x'"),
        ("", f"remote_configs {DICTS} ''"),
        (5, f"remote_configs {DICTS} 5"),
        (False, f"remote_configs {DICTS} False"),
        ([5], rf"remote_configs {DICTS} \[5\]"),
        ([None], rf"remote_configs {DICTS} \[None\]"),
        ([], rf"remote_configs {DICTS} \[\]"),
        ({5: 1}, f"remote_configs {DICTS} {{5: 1}}"),
        ({"num_cpus": "x"}, f"'num_cpus' {AMOUNT} 'x'"),
        ({"num_cpus": -1}, f"'num_cpus' {AMOUNT} -1"),
        ({"num_cpus": True}, f"'num_cpus' {AMOUNT} True"),
        ({"num_cpus": float("nan")}, f"'num_cpus' {AMOUNT} nan"),
        ({"num_cpus": float("inf")}, f"'num_cpus' {AMOUNT} inf"),
        ({"num_cpus": 10**30}, f"'num_cpus' {AMOUNT} 10"),
        ({"num_cpus": 1e-6}, "precision"),
        ({"num_gpus": [1]}, rf"'num_gpus' {AMOUNT} \[1\]"),
        ({"num_gpus": 1.5}, "'num_gpus' in remote_configs must be whole, or less than 1; got 1.5"),
        ({"memory": "2G"}, f"'memory' {AMOUNT} '2G'"),
        ({"resources": 5}, "'resources' in remote_configs must be a dict .* got 5"),
        ({"resources": {5: 1}}, "'resources' in remote_configs must be a dict"),
        ({"resources": {"rare": "x"}}, f"'rare' {AMOUNT} 'x'"),
        ({"resources": {"CPU": 1}}, "remote_configs has .*num_cpus"),
        ({"scheduling_strategy": "x"}, "'scheduling_strategy' .* must be DEFAULT, SPREAD .* 'x'"),
        ({"runtime_env": 5}, "remote_configs has .*'runtime_env': 5.*must be"),
        ({"num_cpu": 1}, "remote_configs has .*num_cpu.*Valid ones are"),
        ([{}, {"num_cpus": -1}], f"'num_cpus' {AMOUNT} -1"),
        ({"name": "one"}, "must not have 'name': all actors would have the same name"),
        ({"max_restarts": 1}, "must not have 'max_restarts': swath replaces.*on_worker_failure"),
        ({"max_task_retries": 1}, "must not have 'max_task_retries': swath replaces"),
        (
            {"max_concurrency": 2},
            "must not have 'max_concurrency': swath sets the number of threads",
        ),
        ({"max_pending_calls": 1}, "must not have 'max_pending_calls'"),
        (
            {"object_store_memory": 1},
            "must not have 'object_store_memory': the object store belongs to a node",
        ),
        ({"placement_group": "x"}, "must not have 'placement_group': give scheduling_strategy"),
        ({"placement_group_bundle_index": 1}, "must not have .*: give scheduling_strategy"),
        ({"lifetime": "detached"}, "must not have 'lifetime': actors end with"),
    ],
)
def test_options_of_actors(value, words):
    with pytest.raises(UsageError, match=words):
        make([CountingEnv] * 2, remote_configs=value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_collectors": 2.5}, "num_collectors must be an int of at least 1 .*got 2.5"),
        ({"num_collectors": "many"}, 'num_collectors must be .*or "auto".*got .many'),
        ({"num_collectors": True}, "num_collectors must be .*got True"),
        ({"num_collectors": 0}, "num_collectors must be .*got 0"),
        ({"max_collectors": 0}, "max_collectors must be an int of at least 1; got 0"),
        ({"placement": "x"}, "placement must be one of pack, spread; got 'x'"),
        ({"launch_timeout": -1}, "launch_timeout must be above 0 .*got -1"),
        ({"launch_timeout": "x"}, "launch_timeout must be above 0 .*got 'x'"),
        ({"launch_timeout": float("inf")}, "launch_timeout must be .* at most 1e.06; got inf"),
        ({"worker_timeout": float("inf")}, "worker_timeout must be .* at most 1e.06; got inf"),
        ({"sync": "yes"}, "sync must be True or False; got 'yes'"),
        ({"collector_kwargs": "x"}, f"collector_kwargs {DICTS} 'x'"),
        ({"collector_kwargs": 5}, f"collector_kwargs {DICTS} 5"),
        ({"collector_kwargs": []}, rf"collector_kwargs {DICTS} \[\]"),
        ({"collector_kwargs": {"sync": "yes"}}, "sync must be True or False; got 'yes'"),
        ({"collector_kwargs": [{"sync": True}, {"sync": False}]}, "sync must be True or False"),
        ({"collector_kwargs": {"collector_kwargs": {}}}, "'collector_kwargs' is given twice"),
        ({"collector_kwargs": {"collector_class": "x"}}, "collector_class must be one of .*'x'"),
        ({"collector_class": []}, r"collector_class must be one of single, .*got \[\]"),
        ({"collector_class": 5}, "collector_class must be one of single, .*got 5"),
        ({"collector_class": RayCollector}, "collector_class must be one of single, "),
        ({"num_workers_per_collector": 0}, "per_collector must be an int of at least 1; got 0"),
        ({**NODES, "num_workers_per_collector": 2.5}, "per_collector must be an int.*got 2.5"),
        ({"collector_kwargs": {"num_workers_per_collector": 2}}, "needs collector_class='sync'"),
        ({"create_env_fn": 5}, "the envs are 5; workers make their own"),
        ({"create_env_fn": []}, "the list of env makers is empty"),
    ],
)
def test_other_options(options, words):
    with pytest.raises(UsageError, match=words):
        make(options.pop("create_env_fn", CountingEnv), **options)


@pytest.mark.parametrize("number", [1, 5, "auto"])
def test_how_many_is_said_once(number, entered):
    many = [CountingEnv] * 2
    for name in ("num_collectors", "num_workers"):
        if number != "auto":
            words = f"{name} is {number}, but 2 env makers were given.*Leave {name} out"
            with pytest.raises(UsageError, match=words):
                make(many, **{name: number})
    with pytest.raises(UsageError, match=f"num_collectors is {number!r} and num_workers is 2"):
        make(num_collectors=number, num_workers=2)
    assert not entered
    for right in ({}, {"num_collectors": 2}, {"num_workers": 2}, {"num_collectors": "auto"}):
        with pytest.raises(Entered):
            make(many, **right)
    with pytest.raises(Entered):
        make(num_collectors=2, num_workers=2)


@pytest.mark.parametrize("name", ["remote_configs", "collector_kwargs"])
def test_a_list_has_an_entry_for_each_collector(name, entered):
    for options, nodes in (
        ({"num_collectors": 2}, "2 collectors"),
        ({"num_collectors": 2, **NODES}, "2 collectors"),
        ({"num_collectors": "auto"}, "as many collectors as there is room for"),
        ({}, "as many collectors as there is room for"),
    ):
        with pytest.raises(
            UsageError, match=f"{name} has 3 entries for {nodes}; give one entry for all"
        ):
            make(**options, **{name: [{}] * 3})
    assert not entered
    for right in ({"num_collectors": 3}, {"num_collectors": 3, **NODES}):
        with pytest.raises(Entered):
            make(**right, **{name: [{}] * 3})
    with pytest.raises(Entered):
        make(**{name: [{}]})


def test_a_cluster_of_ours_has_room_for_all_workers(entered):
    configs = [{"num_cpus": 1}, {"num_cpus": 4}]
    for options in (
        {"num_collectors": 2, "remote_configs": {"num_cpus": 3}},
        {"num_collectors": 3, "remote_configs": {"num_cpus": 3}, **NODES},
        {"num_collectors": 2, "remote_configs": configs, **NODES},
        {"remote_configs": {"num_cpus": 3}, **NODES},
        {"remote_configs": {"num_cpus": None, "resources": None}},  # as if they were left out
    ):
        with pytest.raises(Entered):
            make(**options)
    assert [one["cpus"] for one in entered] == [6, 18, 10, 6, 1]


def test_options_for_nodes_may_be_any(entered):
    """Those that have another default here, too."""
    with pytest.raises(Entered):
        make(collector_kwargs={"launch_timeout": 7.0, "on_worker_failure": "raise"})
    assert entered[0]["limit"] == 7
    for sync, kind in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        made = RayCollector.__new__(RayCollector, collector_kwargs={"sync": sync})
        assert isinstance(made, kind)


def test_the_same_class_of_a_node_by_name_and_by_itself(entered):
    for right in ("single", "async", Collector, MultiSyncCollector):
        with pytest.raises(Entered):
            make(collector_class=right)
