"""A worker started by hand on this host, its blocks over gloo or NCCL.

NCCL lets no two ranks of a host share a GPU, so that with one GPU the worker says that it is on
another.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swath.collectors import Collector
from swath.collectors.distributed import DistributedCollector
from swath.errors import WorkerError
from swath.testing import CountingEnv, check_transitions

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

NCCL = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


class Greedy(torch.nn.Module):
    """Weights decide, and change the data when they change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 2)

    def forward(self, observation):
        return self.net(observation).argmax(-1)


@pytest.fixture(params=["gloo", NCCL])
def collect(request, monkeypatch):
    """Make a collector, and start its worker."""
    monkeypatch.setenv("NCCL_HOSTID", "trainer")
    monkeypatch.setenv("SWATH_SECRET", "s" * 32)
    made = []

    def make(create_env_fn, policy=None, **options):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "swath.workers.join", f"127.0.0.1:{port}", "0"]
        path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        environ = {**os.environ, "NCCL_HOSTID": "worker", "PYTHONPATH": path}
        worker = subprocess.Popen(command, env=environ)
        made.append(worker)
        options = {"launcher": "wait", "host": "127.0.0.1", "tcp_port": port, **options}
        backend = request.param
        collector = DistributedCollector(
            [create_env_fn], policy, sync=True, backend=backend, **options
        )
        made.append(collector)
        return collector, worker

    yield make
    while made:
        one = made.pop()
        if isinstance(one, DistributedCollector):
            one.shutdown()
        else:
            one.wait(20)


def test_every_frame_arrives(collect):
    collector, _ = collect(CountingEnv, frames_per_batch=40, total_frames=800, seed=7)
    batches = [batch.clone() for batch in collector]
    check_transitions(batches)
    assert sum(batch.numel() for batch in batches) == 800


def test_with_weights_after_every_batch_the_data_is_that_of_one_process(collect):
    def collected(make):
        policy = Greedy()
        collector = make("CartPole-v1", policy, frames_per_batch=50, total_frames=500, seed=3)
        batches = []
        for batch in collector:
            batches.append(batch.reshape(-1).clone())
            with torch.no_grad():
                policy.net.bias += torch.tensor([0.1, -0.1])
            collector.update_policy_weights_()
        collector.shutdown()
        return torch.cat(batches)

    expected = collected(Collector)
    found = collected(lambda *given, **options: collect(*given, **options)[0])
    assert (expected.exclude("collector") == found.exclude("collector")).all()
    assert expected["collector", "policy_version"].unique().numel() > 5


def test_a_worker_that_is_killed_is_told(collect):
    collector, worker = collect(CountingEnv, frames_per_batch=40, seed=7)
    batches = iter(collector)
    next(batches)
    worker.kill()
    with pytest.raises(WorkerError, match="worker 0"):
        list(batches)
