"""What a `multiprocessing.Manager` hands out works in env makers, as in any other process."""

from __future__ import annotations

import multiprocessing

import pytest

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import ParallelEnv
from swath.testing import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.mark.parametrize("where", ["workers", "processes of one env"])
def test_makers_write_to_a_list_of_a_manager(where):
    with multiprocessing.Manager() as manager:
        made = manager.list()

        def make():
            made.append(multiprocessing.current_process().pid)
            return CountingEnv()

        if where == "workers":
            collector = MultiSyncCollector([make] * 2, frames_per_batch=8)
        else:
            collector = Collector(ParallelEnv(2, make), frames_per_batch=8)
        with collector:
            assert collector.next().numel() == 8
        assert len(set(made)) >= 2
