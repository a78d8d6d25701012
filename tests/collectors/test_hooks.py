"""Hooks that are set, changed and taken away after construction; they run in this process."""

from __future__ import annotations

import os

import pytest
from multi_kit import KINDS as MAKERS

from swath.collectors import Collector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.errors import UsageError
from swath.testing import CountingEnv


def alone(makers, **options):
    return Collector(makers[0], **options)


@pytest.mark.parametrize("kind", ["alone", *MAKERS])
def test_a_hook_that_is_set_later_is_called(kind):
    make = {"alone": alone, **MAKERS}[kind]
    calls = []
    with make([CountingEnv], frames_per_batch=10, total_frames=50) as collector:
        assert collector.pre_collect_hook is None
        assert collector.post_collect_hook is None
        batches = [collector.next()]

        def before():
            calls.append(os.getpid())

        def after(batch):
            calls.append(batch)

        collector.pre_collect_hook, collector.post_collect_hook = before, after
        assert collector.pre_collect_hook is before
        assert collector.post_collect_hook is after
        batches += [collector.next(), collector.next()]
        collector.pre_collect_hook = collector.post_collect_hook = None
        batches += list(collector)
    assert len(batches) == 5
    assert calls[::2] == [os.getpid()] * 2
    assert calls[1] is batches[1]
    assert calls[3] is batches[2]


def test_a_hook_of_the_options_is_seen_and_can_be_replaced():
    first, second = [], []
    with Collector(
        CountingEnv, frames_per_batch=10, total_frames=20, post_collect_hook=first.append
    ) as collector:
        assert collector.post_collect_hook == first.append
        collector.next()
        collector.post_collect_hook = second.append
        collector.next()
    assert (len(first), len(second)) == (1, 1)


@pytest.mark.parametrize("name", ["pre_collect_hook", "post_collect_hook"])
def test_what_cannot_be_called_is_no_hook(name):
    with Collector(CountingEnv, frames_per_batch=10) as collector:
        with pytest.raises(UsageError, match=f"{name} must be callable; got int 3"):
            setattr(collector, name, 3)
        assert getattr(collector, name) is None


def test_a_hook_that_would_see_nothing_is_refused():
    buffer = ReplayBuffer(1000, batch_size=8, storage="shared", min_size=20)
    seen = []
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=20, replay_buffer=buffer
    ) as collector:
        collector.start()
        buffer.sample()
        assert collector.stats()["replay"]["writer"] == "workers"
        with pytest.raises(UsageError, match=r"write to the replay buffer directly.*postproc"):
            collector.post_collect_hook = seen.append
        collector.post_collect_hook = None  # as it was


def test_a_hook_that_is_set_before_start_lets_this_process_write():
    buffer = ReplayBuffer(1000, batch_size=8, storage="shared", min_size=20)
    seen = []
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=20, replay_buffer=buffer
    ) as collector:
        collector.post_collect_hook = seen.append
        collector.start()
        buffer.sample()
        assert "post_collect_hook" in collector.stats()["replay"]["writer"]
    assert seen
