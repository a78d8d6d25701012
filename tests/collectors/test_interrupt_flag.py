"""The flag that tells a worker to end its rollout: your process halted at each store of it."""

from __future__ import annotations

import time

import pytest
from preempt_kit import PATIENCE, Halts, Words, sleeps

from swath.collectors import MultiSyncCollector
from swath.testing import CountingEnv, check_transitions


@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_a_rollout_is_cut_or_whole_when_your_process_is_halted_at_the_flag(threshold):
    options = {"frames_per_batch": 400, "preemptive_threshold": threshold, "seed": 0}
    with MultiSyncCollector([CountingEnv] * 2, **options) as collector:
        links = collector._crew.links

        def until_all_are_idle():
            until = time.monotonic() + PATIENCE
            while not all(sleeps(link.pid) for link in links.values()):
                assert time.monotonic() < until, "a worker does not go to sleep"
                time.sleep(0.0005)

        halts, batches = Halts(until_all_are_idle), []
        for _ in range(12):
            for link in links.values():
                link._flag = Words(link._flag, halts)
            batches.append(collector.next().clone())
            for link in links.values():  # a worker that has ended is not waited for
                link._flag = link._flag._words
    assert halts.count >= 24
    check_transitions(batches)
    assert all(batch["collector", "mask"].sum() >= 200 for batch in batches)
