"""Actors on this machine are spoken with as processes are; others through Ray."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import multi_kit as kit
import pytest
import torch

from swath.collectors.distributed import RayCollector
from swath.links.door import Door
from swath.memory import SharedMemory
from swath.testing import CountingEnv, SlowEnv, check_transitions
from swath.workers.place import _OPEN_DESCRIPTORS


class Nowhere(Door):
    """A door that nobody finds."""

    def __init__(self):
        super().__init__()
        self.name = None


pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]
KINDS = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def mapped(about=None):
    """Count the slabs that a process maps."""
    return Path("/proc/self/maps").read_text().count("/memfd:swath")


def described():
    """Count the descriptors of slabs in this process."""
    found = 0
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            found += "/memfd:swath" in os.readlink(f"/proc/self/fd/{one}")
    return found


def slabs(collector):
    """Return the memory that batches are views of."""
    rounds = [collector._pool] if hasattr(collector, "_pool") else collector._pools.values()
    return [slab.memory for pool in rounds for _, slab in pool._lent.values()]


@KINDS
def test_actors_here_fill_the_slab_itself(sync):
    with RayCollector([CountingEnv] * 2, sync=sync, frames_per_batch=40, seed=1) as collector:
        batches = [collector.next() for _ in range(30)]
        assert [link.near for link in collector._crew.links.values()] == [True, True]
        memories = slabs(collector)
        assert len(memories) >= 30  # and those that nobody has asked for yet
        assert all(isinstance(memory, SharedMemory) for memory in memories)
        # What an actor writes is what a batch shows: the same memory, not a copy.
        assert sum(collector.map_fn(mapped)) >= len(batches) * (2 if sync else 1)
    check_transitions(batches)


@KINDS
def test_those_that_cannot_map_it_send_it(sync, monkeypatch):
    """Every other actor finds no door, as if it were elsewhere."""
    kinds = itertools.cycle([Door, Nowhere])
    monkeypatch.setattr("swath.workers.ray.Door", lambda: next(kinds)())
    options = {"sync": sync, "frames_per_batch": 40, "total_frames": 1200, "seed": 1}
    with RayCollector([CountingEnv] * 2, **options) as collector:
        batches = list(collector)
        assert [link.near for link in collector._crew.links.values()] == [True, False]
    assert check_transitions(batches) == 1200


@KINDS
def test_what_is_said_to_an_actor_here_does_not_pass_through_ray(sync):
    class Silent:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was called")

    policy, batches = kit.Telling(), []
    with RayCollector([kit.wide] * 2, policy, sync=sync, frames_per_batch=40) as collector:
        links = list(collector._crew.links.values())
        assert all(link.near for link in links)
        actors = [link._actor for link in links]
        for link in links:
            link._actor = Silent()
        for number in range(20):
            batches.append(collector.next())
            assert kit.told_right(batches[-1])
            collector.update_policy_weights_(policy.become(number + 1))
        for link, actor in zip(links, actors, strict=True):
            link._actor = actor
    check_transitions(batches)


@KINDS
def test_an_actor_that_is_started_again_elsewhere_has_what_it_had(sync, monkeypatch):
    """On this machine at first, then not, then again; no weights are published meanwhile."""
    policy, batches, kind = kit.Telling(), [], [Door]
    monkeypatch.setattr("swath.workers.ray.Door", lambda: kind[0]())
    with RayCollector([kit.wide] * 2, policy, sync=sync, frames_per_batch=40) as collector:
        collector.update_policy_weights_(policy.become(1), worker_ids=0)
        collector.update_policy_weights_(policy.become(2), worker_ids=1)
        for kind[0], restarts in ((Nowhere, 1), (Door, 2)):
            batches += [collector.next() for _ in range(4)]
            os.kill(collector._crew.links[0].pid, signal.SIGKILL)
            while collector.stats()["restarts"] < restarts or collector._starting:
                batches.append(collector.next())
            near = [link.near for link in collector._crew.links.values()]
            assert sorted(near) == [kind[0] is Door, True]
            batches += [collector.next() for _ in range(4)]
            assert collector.map_fn(lambda about: about.policy.weight.item()) == [1.0, 2.0]
        assert all(kit.told_right(batch) for batch in batches)
    check_transitions(batches)


def test_weights_reach_more_actors_than_a_block_has_readers(monkeypatch):
    monkeypatch.setattr("swath.workers.ray._READERS", 2)
    policy = kit.Telling()
    with RayCollector([kit.wide] * 3, policy, sync=True, frames_per_batch=30) as collector:
        collector.update_policy_weights_(policy.become(1))
        collector.add_collectors(2)
        while collector.next().batch_size[0] < 5:
            pass
        for number in range(2, 6):
            collector.update_policy_weights_(policy.become(number))
            batch = collector.next()
            assert kit.told_right(batch)
            assert (batch["action"] == number).all()


def test_who_is_not_let_in_is_spoken_with_through_ray(monkeypatch):
    def refuse(door):
        raise PermissionError("it is somebody else")

    monkeypatch.setattr(Door, "open", refuse)
    with RayCollector([CountingEnv] * 2, sync=True, frames_per_batch=40) as collector:
        batches = [collector.next() for _ in range(5)]
        assert [link.near for link in collector._crew.links.values()] == [False, False]
    assert check_transitions(batches) == 200


@KINDS
def test_who_keeps_every_batch_uses_up_no_descriptors_and_who_lets_go_no_memory(sync):
    makers, others = [CountingEnv] * 2, mapped()
    with RayCollector(makers, sync=sync, frames_per_batch=20, seed=1) as collector:
        before = described()
        kept = [collector.next() for _ in range(_OPEN_DESCRIPTORS + 40)]
        assert described() <= before + _OPEN_DESCRIPTORS
        assert all(isinstance(one, SharedMemory) for one in slabs(collector))
        assert check_transitions(kept) == 20 * len(kept)
        assert sum(collector.map_fn(mapped)) > len(kept)
        kept.clear()
        for _ in range(100):
            if (
                max(mapped() - others, *collector.map_fn(mapped)) < 20
            ):  # a few wait to be used again
                break
            for _ in range(20):
                collector.next()
        else:
            pytest.fail("memory is kept that nobody has any more")


def test_a_killed_actor_is_dead_before_anybody_hears_of_it():
    """Ray would say so while it still writes."""
    maker = [lambda: SlowEnv(0.001)] * 2
    with RayCollector(maker, sync=True, frames_per_batch=200, seed=1) as collector:
        batches = [collector.next() for _ in range(2)]
        link = collector._crew.links[0]
        pid = link.pid
        link.kill()
        assert not kit.alive(pid)
        batches += [collector.next() for _ in range(2)]
        assert collector.stats()["per_worker"][0]["restarts"] == 1
    check_transitions(batches)


def test_one_that_stands_still_ends_too(monkeypatch):
    monkeypatch.setattr("swath.links.ray._ENDING", 500)
    maker = [lambda: SlowEnv(0.001)] * 2
    with RayCollector(maker, sync=False, frames_per_batch=20, seed=1) as collector:
        collector.next()
        link = collector._crew.links[1]
        pid = link.pid
        os.kill(pid, signal.SIGSTOP)
        link.kill()
        assert not kit.alive(pid)
        for _ in range(10):
            collector.next()


def test_a_batch_outlives_its_actor_and_the_cluster_of_others():
    with RayCollector([CountingEnv] * 2, frames_per_batch=20, seed=1) as collector:
        batch = collector.next()
        copy = batch.clone()
    time.sleep(0.2)
    assert (batch == copy).all()
    batch["observation"].add_(1)  # it is memory like any other
    assert not torch.equal(batch["observation"], copy["observation"])
