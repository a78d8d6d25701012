"""What differs between platforms, with what others lack taken away."""

from __future__ import annotations

import os
import platform
import sys

import pytest

from swath import system
from swath.errors import UsageError


def files_of(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


CGROUPS = {
    "no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "v2, in a container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
        2.0,
    ),
    "v2, an ancestor has less": (
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/job/cpu.max": "800000 100000\n",
        },
        1.5,
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "v1, a container sees only the end of its path": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n0::/docker/ab\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        0.5,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "none of it can be read": ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, None),
    "not what is expected": ({"proc/self/cgroup": "?\n0::/\n", "sys/fs/cgroup/cpu.max": "?"}, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_quotas_of_cgroups_are_read(case, tmp_path):
    files, quota = CGROUPS[case]
    files_of(tmp_path, files)
    assert system.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("cores", "quota", "usable"), [(64, 2, 2), (64, 0.5, 1), (2, 8, 2)])
def test_a_container_on_a_large_machine_uses_only_what_its_quota_allows(
    cores, quota, usable, tmp_path, monkeypatch
):
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    files_of(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert system.usable_cpus(tmp_path) == cores
    files_of(tmp_path, {"sys/fs/cgroup/cpu.max": f"{int(quota * 100_000)} 100000\n"})
    assert system.usable_cpus(tmp_path) == usable


def test_cpus_are_counted_with_what_the_platform_has(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert system.usable_cpus(tmp_path) == 3
    monkeypatch.delattr(os, "process_cpu_count")
    assert system.usable_cpus(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert system.usable_cpus(tmp_path) == 7


@pytest.mark.processes
def test_a_parallel_env_spins_on_no_more_cpus_than_its_quota_allows(monkeypatch):
    from swath.envs import ParallelEnv
    from swath.testing import CountingEnv

    monkeypatch.setattr("swath.envs.parallel.usable_cpus", lambda: 2)
    env = ParallelEnv(4, CountingEnv)
    try:
        assert len(env.group.links) == 2
        assert env.group.spinning == 1
    finally:
        env.close()


def test_an_error_names_the_platform_and_what_to_use_there(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(UsageError, match=r"on Windows: they need Unix sockets.*Use Collector"):
        system.check_can_start_workers()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(UsageError, match=r"do not work on Windows.*storage='memory'"):
        system.check_can_share_files()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert system.platform_name() == "macOS"
