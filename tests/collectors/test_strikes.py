"""Ctrl-C at each place where Python looks for it, in turn: every row stays a transition."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import types

import pytest
from strike_kit import Strikes, check_cut_transitions

import swath
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import SerialEnv
from swath.testing import CountingEnv


def counts(path):
    """Tell whether a file is of the package."""
    return path.startswith(swath.__path__[0])


class Interrupted:
    """A collector that is struck in one call after the other."""

    def __init__(self, **options):
        self.collector = Collector(SerialEnv(2, CountingEnv), frames_per_batch=4, seed=0, **options)
        self.batches = []

    def call(self, method, at):
        """Call a method with signals there; return how many places there were."""
        strikes = Strikes(counts, at)
        with contextlib.suppress(KeyboardInterrupt):
            with strikes:
                batch = method()
            self.batches.append(batch)
        sys.setprofile(None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        return strikes.places

    def find_middle(self):
        """Return from which place on a signal leaves rows of a rollout over."""
        for place in range(100, 1000, 10):
            self.call(self.collector.next, [place])
            left = self.collector.partial()
            self.batches.append(left)
            if left is not None:
                return place
        raise AssertionError("no signal leaves anything over")

    def check(self):
        """Check all that was delivered or is left over; return how many frames there were."""
        while (batch := self.collector.partial()) is not None:
            self.batches.append(batch)
        frames = check_cut_transitions([batch for batch in self.batches if batch is not None])
        assert frames == self.collector.stats()["frames"]
        self.collector.shutdown()
        return frames


WHOLE = {"trajs_per_batch": 2, "traj_format": "cat"}
CASES = [
    ("next", options, apart) for options in ({}, WHOLE) for apart in (0, 1, 3, 21, 75, 89, 100)
]
CASES += [("partial", options, apart) for options in ({}, WHOLE) for apart in (0, 3)]
CASES += [("rollout", {}, apart) for apart in (0, 3, 89)]


# Python swallows what a signal raises where it lets go of a generator that is not over.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "options", "apart"), CASES)
def test_ctrl_c_anywhere_once_or_twice_leaves_every_row_a_transition(name, options, apart):
    one, missed = Interrupted(**options), 0
    middle = one.find_middle() if name == "partial" else 0
    for first in itertools.count(1):
        missed += one.call(getattr(one.collector, name), {first, first + apart}) < first
        if missed > 20:  # some calls do more than others
            break
        if name == "partial":  # so that there is something left over
            one.call(one.collector.next, [middle + first % 40])
    assert one.check() > 20
    assert first > 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("buffered", [False, True], ids=["delivered", "written"])
def test_ctrl_c_on_the_way_of_a_batch_neither_doubles_nor_loses_it(kind, buffered):
    written = []
    buffer = types.SimpleNamespace(extend=lambda batch: written.append(batch.clone()))
    options = {"replay_buffer": buffer} if buffered else {}
    with kind([CountingEnv] * 2, frames_per_batch=2, seed=0, **options) as collector:
        with Strikes(in_collectors) as all_places:
            written.append(collector.next())
        for place in range(1, all_places.places + 20):
            with contextlib.suppress(KeyboardInterrupt):
                with Strikes(in_collectors, [place]):
                    batch = collector.next()
                written.append(batch)
            sys.setprofile(None)
        for _ in range(2):  # what was on its way
            written.append(collector.next())
        frames = collector.stats()["frames"]
        left = collector.partial()
    batches = [batch for batch in (*written, left) if batch is not None]
    assert check_cut_transitions(batches) == frames


def in_collectors(path):
    """Tell whether a file is one of collectors, or of what they write to."""
    return path.startswith(f"{swath.__path__[0]}/collectors")
