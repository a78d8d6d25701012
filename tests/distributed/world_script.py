"""A script that all ranks of a world run; the first argument says what it does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time

import multi_kit as kit
import torch

from swath.collectors import Collector
from swath.collectors.distributed import DistributedCollector
from swath.errors import EnvError, UsageError, WorkerError
from swath.links.mpi import load_mpi
from swath.testing import CountingEnv, SlowEnv, check_transitions


def say(*words) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def promises(*backends: str) -> None:
    """Several collectors, one after the other, over the same ranks."""
    for backend in backends:
        options = {"frames_per_batch": 28, "backend": backend, "launch_timeout": 60}
        counts(options)
        seeds(options)
        versions(options)
        failures(options)
        say(f"{backend}: all kept")


def counts(options) -> None:
    for sync in (True, False):
        with DistributedCollector(CountingEnv, total_frames=570, sync=sync, **options) as collector:
            assert collector.num_workers == 2
            batches = list(collector)
            names = [(w["host"], w["pid"]) for w in collector.stats()["per_worker"]]
        assert check_transitions(batches) == 570
        assert len({row[0] for batch in batches for row in kit.rows(batch)}) == 2
        assert {host for host, _ in names} == {socket.gethostname()}
        assert len({os.getpid(), *(pid for _, pid in names)}) == 3
    say("every transition came once")


def seeds(options) -> None:
    common = {"seed": 5, "total_frames": 200}
    collector = DistributedCollector([CountingEnv] * 2, sync=True, **common, **options)
    ours = list(collector)
    theirs = list(Collector([CountingEnv] * 2, frames_per_batch=28, **common))
    for a, b in zip(ours, theirs, strict=True):
        for key in ("observation", "action", ("next", "observation"), ("next", "done")):
            assert torch.equal(a[key], b[key])
    say("equal seeds give equal data")
    try:
        DistributedCollector(CountingEnv, **options)
    except UsageError as error:
        say("at the same time:", error)
    collector.shutdown()


def versions(options) -> None:
    policy = kit.Telling()
    with DistributedCollector(
        [kit.wide] * 2, policy, secret="hush", total_frames=560, **options
    ) as collector:
        port = collector._crew.place._invitation.port
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            assert len(stranger.recv(32)) == 32
            stranger.sendall(bytes(64))
            assert stranger.recv(1) == b""
        for batch in collector:
            assert kit.told_right(batch)
            version = collector.update_policy_weights_(policy.become(collector.policy_version + 1))
        assert version == 20
    say("versions are right, a stranger was refused")


def failures(options) -> None:
    makers = [CountingEnv, lambda: kit.Broken("step", 9, fail)]
    with DistributedCollector(makers, **options) as collector:
        try:
            list(collector)
        except EnvError as error:
            say("env:", error)
    collector = DistributedCollector(lambda: SlowEnv(0.002), **options)
    collector.next()
    collector.shutdown()  # in the middle of rollouts
    try:
        DistributedCollector([CountingEnv] * 3, **options)
    except UsageError as error:
        say("too many:", error)


def fail():
    raise ZeroDivisionError("on purpose")


def late(backend: str) -> None:
    """A rank that is not needed comes when all is over."""
    if load_mpi().COMM_WORLD.rank == 2:  # all of them wait for each other in there
        time.sleep(6)
    makers, options = [CountingEnv], {"frames_per_batch": 28, "backend": backend}
    with DistributedCollector(makers, total_frames=56, launch_timeout=30, **options) as collector:
        assert check_transitions(list(collector)) == 56
    say("end of the script")


def hangs(backend: str) -> None:
    """A rank is stuck in code that lets no other thread of its process run."""
    end_with(lambda: ctypes.PyDLL(None).sleep(10_000), backend)


def leaves(backend: str) -> None:
    """A rank ends itself."""
    end_with(lambda: os._exit(3), backend)


def end_with(act, backend: str) -> None:
    options = {"frames_per_batch": 28, "backend": backend, "launch_timeout": 30}
    makers = [lambda: kit.Broken("step", 30, act), CountingEnv]
    collector = DistributedCollector(makers, worker_timeout=3, **options)
    say("ranks", *kit.pids_of(collector))
    try:
        list(collector)
    except WorkerError as error:
        say("worker", error.worker, "lost:", error)
    collector.shutdown(1)
    say("end of the script")


def death(backend: str) -> None:
    """A rank is killed at work; the one above it is to be told of the end all the same."""
    killed = lambda: kit.Broken("step", 30, kit.kill(signal.SIGKILL))  # noqa: E731
    options = {"frames_per_batch": 28, "backend": backend, "launch_timeout": 30}
    collector = DistributedCollector([killed, CountingEnv], **options)
    pids = kit.pids_of(collector)
    say("ranks", *pids)
    try:
        list(collector)
    except WorkerError as error:
        say("worker", error.worker, "lost:", error)
    collector.shutdown()
    assert kit.gone(pids[:1], 20)
    try:
        DistributedCollector([CountingEnv] * 2, **options)
    except WorkerError as error:
        say("afterwards:", error)
    say("end of the script")


def trainer(backend: str) -> None:
    """Rank 0 is killed at work."""
    collector = DistributedCollector(
        lambda: SlowEnv(0.01), frames_per_batch=28, backend=backend, launch_timeout=30
    )
    collector.next()
    say("ranks", *kit.pids_of(collector))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
