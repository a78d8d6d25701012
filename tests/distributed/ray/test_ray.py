"""A RayCollector delivers what the process collectors deliver."""

from __future__ import annotations

import time

import multi_kit as kit
import numpy as np
import pytest
import torch
from torch import nn

from swath.cli import main
from swath.collectors import MultiSyncCollector
from swath.collectors.distributed import RayCollector
from swath.data import load_dataset
from swath.errors import UsageError
from swath.testing import CountingEnv

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def make(sync, makers=(CountingEnv, CountingEnv), policy=None, **options):
    return RayCollector(list(makers), policy, sync=sync, **options)


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


def test_options_of_ray_are_checked_where_they_are_given():
    for options, words in (
        ({"num_collectors": 0}, "num_collectors must be"),
        ({"placement": "near"}, "placement must be one of pack, spread"),
        ({"remote_configs": {"num_cpu": 1}}, "remote_configs"),
        ({"remote_configs": [{}] * 3}, "3 entries for 2 collectors"),
        ({"launcher": "mp"}, "has no option 'launcher'"),
        ({"num_collector": 2}, "Did you mean 'num_collectors'"),
        ({"cat_results": 0}, "a batch holds the rollout of one worker"),
    ):
        with pytest.raises(UsageError, match=words):
            RayCollector([CountingEnv] * 2, frames_per_batch=10, **options)
    with pytest.raises(UsageError, match="has no option 'num_collectors': it is for RayCollector"):
        MultiSyncCollector(CountingEnv, frames_per_batch=10, num_collectors=2)


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
