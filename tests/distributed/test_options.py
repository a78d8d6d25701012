"""Options that only collectors over machines have."""

from __future__ import annotations

import logging
import socket
import time

import multi_kit as kit
import pytest
from wait_kit import comes_true

from swath.collectors import Collector, MultiAsyncCollector
from swath.collectors.distributed import (
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    DistributedSyncDataCollector,
)
from swath.data import ReplayBuffer
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions


def refused(stranger):
    """Tell whether the other side closes without a word."""
    try:
        stranger.shutdown(socket.SHUT_WR)
        return stranger.recv(100) == b""
    except OSError:  # it had closed before we were done
        return True


OPTIONS = {"frames_per_batch": 40, "launcher": "mp", "seed": 3}


def test_old_names_and_what_sync_means():
    assert DistributedDataCollector is DistributedCollector
    assert DistributedSyncDataCollector is DistributedSyncCollector
    for kind, sync, shape in (
        (DistributedCollector, {"sync": True}, [2, 20]),
        (DistributedCollector, {}, [40]),
        (DistributedSyncCollector, {}, [2, 20]),
        (DistributedCollector, {"collector_kwargs": {"sync": True}}, [2, 20]),
        (DistributedSyncCollector, {"collector_kwargs": {"sync": False}}, [40]),
    ):
        with kind([CountingEnv] * 2, **OPTIONS, **sync) as collector:
            assert isinstance(collector, kind)
            assert type(collector).__name__ == kind.__name__
            assert list(collector.next().batch_size) == shape
            assert all(
                row["host"] == socket.gethostname() for row in collector.stats()["per_worker"]
            )


@pytest.mark.parametrize("node", ["sync", "async", MultiAsyncCollector])
def test_several_workers_on_a_node(node):
    options = {**OPTIONS, "total_frames": 400, "num_workers_per_collector": 2}
    makers = [[CountingEnv] * 2, [CountingEnv] * 2]
    with DistributedCollector(makers, sync=True, collector_class=node, **options) as collector:
        batches = list(collector)
        assert collector.num_workers == 4
    assert {tuple(batch.batch_size) for batch in batches} == {(4, 2, 5)}
    assert check_transitions(batches) == 400
    with Collector([CountingEnv] * 8, frames_per_batch=40, total_frames=400, seed=3) as alone:
        for ours, theirs in zip(batches, alone, strict=True):
            assert (ours["observation"].reshape(8, 5, 3) == theirs["observation"]).all()


def test_options_for_nodes_come_among_the_others():
    inner = {"max_frames_per_traj": 3, "init_random_frames": 10}
    with DistributedCollector(
        [kit.wide] * 2, kit.Telling(), sync=True, collector_kwargs=inner, **OPTIONS
    ) as collector:
        data = collector.next()
        assert data["collector", "random"].sum() == 10
        lengths = data["collector", "traj_ids"].unique(return_counts=True)[1]
        assert lengths.max() == 3
    factories = [
        {"policy_factory": lambda: kit.Telling(1)},
        {"policy_factory": lambda: kit.Telling(2)},
    ]
    with DistributedCollector(
        [kit.wide] * 2, sync=True, collector_kwargs=factories, **OPTIONS
    ) as collector:
        assert collector.next()["action"][:, 0].tolist() == [1, 2]
    two = {"collector_class": "sync", "num_workers_per_collector": 2, **OPTIONS}
    with DistributedCollector(
        [kit.wide] * 2, sync=True, collector_kwargs=factories, **two
    ) as collector:
        assert collector.next()["action"][:, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("name", ["max_weight_update_interval", "update_interval"])
def test_weights_are_published_every_so_many_batches(name):
    policy = kit.Telling()
    with DistributedCollector(
        [kit.wide] * 2, policy, sync=True, **OPTIONS, **{name: 2}
    ) as collector:
        for version, batch in zip([0, 0, 1, 1, 2], collector, strict=False):
            assert (batch["collector", "policy_version"] == version).all()
    with DistributedCollector(
        [kit.wide] * 2, policy, sync=True, update_after_each_batch=True, **OPTIONS
    ) as collector:
        for version, batch in zip(range(4), collector, strict=False):
            assert (batch["collector", "policy_version"] == version).all()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("extra", "interval"),
    [
        ({}, 1),
        ({"update_interval": 1, "max_weight_update_interval": -1}, 1),
        ({"max_weight_update_interval": 0}, 1),
        ({"update_interval": 2}, 2),
        ({"collector_kwargs": {"update_interval": 2}}, 2),
        ({"update_interval": -1}, 100),
    ],
)
def test_a_distributed_sync_collector_publishes_by_itself(extra, interval):
    policy = kit.Telling()
    with DistributedSyncCollector([kit.wide] * 2, policy, **OPTIONS, **extra) as collector:
        for number, batch in zip(range(4), collector, strict=False):
            version = number // interval
            assert (batch["collector", "policy_version"] == version).all()
            assert (batch["action"] == version * interval).all()  # of the batch before it
            policy.become(number + 1)


@pytest.mark.cluster
def test_a_distributed_sync_collector_publishes_only_what_is_here_to_publish():
    options = {**OPTIONS, "policy_factory": kit.Telling}
    with DistributedSyncCollector([kit.wide] * 2, **options) as collector:
        for _, batch in zip(range(3), collector, strict=False):
            assert (batch["collector", "policy_version"] == 0).all()
    buffer = ReplayBuffer(400, storage="shared", batch_size=4)
    options = {**OPTIONS, "replay_buffer": buffer, "total_frames": 200}
    with DistributedSyncCollector([kit.wide] * 2, kit.Telling(), **options) as collector:
        collector.start()  # where the optimizer may be in the middle of a step
        while collector.is_running():
            time.sleep(0.01)
        assert collector.policy_version == 0


@pytest.mark.cluster
def test_a_port_comes_as_text_and_from_the_environment(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with DistributedCollector([CountingEnv], tcp_port=str(port), **OPTIONS) as collector:
        assert collector._crew.place._gate.port == port
    monkeypatch.setenv("TCP_PORT", str(port))
    with DistributedCollector([CountingEnv], **OPTIONS) as collector:
        assert collector._crew.place._gate.port == port
    monkeypatch.setenv("TCP_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(UsageError, match=r"TCP_PORT must be an int of at least 0 .*got 'tcp://"):
        DistributedCollector([CountingEnv], **OPTIONS)


@pytest.mark.cluster
def test_values_of_torchrl_among_the_options_for_nodes():
    inner = {"max_frames_per_traj": -1, "init_random_frames": -1, "use_buffers": True}
    with DistributedCollector(
        [CountingEnv] * 2, collector_kwargs=inner, tcp_port=None, **OPTIONS
    ) as collector:
        assert check_transitions(collector.next()) == 40


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"backend": "glo"},
            "backend must be one of gloo, nccl, mpi, rpc; got 'glo'. Did you mean",
        ),
        ({"launcher": "submit"}, "launcher must be one of .*; got 'submit'"),
        ({"collector_class": "many"}, "collector_class must be one of single, sync, async"),
        ({"num_workers_per_collector": 2}, "needs collector_class='sync' or 'async'"),
        ({"collector_class": []}, r"collector_class must be one of single, .*got \[\]"),
        ({"collector_kwargs": {"num_workers_per_collector": 2}}, "needs collector_class='sync'"),
        ({"collector_kwargs": "x"}, "collector_kwargs must be a dict of options.*got 'x'"),
        ({"collector_kwargs": [{}] * 3}, "collector_kwargs has 3 entries for 2 collectors"),
        ({"collector_kwargs": {"seed": 1}}, "'seed' is given twice"),
        ({"collector_kwargs": {"sede": 1}}, "has no option 'sede'. Did you mean 'seed'"),
        ({"tcp_port": -1}, "tcp_port must be an int of at least 0"),
        ({"tcp_port": 65536}, "tcp_port must be at most 65535; got 65536"),
        ({"secret": 5}, "secret must be some text, or None; got 5"),
        ({"secret": ""}, "secret must be some text, or None; got ''"),
        ({"host": b"here"}, "host must be some text"),
        ({"link_timeout": 0}, "link_timeout must be above 0"),
        ({"host": "203.0.113.7"}, "cannot listen on 203.0.113.7 port 0"),
        ({"update_after_each_batch": True, "update_interval": 2}, "do not go together"),
        ({"num_collectors": 2}, "has no option 'num_collectors'"),
    ],
)
def test_bad_input_is_refused_at_construction(extra, message):
    with pytest.raises(UsageError, match=message):
        DistributedCollector([CountingEnv] * 2, **{**OPTIONS, **extra})


def test_options_for_machines_are_refused_elsewhere():
    with pytest.raises(UsageError, match=r"no option 'backend': it is for the collectors of"):
        MultiAsyncCollector([CountingEnv], frames_per_batch=10, backend="gloo")
    with pytest.raises(UsageError, match=r"no option 'launcher': it is for the collectors of"):
        Collector(CountingEnv, frames_per_batch=10, launcher="mp")


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}.*tcp_port"):
            DistributedCollector([CountingEnv], tcp_port=port, **OPTIONS)


def test_strangers_are_refused_and_logged_and_the_run_goes_on(caplog):
    with DistributedCollector([CountingEnv] * 2, sync=True, **OPTIONS) as collector:
        batches = [collector.next()]
        port = collector._crew.place._gate.port
        with caplog.at_level(logging.WARNING, "swath"):
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + b" " * 60, b"x" * 64):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.recv(32)
                    stranger.sendall(said)
                    assert refused(stranger)
            silent = socket.create_connection(("127.0.0.1", port))
            batches += [collector.next() for _ in range(3)]
            silent.close()
            assert comes_true(lambda: len(caplog.records) >= 4)
    assert len([one for one in caplog.records if "refused" in one.message]) == 4
    assert "does not know the secret" in caplog.text
    assert check_transitions(batches) == 160


def test_nothing_of_a_stranger_is_unpickled(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    with DistributedCollector([CountingEnv], **OPTIONS) as collector:
        body = pickle.dumps(Bomb())
        with socket.create_connection(("127.0.0.1", collector._crew.place._gate.port)) as stranger:
            stranger.recv(32)
            stranger.sendall(b"x" * 64 + len(body).to_bytes(8, "little") + body)
            assert refused(stranger)
        collector.next()
    assert not (tmp_path / "harm").exists()


class Mine(DistributedCollector):
    """A user's own, with an attribute of its own."""

    def __init__(self, *args, mark="", **options):
        super().__init__(*args, **options)
        self.mark = mark


class AlwaysSync(DistributedCollector):
    def __init__(self, makers):
        super().__init__(makers, sync=True, **OPTIONS)


@pytest.mark.parametrize("sync", [True, False])
def test_a_subclass_is_made_as_such(sync):
    with Mine([CountingEnv] * 2, mark="a", sync=sync, **OPTIONS) as collector:
        assert isinstance(collector, Mine)
        assert collector.mark == "a"
        assert list(collector.next().batch_size) == ([2, 20] if sync else [40])


def test_a_subclass_that_keeps_sync_to_itself_is_told():
    with pytest.raises(UsageError, match="let it take sync as an option"):
        AlwaysSync([CountingEnv] * 2)
