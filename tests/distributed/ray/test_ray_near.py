"""Actors on this machine fill memory of this process; what they cannot map travels."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from swath.collectors.distributed import RayCollector
from swath.memory import SharedMemory
from swath.testing import CountingEnv, SlowEnv, check_transitions
from swath.workers.ray import _MAPPED

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]
KINDS = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def mapped(about=None):
    """Count the slabs that a process maps."""
    return Path("/proc/self/maps").read_text().count("/memfd:swath-")


def described():
    """Count the descriptors of slabs in this process."""
    found = 0
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed by now
            found += "/memfd:swath-" in os.readlink(f"/proc/self/fd/{one}")
    return found


def slabs(collector):
    """Return the memory that batches are views of."""
    rounds = [collector._pool] if hasattr(collector, "_pool") else collector._pools.values()
    return [slab.memory for pool in rounds for _, slab in pool._lent.values()]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@KINDS
def test_actors_here_fill_the_slab_itself(sync):
    with RayCollector([CountingEnv] * 2, sync=sync, frames_per_batch=40, seed=1) as collector:
        batches = [collector.next() for _ in range(30)]
        assert [link.near for link in collector._crew.links.values()] == [True, True]
        memories = slabs(collector)
        assert len(memories) >= 30  # and those that nobody has asked for yet
        assert all(isinstance(memory, SharedMemory) for memory in memories)
        # What an actor writes is what a batch shows: the same memory, not a copy.
        assert all(count > 1 for count in collector.map_fn(mapped))
    check_transitions(batches)


@KINDS
def test_those_that_cannot_map_it_send_it(sync, monkeypatch):
    """Half of the actors are told nothing, as if they were elsewhere."""
    from swath.workers import ray as place

    class Link(place.RayLink):
        made = 0

        def __init__(self, *given):
            Link.made += 1
            super().__init__(*given[:-1], given[-1] if Link.made % 2 else None)

    monkeypatch.setattr(place, "RayLink", Link)
    options = {"sync": sync, "frames_per_batch": 40, "total_frames": 1200, "seed": 1}
    with RayCollector([CountingEnv] * 2, **options) as collector:
        batches = list(collector)
        assert [link.near for link in collector._crew.links.values()] == [True, False]
    assert check_transitions(batches) == 1200


@KINDS
def test_who_keeps_every_batch_uses_up_no_descriptors_and_who_lets_go_no_memory(sync):
    makers = [CountingEnv] * 2
    with RayCollector(makers, sync=sync, frames_per_batch=20, seed=1) as collector:
        before = described()
        kept = [collector.next() for _ in range(_MAPPED + 40)]
        assert described() <= before + _MAPPED
        shared = sum(isinstance(one, SharedMemory) for one in slabs(collector))
        assert _MAPPED - 8 <= shared <= _MAPPED  # some may be under way
        assert check_transitions(kept) == 20 * len(kept)
        assert max(collector.map_fn(mapped)) > (_MAPPED if sync else _MAPPED / 4)
        kept.clear()
        for _ in range(100):
            if max(collector.map_fn(mapped)) < 20:  # a few wait to be used again
                break
            for _ in range(20):
                collector.next()
        else:
            pytest.fail("actors keep what nobody has any more")


def test_a_killed_actor_is_dead_before_anybody_hears_of_it():
    """Ray would say so while it still writes."""
    maker = [lambda: SlowEnv(0.001)] * 2
    with RayCollector(maker, sync=True, frames_per_batch=200, seed=1) as collector:
        batches = [collector.next() for _ in range(2)]
        link = collector._crew.links[0]
        pid = link.pid
        link.kill()
        assert gone(pid)
        batches += [collector.next() for _ in range(2)]
        assert collector.stats()["workers"][0]["restarts"] == 1
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
        assert gone(pid)
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
