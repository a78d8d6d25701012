"""What only RPC has, and what it cannot do; its promises are in `tests/backends`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import multi_kit as kit
import pytest
import torch.distributed.rpc as rpc

from swath.collectors.distributed import RPCCollector
from swath.errors import UsageError, WorkerError
from swath.testing import CountingEnv

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("torch_keeps_its_last_agent"),
]


def test_one_at_a_time_and_one_after_the_other():
    with RPCCollector([CountingEnv], frames_per_batch=10) as collector:
        with pytest.raises(UsageError, match="can only be in one"):
            RPCCollector([CountingEnv], frames_per_batch=10)
        assert collector.next().numel() == 10
    with RPCCollector([CountingEnv], frames_per_batch=10) as collector:
        assert collector.next().numel() == 10
    assert "TP_SOCKET_IFNAME" not in os.environ


def test_another_backend_changes_nothing():
    with RPCCollector([CountingEnv], frames_per_batch=10, backend="gloo") as collector:
        assert rpc.api._is_current_rpc_agent_set()
        assert collector.next().numel() == 10


def test_what_rpc_cannot_do_is_refused_at_construction():
    for words, options in {
        "a process cannot rejoin": {"on_worker_failure": "restart"},
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
        host = collector.stats()["per_worker"][1]["host"]
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
