"""swath without what other platforms lack: one by one, and all of it together."""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import time
from pathlib import Path

import pytest
from without_kit import MACOS, WINDOWS, run_without

from swath.collectors import MultiSyncCollector
from swath.data import ReplayBuffer
from swath.envs import ParallelEnv
from swath.errors import WorkerError
from swath.links.launch import server_pid, stop_server
from swath.testing import CountingEnv

ON_LINUX = [
    (os, "memfd_create"),
    (os, "eventfd"),
    (os, "sched_getaffinity"),
    (os, "process_cpu_count"),
    (os, "posix_fallocate"),
    (os, "pidfd_open"),
    (select, "epoll"),
    (socket, "SO_PEERCRED"),
]


@pytest.mark.parametrize(("module", "name"), ON_LINUX, ids=[name for _, name in ON_LINUX])
def test_worker_processes_do_without_what_linux_alone_has(module, name, monkeypatch, tmp_path):
    monkeypatch.delattr(module, name, raising=False)
    if name == "sched_getaffinity":  # which Python's own function asks
        monkeypatch.delattr(os, "process_cpu_count", raising=False)
    buffer = ReplayBuffer(32, storage="memmap", directory=tmp_path / "buffer", batch_size=4)
    with (
        buffer,
        MultiSyncCollector(
            [CountingEnv] * 2, None, frames_per_batch=6, total_frames=24, replay_buffer=buffer
        ) as collector,
    ):
        assert [batch for batch in collector] == [None] * 4
        assert (len(buffer), buffer.sample().numel()) == (24, 4)
    env = ParallelEnv(2, CountingEnv)
    try:
        assert env.rollout(3, break_when_any_done=False).numel() == 6
    finally:
        env.close()


def test_where_nothing_may_be_forked_each_worker_is_a_program_of_its_own(monkeypatch, capfd):
    stop_server()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    collector = MultiSyncCollector([CountingEnv] * 2, None, frames_per_batch=6)
    try:
        assert collector.next().numel() == 6
        first, second = collector.map_fn(lambda worker: (os.getpid(), os.getppid()))
        assert server_pid() is None
        assert first[1] == second[1] == os.getpid()
        os.kill(first[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=f"process {first[0]}.* was killed by SIGKILL"):
            list(collector)
    finally:
        collector.shutdown()
    assert capfd.readouterr().err == ""


AS_ON_MACOS = """
import os, tempfile
from swath.collectors import MultiAsyncCollector
from swath.data import ReplayBuffer
from swath.envs import ParallelEnv
from swath.errors import UsageError
from swath.testing import CountingEnv

env = ParallelEnv(1, CountingEnv)
print(env.rollout(3, break_when_any_done=False).numel())
env.close()
with tempfile.TemporaryDirectory() as folder:
    options = dict(storage="memmap", directory=folder + "/buffer", batch_size=4)
    buffer = ReplayBuffer(32, **options)
    collector = MultiAsyncCollector(
        [CountingEnv], None, frames_per_batch=6, total_frames=24, replay_buffer=buffer
    )
    for _ in collector:
        pass
    print(len(buffer), buffer.sample().numel())
    try:
        ReplayBuffer(32, **options)
    except UsageError as error:
        print("open in another buffer" in str(error))
    buffer.close()
    with ReplayBuffer(32, **options) as buffer:
        print(len(buffer))
print(collector.map_fn(lambda worker: os.getpid())[0], flush=True)
os._exit(0)
"""


@pytest.mark.timeout(150)
def test_worker_processes_work_with_what_macos_has(tmp_path):
    printed = run_without(MACOS, AS_ON_MACOS, tmp_path, "Darwin").splitlines()
    assert printed[:-1] == ["3", "24 4", "True", "24"]
    orphan = int(printed[-1])  # its parent has ended without a word to it
    while Path(f"/proc/{orphan}").exists():
        time.sleep(0.05)


IN_PROCESS = """
import tempfile
import gymnasium as gym, torch
import swath
from swath import cli
from swath.collectors import Collector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.data import DatasetWriter, ReplayBuffer, load_dataset
from swath.envs import GymEnv, ParallelEnv, SerialEnv, TorchCartPole
from swath.errors import UsageError
from swath.testing import CountingEnv

policy = torch.nn.Linear(4, 2)
def act(observation):
    return policy(observation).argmax(-1)

buffer = ReplayBuffer(1000, batch_size=8, prefetch=1, seed=0)
envs = SerialEnv(4, "CartPole-v1")
with Collector(envs, act, frames_per_batch=40, total_frames=120) as collector:
    for batch in collector:
        buffer.extend(batch)
    collector.update_policy_weights_()
print(len(buffer), buffer.sample().numel())
buffer.close()
with Collector(TorchCartPole(4), None, frames_per_batch=40, total_frames=40) as collector:
    print(next(iter(collector)).numel())
env = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
with Collector(env, None, frames_per_batch=30, total_frames=30) as collector:
    print(next(iter(collector)).numel())
env = GymEnv("CartPole-v1")
print(env.rollout(3, seed=0, break_when_any_done=False).numel())
env.close()
with tempfile.TemporaryDirectory() as folder:
    out = folder + "/data"
    code = cli.main(["collect", "CartPole-v1", "--envs", "2", "--frames", "100", "--out", out])
    print("\\ncode", code, load_dataset(out).numel(), cli.main(["info", out]))

def refusal(make):
    try:
        make()
    except UsageError as error:
        return str(error)

made = {
    "sync": lambda: MultiSyncCollector([CountingEnv], None, frames_per_batch=6),
    "async": lambda: MultiAsyncCollector([CountingEnv], None, frames_per_batch=6),
    "one": lambda: AsyncCollector(CountingEnv, None, frames_per_batch=6),
    "parallel": lambda: ParallelEnv(2, CountingEnv),
    "distributed": lambda: DistributedCollector([CountingEnv], None, frames_per_batch=6),
    "shared": lambda: ReplayBuffer(10, storage="shared"),
    "memmap": lambda: ReplayBuffer(10, storage="memmap", directory="x"),
}
for name, make in made.items():
    print(name, "|", refusal(make))
"""


@pytest.mark.timeout(150)
def test_without_what_windows_lacks_all_in_one_process_works_and_the_rest_says_why(tmp_path):
    lines = run_without(WINDOWS, IN_PROCESS, tmp_path, "Windows").splitlines()
    assert lines[:4] == ["120 8", "40", "30", "3"]
    assert "code 0 100 0" in lines
    refusals = dict(line.split(" | ") for line in lines if " | " in line and "│" not in line)
    assert len(refusals) == 7
    for name, text in refusals.items():
        assert "on Windows" in text, (name, text)
        assert ("storage='memory'" if name in ("shared", "memmap") else "Use Collector") in text
