"""Hundreds of Ctrl-Cs, at any time: each arrives, once, and no frame is lost or told twice."""

import subprocess
import sys

import pytest

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.testing import CountingEnv, check_transitions

KINDS = {"one": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}

SCRIPT = """
from swath.preload import preload; preload()
import gc, random, signal, sys, threading, time
gc.disable()  # Python swallows what is raised while a weak set lets go of, say, an old thread
from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.testing import CountingEnv, check_transitions

main, chance = threading.main_thread().ident, random.Random(0)
make = {"one": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}[sys.argv[1]]

class Firing(threading.Thread):
    def __init__(self):
        super().__init__()
        self.fired, self.wanted, self.over = 0, threading.Event(), False
        self.start()

    def run(self):
        while not self.over:
            if self.wanted.wait(0.05):
                time.sleep(chance.uniform(0, 0.002))
                self.fired += 1
                self.wanted.clear()
                signal.pthread_kill(main, signal.SIGINT)

def collect(collector, firing):
    batches, arrived = [], 0
    while arrived < 60:
        try:
            firing.wanted.set()
            for data in collector:
                batches.append(data)
        except KeyboardInterrupt:
            arrived += 1
            while make is Collector and (rest := collector.partial()) is not None:
                batches.append(rest)
    assert arrived == firing.fired, (arrived, firing.fired)
    while (rest := collector.partial()) is not None:
        batches.append(rest)
    return batches

def check(**options):
    with make([CountingEnv] * 2, frames_per_batch=20, seed=0, **options) as collector:
        firing = Firing()
        try:
            batches = collect(collector, firing)
        finally:
            firing.over = True
            firing.join()
        told = collector.stats()["frames"]
        buffer = options.get("replay_buffer")
        if buffer is not None:
            batches = [batch for batch in batches if batch is not None]
            told -= buffer.stats()["frames"]
        frames = sum(batch.numel() for batch in batches)
        assert told == frames, (told, frames)
        if make is not Collector and "trajs_per_batch" not in options:
            assert check_transitions(batches) == frames

check()
check(trajs_per_batch=3, traj_format="cat")
check(postproc=lambda batch: batch.clone())
check(replay_buffer=ReplayBuffer(1_000_000))
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_arrives_and_nothing_is_lost(kind):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


class Hook:
    """Is interrupted when it is called for the third time."""

    def __init__(self):
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt


def make(kind, hook=None):
    return KINDS[kind](
        [CountingEnv], frames_per_batch=10, total_frames=50, seed=0, post_collect_hook=hook
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("how", ["next", "partial", "state"])
def test_what_a_hook_was_interrupted_with_is_not_lost(kind, how):
    with make(kind, Hook()) as collector, make(kind) as other:
        batches = [collector.next(), collector.next()]
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        if how == "partial":
            batches.append(collector.partial())
        if how == "state":
            other.load_state_dict(collector.state_dict())
        batches += list(other if how == "state" else collector)
        assert check_transitions(batches) == sum(batch.numel() for batch in batches) == 50
        assert (other if how == "state" else collector).stats()["frames"] == 50
