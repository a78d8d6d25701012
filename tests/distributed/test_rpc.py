"""Blocks over RPC: the promises of the process collectors, and what RPC cannot do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cluster_kit
import multi_kit as kit
import pytest
import test_multi
import test_multi_failures
import torch.distributed.rpc as rpc

from swath.collectors.distributed import RPCCollector
from swath.errors import UsageError, WorkerError
from swath.testing import CountingEnv

# The rest is about what happens above links, and is tested over gloo.
TESTS = [
    "test_every_transition_is_real_and_comes_once_in_order",
    "test_the_same_seed_gives_the_same_data_with_any_number_of_workers",
    "test_total_frames_is_met_exactly",
    "test_preempted_counts_are_exact",
    "test_collecting_ahead_lags_by_exactly_one_version",
    "test_a_worker_collects_while_the_learner_is_busy_and_then_waits",
    "test_kept_batches_never_change_and_dropped_ones_are_used_again",
    "test_the_version_is_right_for_every_frame",
    "test_waiting_for_weights",
    "test_only_these_workers_get_weights",
    "test_a_learner_thread_may_publish_all_the_time",
    "test_a_worker_that_is_killed_while_idle",
    "test_publishing_to_a_dead_worker_raises_if_it_is_waited_for",
    "test_a_worker_that_is_killed_while_weights_are_published",
    "test_shutdown_ends_workers_that_block",
    "test_shutdown_twice_and_everything_after_it",
    "test_shutdown_from_another_thread_in_the_middle_of_a_batch",
    "test_a_collector_that_is_dropped_takes_its_workers_along",
]
both = {**vars(test_multi), **vars(test_multi_failures)}
globals().update({name: both[name] for name in TESTS})


@pytest.fixture(autouse=True)
def over_rpc(monkeypatch):
    cluster_kit.put_in_place(monkeypatch, [test_multi, test_multi_failures], backend="rpc")


@pytest.fixture(autouse=True, scope="module")
def torch_keeps_its_last_agent():
    """Torch frees most of what an agent had when the next one starts; it counts as no leak."""
    for _ in range(2):
        with RPCCollector([CountingEnv] * 4, frames_per_batch=8, total_frames=8) as collector:
            assert len(list(collector)) == 1


def test_one_at_a_time_and_one_after_the_other():
    with RPCCollector([CountingEnv], frames_per_batch=10) as collector:
        with pytest.raises(UsageError, match="once at a time"):
            RPCCollector([CountingEnv], frames_per_batch=10)
        assert collector.next().numel() == 10
    with RPCCollector([CountingEnv], frames_per_batch=10) as collector:
        assert collector.next().numel() == 10
    assert "TP_SOCKET_IFNAME" not in os.environ


def test_what_rpc_cannot_do_is_refused_at_construction():
    for words, options in {
        "nobody can come back": {"on_worker_failure": "restart"},
        "tensorpipe_options are not accepted": {"tensorpipe_options": {"threads": 3}},
        "visible_devices has 1 entries for 2 workers": {"visible_devices": ["cuda:0"]},
    }.items():
        with pytest.raises(UsageError, match=words):
            RPCCollector([CountingEnv] * 2, frames_per_batch=10, launcher="mp", **options)
    assert not rpc.api._is_current_rpc_agent_set()


def test_options_of_tensorpipe_arrive():
    chosen = {"num_worker_threads": 3, "_transports": ["uv"], "_channels": ["basic"]}
    with RPCCollector([CountingEnv], frames_per_batch=10, tensorpipe_options=chosen) as collector:
        options = rpc.api._get_current_rpc_agent()._get_backend_options()
        assert options.num_worker_threads == 3
        assert collector.next().numel() == 10


def test_a_killed_worker_is_named_with_rank_and_host():
    makers = [CountingEnv, lambda: kit.Broken("step", 30, kit.kill(signal.SIGKILL))]
    with RPCCollector(makers, frames_per_batch=20) as collector:
        host = collector.stats()["workers"][1]["host"]
        with pytest.raises(WorkerError, match=rf"rank 2 on {host}, process \d+"):
            list(collector)


def test_torch_says_nothing_when_workers_end(capfd):
    with RPCCollector([CountingEnv] * 2, frames_per_batch=10, sync=True) as collector:
        collector.next()
    assert capfd.readouterr().err == ""


def test_everything_listens_on_loopback_only():
    before = listening()
    with RPCCollector([CountingEnv], frames_per_batch=10) as collector:
        assert collector.next().numel() == 10
        ours = listening() - before
    assert len(ours) >= 3  # the gate, the store, the agent
    assert {address for address, _ in ours} == {"0100007F"}


def listening() -> set[tuple[str, str]]:
    """Return the addresses, in hexadecimal, and sockets that this process listens on."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    own = {os.readlink(link) for link in links if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add((words[1].split(":")[0], words[9]))
    return found
