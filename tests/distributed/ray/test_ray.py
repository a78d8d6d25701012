"""A RayCollector delivers what the process collectors deliver."""

from __future__ import annotations

import os
import time

import multi_kit as kit
import numpy as np
import pytest
import torch
from torch import nn

from swath.cli import main
from swath.collectors import Collector
from swath.collectors.distributed import RayCollector
from swath.data import load_dataset
from swath.envs import SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]
KINDS = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
SAME = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done"))


def make(sync, makers=(CountingEnv, CountingEnv), policy=None, **options):
    return RayCollector(list(makers), policy, sync=sync, **options)


@pytest.mark.usefixtures("anywhere")
@KINDS
def test_every_transition_is_real_and_comes_once_in_order(sync):
    frames = 42 if sync else 21
    makers = [[CountingEnv] * 3, [CountingEnv] * 3]
    with make(sync, makers, frames_per_batch=2 * frames, total_frames=2001) as collector:
        batches = list(collector)
        stats = collector.stats()
        assert collector.next() is None
    assert check_transitions(batches) == stats["frames"]
    assert 2001 <= stats["frames"] < 2007
    assert batches[0].batch_size == ((2, 3, 14) if sync else (3, 14))
    assert stats["lost"] == {"rollouts": 0, "trajectories": []}
    assert len({row[0] for batch in batches for row in kit.rows(batch)}) == 6
    for row in stats["workers"]:
        assert row["host"]
        assert row["pid"] != os.getpid()
        assert (row["restarts"], row["lag"]) == (0, 0)
        assert row["frames_per_second"] > 0
    assert sum(row["frames"] for row in stats["workers"]) == stats["frames"]


@pytest.mark.usefixtures("anywhere")
def test_the_same_seed_gives_the_data_of_a_collector():
    def policy(observation):
        return (observation[..., 2] > 0).long()

    options = {"frames_per_batch": 200, "total_frames": 800, "seed": 4}
    with Collector(SerialEnv(4, "CartPole-v1"), policy, **options) as collector:
        expected = list(collector)
    with make(True, [["CartPole-v1"] * 2] * 2, policy, **options) as collector:
        batches = list(collector)
    for batch, one in zip(batches, expected, strict=True):
        for key in SAME:
            assert torch.equal(batch[key].reshape(one[key].shape), one[key]), key


@pytest.mark.usefixtures("anywhere")
@KINDS
def test_versions_are_right_and_weights_come_in_the_middle_of_a_rollout(sync):
    policy, batches, several = kit.Telling(), [], 0
    makers = [lambda: kit.slow_wide(0.002)] * 2
    with make(sync, makers, policy, frames_per_batch=40, total_frames=800) as collector:
        for number, batch in enumerate(collector):
            assert kit.told_right(batch)
            several += batch["collector", "policy_version"].unique().numel() > 1
            batches.append(batch)
            for update in range(3):
                collector.update_policy_weights_(policy.become(3 * number + update + 1))
        assert (
            collector.update_policy_weights_(policy.become(1000), wait=True) == 3 * len(batches) + 1
        )
        told = collector.map_fn(lambda about: (about.worker, about.policy.weight.item()))
        assert told == [(0, 1000.0), (1, 1000.0)]
        assert [mean.item() for mean in collector.get_distant_attr("policy.mean")] == [1000.0] * 2
    assert check_transitions(batches) == 800
    assert several == 0 if sync else several > 0


class Large(nn.Module):
    """Weights that go through Ray's store, all of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1_000_000))

    def forward(self, observation):
        low, high = self.weight.min(), self.weight.max()
        lead = observation.shape[:-1]
        return {"action": low.long().expand(lead), "high": high.expand(lead)}


@pytest.mark.usefixtures("anywhere")
def test_large_weights_are_put_once_and_never_torn(cluster, monkeypatch):
    puts, put = [], cluster.put
    monkeypatch.setattr(cluster, "put", lambda thing: puts.append(thing) or put(thing))
    policy = Large()
    with make(False, [kit.wide] * 2, policy, frames_per_batch=30) as collector:
        for version in range(1, 11):
            with torch.no_grad():
                policy.weight.fill_(version)
            collector.update_policy_weights_()
            batch = collector.next()
            assert torch.equal(batch["action"], batch["high"].long())
            assert torch.equal(batch["action"], batch["collector", "policy_version"])
        near = collector._crew.links[0].near
    assert len(puts) == (0 if near else 10)


@pytest.mark.usefixtures("anywhere")
@KINDS
def test_batches_are_ours_to_write_and_never_change(sync):
    with make(sync, frames_per_batch=2000) as collector:  # large enough for Ray's store
        first = collector.next()
        copy = first.clone()
        first["observation"][:] = 7
        kept = [collector.next() for _ in range(8)]
        copies = [batch.clone() for batch in kept]
        for _ in range(4):
            collector.next()
        assert all((a == b).all() for a, b in zip(kept, copies, strict=True))
    check_transitions([copy, *kept])


@pytest.mark.usefixtures("anywhere")
def test_seeds_resets_and_states(tmp_path):
    options = {"frames_per_batch": 20, "seed": 9}
    with make(True, **options) as collector:
        first = [collector.next() for _ in range(2)]
        state = collector.state_dict()
        after = [collector.next() for _ in range(2)]
        collector.load_state_dict(state)
        for batch, again in zip(after, [collector.next() for _ in range(2)], strict=True):
            assert (batch == again).all()
        collector.reset()
        assert (collector.next()["observation"][:, 0, 2] == 0).all()
        collector.set_seed(9)
        for batch in first:
            again = collector.next()
            assert all(torch.equal(batch[key], again[key]) for key in SAME)


def test_the_fast_actor_is_not_starved_by_the_slow(tmp_path):
    gate = tmp_path / "gate"
    makers = [CountingEnv, lambda: kit.Uneven(str(gate))]
    with make(False, makers, frames_per_batch=10, total_frames=400) as collector:
        gate.touch()  # the slow one stands
        batches = [collector.next() for _ in range(30)]
        assert collector.stats()["workers"][1]["frames"] == 0
        gate.unlink()
        batches.extend(collector)
        assert collector.stats()["workers"][1]["frames"] > 0
    assert check_transitions(batches) == 400


def test_options_of_ray_are_checked_where_they_are_given():
    for options, words in (
        ({"num_collectors": 0}, "num_collectors must be"),
        ({"placement": "near"}, "placement must be one of pack, spread"),
        ({"remote_configs": {"num_cpu": 1}}, "remote_configs"),
        ({"remote_configs": [{}] * 3}, "3 entries for 2 collectors"),
        ({"launcher": "mp"}, "has no option 'launcher'"),
        ({"num_collector": 2}, "Did you mean 'num_collectors'"),
        ({"cat_results": 0}, "delivers in another way"),
    ):
        with pytest.raises(UsageError, match=words):
            RayCollector([CountingEnv] * 2, frames_per_batch=10, **options)
    with pytest.raises(UsageError, match="has no option 'num_collectors': it is for RayCollector"):
        Collector(CountingEnv, frames_per_batch=10, num_collectors=2)


def test_the_cluster_that_is_used_is_the_one_that_was_meant(cluster):
    own = cluster.get_runtime_context().gcs_address
    with RayCollector([CountingEnv], frames_per_batch=20, address=own) as collector:
        assert collector.next().numel() == 20
    with pytest.raises(UsageError, match="is connected to the cluster at"):
        RayCollector([CountingEnv], frames_per_batch=20, address="127.0.0.1:1")
    with (
        pytest.warns(UserWarning, match=r"ray_init_config has no effect \(num_cpus\)"),
        RayCollector([CountingEnv], frames_per_batch=20, ray_init_config={"num_cpus": 7}),
    ):
        pass


def test_actors_get_the_resources_that_they_are_given(cluster):
    configs = [{"num_cpus": 0.5, "resources": {"rare": 1}}, {"num_cpus": 2}]
    with make(True, frames_per_batch=20, remote_configs=configs) as collector:
        collector.next()
        while not taken(cluster.available_resources()):  # Ray tells of it a little later
            time.sleep(0.01)


def taken(free):
    return free.get("rare", 0) == 0 and np.isclose(free["CPU"], 8 - 2.5)


def test_the_command_line_collects_on_a_cluster(tmp_path, capsys):
    command = ["collect", "CartPole-v1", "--backend", "ray", "--workers", "2", "--envs", "4"]
    assert main([*command, "--frames", "2000", "--out", str(tmp_path / "data")]) == 0
    assert "from 4 envs in 2 actors" in capsys.readouterr().out
    assert len(load_dataset(tmp_path / "data")) == 2000


def test_several_workers_for_each_collector():
    options = {"collector_class": "sync", "num_workers_per_collector": 2, "sync": True}
    with RayCollector(CountingEnv, num_collectors=1, frames_per_batch=20, **options) as collector:
        assert collector.next().batch_size == (2, 10)
