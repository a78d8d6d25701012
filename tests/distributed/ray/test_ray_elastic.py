"""Actors come and go while frames are collected."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import gymnasium as gym
import multi_kit as kit
import numpy as np
import pytest

from swath.collectors.distributed import RayCollector
from swath.collectors.distributed import ray as module
from swath.errors import UsageError, WorkerError
from swath.testing import CountingEnv, SlowEnv, check_transitions

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def stamps(batches):
    return {row[0] for batch in batches for row in kit.rows(batch)}


@pytest.mark.usefixtures("anywhere")
def test_async_actors_are_added_and_removed_while_others_deliver():
    policy, batches = kit.Telling(), []

    def collect_until(condition):
        while not condition():
            batch = collector.next()
            assert kit.told_right(batch)
            batches.append(batch)
            collector.update_policy_weights_(policy.become(len(batches)))

    with RayCollector([kit.wide], policy, frames_per_batch=10, seed=0) as collector:
        collect_until(lambda: len(batches) == 5)
        collector.add_collectors(2)
        assert collector.num_workers == 3
        collect_until(lambda: all(row["frames"] > 50 for row in collector.stats()["per_worker"]))
        pids = kit.pids_of(collector)
        assert len(set(pids)) == 3
        collector.remove_collectors(2)
        assert kit.gone(pids[1:])
        assert [row["worker"] for row in collector.stats()["per_worker"]] == [0]
        before = len(batches)
        collect_until(lambda: len(batches) == before + 10)
        frames = collector.stats()["frames"]
        with pytest.raises(UsageError, match="would leave none of 1"):
            collector.remove_collectors(1)
        with pytest.raises(UsageError, match="at least 1; got 0"):
            collector.add_collectors(0)
    assert check_transitions(batches) == frames == 10 * len(batches)
    assert len(stamps(batches)) == 3  # each with streams of its own
    assert len(collector.stats()["lost"]["trajectories"]) == 2  # those of the removed, unfinished


def test_sync_batches_grow_and_shrink():
    with RayCollector([CountingEnv] * 2, frames_per_batch=20, sync=True) as collector:
        batches = [collector.next()]
        collector.add_collectors(1)
        while batches[-1].batch_size[0] == 2:
            batches.append(collector.next())
        assert batches[-1].batch_size == (3, 10)
        assert collector.frames_per_batch == 30
        collector.remove_collectors(2)
        batches += [collector.next() for _ in range(3)]
        assert batches[-1].batch_size == (1, 10)
        frames = collector.stats()["frames"]
        collector.stop_remote_collectors()
    assert check_transitions(batches) == frames
    assert len(stamps(batches)) == 3


@pytest.mark.usefixtures("anywhere")
def test_added_actors_begin_with_current_weights():
    policy = kit.Telling()
    with RayCollector([kit.wide], policy, frames_per_batch=10) as collector:
        collector.next()
        collector.update_policy_weights_(policy.become(1), wait=True)
        collector.add_collectors(1)
        batches = []
        while collector.stats()["per_worker"][1]["frames"] < 40:
            batches.append(collector.next())
        assert all(kit.told_right(batch) for batch in batches)
        new = [batch for batch in batches if (batch["collector", "policy_version"] == 1).all()]
        assert len(new) >= len(batches) - 2  # but for rollouts that were under way
        assert collector.stats()["per_worker"][1]["lag"] == 0


def mapped():
    """Return the sizes of what this process maps of the memory that it shares."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:swath" in line]
    return [int(stop, 16) - int(start, 16) for start, stop in ends]


class Large(gym.ObservationWrapper):
    """Observations of 400 kB."""

    def __init__(self):
        super().__init__(CountingEnv())
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (100_000,), np.float32)

    def observation(self, observation):
        return np.full(100_000, observation[0], np.float32)


def test_what_removed_actors_had_is_given_back():
    with RayCollector([Large], frames_per_batch=10, remote_configs={"num_cpus": 0.1}) as collector:
        # A batch is views on its slab.
        slab = collector.next()["observation"].untyped_storage().nbytes()
        for _ in range(2):
            collector.add_collectors(1)
            while collector.stats()["per_worker"][-1]["frames"] < 30:
                collector.next()
            collector.remove_collectors(1)
            for _ in range(4):  # what the removed one had made is kept until it is delivered
                collector.next()
            gc.collect()
            # The one that stays has two rollouts under way, and one that was delivered.
            assert 1 <= sum(size >= slab for size in mapped()) <= 3


def test_who_asks_everyone_is_told_of_one_without_a_place_and_the_run_goes_on(cluster):
    configs = {"resources": {"rare": 0.7}, "num_cpus": 0.1}
    options = {"remote_configs": configs, "launch_timeout": 10.0}
    with RayCollector([CountingEnv], frames_per_batch=10, **options) as collector:
        collector.add_collectors(1)
        batches = [collector.next()]
        with pytest.raises(WorkerError, match=r"worker 1 .* was not scheduled within 10 s"):
            collector.map_fn(lambda worker: worker.worker)
        batches += [collector.next() for _ in range(10)]
        collector.remove_collectors(1)
        assert collector.map_fn(lambda worker: worker.worker) == [0]
    check_transitions(batches)


@pytest.fixture
def taking(cluster):
    """An actor that takes six of the eight CPUs."""

    @cluster.remote(num_cpus=6)
    class Taking:
        def here(self):
            return True

    taking = Taking.remote()
    cluster.get(taking.here.remote())
    while cluster.available_resources().get("CPU") != 2:  # Ray tells of it a little later
        time.sleep(0.01)
    yield taking
    cluster.kill(taking)
    while cluster.available_resources().get("CPU") != 8:
        time.sleep(0.01)


def test_auto_takes_what_the_cluster_has_and_follows_it(cluster, taking, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.05)
    options = {"remote_configs": {"num_cpus": 2}, "num_collectors": "auto", "max_collectors": 2}
    with RayCollector(lambda: SlowEnv(0.001), frames_per_batch=10, **options) as collector:
        assert collector.num_workers == 1  # of 8 CPUs, 2 were free
        batches = [collector.next() for _ in range(3)]
        cluster.kill(taking)
        while not all(row["frames"] for row in collector.stats()["per_worker"][1:]) or (
            collector.num_workers == 1
        ):
            batches.append(collector.next())
        assert collector.num_workers == 2  # there is room for four, and the bound is two
    assert check_transitions(batches) == 10 * len(batches)


NODES = {"collector_class": "sync", "num_workers_per_collector": 2}


def test_collectors_of_several_actors_come_and_go_whole():
    options = {**NODES, "collector_kwargs": {"sync": True}, "remote_configs": {"num_cpus": 0.5}}
    with RayCollector(CountingEnv, num_collectors=1, frames_per_batch=20, **options) as collector:
        batches = [collector.next()]
        assert batches[0].batch_size == (2, 10)
        assert collector._supervisor.max_restarts == 6  # three for each actor
        collector.add_collectors(1)
        assert collector.num_workers == 4
        assert collector._supervisor.max_restarts == 12
        with pytest.raises(UsageError, match="would leave none of 2"):
            collector.remove_collectors(2)
        while batches[-1].batch_size[0] < 4:
            batches.append(collector.next())
        collector.remove_collectors(1)
        assert [row["worker"] for row in collector.stats()["per_worker"]] == [0, 1]
        with pytest.raises(UsageError, match="would leave none of 1"):
            collector.remove_collectors(1)
        batches.append(collector.next())
    assert batches[-1].batch_size == (2, 10)
    check_transitions(batches)


def test_auto_counts_collectors_of_several_actors(cluster, taking, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.05)
    options = {"num_collectors": "auto", "max_collectors": 2, "launch_timeout": 30, **NODES}
    with RayCollector(lambda: SlowEnv(0.001), frames_per_batch=10, **options) as collector:
        assert collector.num_workers == 2  # of 8 CPUs, 2 were free
        assert collector._supervisor.max_restarts == 6
        batches = [collector.next() for _ in range(3)]
        cluster.kill(taking)
        while collector.num_workers == 2 or not all(
            row["frames"] for row in collector.stats()["per_worker"]
        ):
            batches.append(collector.next())
        batches += [collector.next() for _ in range(20)]
        assert collector.num_workers == 4  # there is room for eight, and the bound is two of two
        assert collector._supervisor.max_restarts == 12
    assert check_transitions(batches) == 10 * len(batches)


def test_auto_means_one_for_each_cpu_if_actors_take_nothing(cluster, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.01)
    offered = {"CPU": 2.0}
    monkeypatch.setattr(cluster, "cluster_resources", lambda: offered)
    options = {"num_collectors": "auto", "remote_configs": {"num_cpus": 0}, "max_restarts": 1}
    with RayCollector(lambda: SlowEnv(0.001), frames_per_batch=10, **options) as collector:
        batches = [collector.next() for _ in range(20)]
        assert collector.num_workers == 2
        offered["CPU"] = 3.0
        while collector.num_workers == 2:
            batches.append(collector.next())
        batches += [collector.next() for _ in range(20)]
        assert collector.num_workers == 3
        assert collector._supervisor.max_restarts == 1  # as it was said, for all
        collector.remove_collectors(1)
        batches += [collector.next() for _ in range(20)]
        assert collector.num_workers == 2  # what was removed does not come again
    check_transitions(batches)
