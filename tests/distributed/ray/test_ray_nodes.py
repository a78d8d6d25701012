"""Several nodes: one is lost and another comes while frames are collected."""

from __future__ import annotations

import functools

import multi_kit as kit
import pytest
from ray_kit import LEAN, end, leave, warm_workers

from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer
from swath.testing import CountingEnv, check_transitions

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def nodes():
    """A cluster with a head, which has no room for actors, and functions to add nodes."""
    from ray.cluster_utils import Cluster

    import ray

    def two():
        while len(cluster.worker_nodes) < 2:
            cluster.add()
        return list(cluster.worker_nodes)

    leave()
    small = {"object_store_memory": 128 << 20, "include_dashboard": False}
    with warm_workers():
        cluster = Cluster(True, head_node_args={"num_cpus": 0, "resources": {"head": 1}, **small})
        ray.init(**{**LEAN, "address": cluster.address, "object_store_memory": None})
        cluster.add = lambda: cluster.add_node(
            num_cpus=1, resources={"edge": 1}, object_store_memory=128 << 20
        )
        cluster.two = two
        yield cluster
        end(ray.shutdown)
        end(cluster.shutdown)


@pytest.mark.usefixtures("far")
def test_a_node_dies_another_comes_and_the_run_goes_on(nodes):
    _, second = nodes.two()
    policy, batches = kit.Telling(), []

    def collect_until(condition):
        while not condition():
            batch = collector.next()
            assert kit.told_right(batch)
            batches.append(batch)
            collector.update_policy_weights_(policy.become(len(batches)))

    makers = [functools.partial(kit.slow_wide, 0.002)] * 2
    with RayCollector(
        makers, policy, frames_per_batch=20, placement="spread", launch_timeout=60.0
    ) as collector:
        rows = collector.stats()["per_worker"]
        collect_until(lambda: len(batches) >= 10)
        names = [link.name for link in collector._crew.links.values()]
        assert len(set(names)) == len(rows) == 2
        nodes.remove_node(second, allow_graceful=False)
        collect_until(lambda: collector.stats()["restarts"] == 1)
        lost = next(row for row in collector.stats()["per_worker"] if row["restarts"])["worker"]
        before = len(batches)
        collect_until(lambda: len(batches) >= before + 10)  # with the one that is left
        assert collector.stats()["per_worker"][lost]["pid"] is None
        nodes.add()
        made = collector.stats()["per_worker"][lost]["frames"]
        collect_until(lambda: collector.stats()["per_worker"][lost]["frames"] > made)
        stats = collector.stats()
    assert check_transitions(batches) == stats["frames"]
    assert stats["restarts"] in (1, 2)  # Ray may know later than we do that the node is gone
    assert stats["lost"]["rollouts"] == 1


@pytest.mark.usefixtures("far")
def test_rollouts_weights_and_replayed_frames_cross_nodes(nodes):
    nodes.two()
    with RayReplayBuffer(
        2000, batch_size=16, remote_config={"num_cpus": 0, "resources": {"head": 1}}
    ) as buffer:
        configs = {"resources": {"edge": 1}}
        options = {"frames_per_batch": 40, "total_frames": 800, "remote_configs": configs}
        with RayCollector([CountingEnv] * 2, replay_buffer=buffer, **options) as collector:
            assert list(collector) == [None] * 20
        assert buffer.stats()["frames"] == 800
        assert buffer.sample()["observation"].shape == (16, 3)
