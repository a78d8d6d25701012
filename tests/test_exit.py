"""A script that ends without `shutdown()` ends with the code that it has, whatever is under way."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
from swath.preload import preload; preload()
import warnings; warnings.simplefilter("ignore")
import sys, time, torch
from swath import helpers
from swath.collectors import Collector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.testing import CountingEnv
helpers._STEP = helpers._LAST = 0.3

class Sleeping(CountingEnv):
    def step(self, action):
        print("in step", flush=True)
        time.sleep(3600)

class Computing(CountingEnv):
    def step(self, action):
        print("in step", flush=True)
        while True:
            torch.ones(300, 300) @ torch.ones(300, 300)

def policy(observation):
    return (observation[..., 0] > 0).long()

def started(kind=Collector, env=CountingEnv, policy=policy, **options):
    buffer = ReplayBuffer(1000, batch_size=8, **options)
    collector = kind([env], policy, frames_per_batch=20, replay_buffer=buffer)
    collector.start()
    return buffer
"""
ENDS = {
    "in the background": "buffer = started()\nfor _ in range(20): buffer.sample()",
    "over workers": "buffer = started(MultiSyncCollector)\nfor _ in range(20): buffer.sample()",
    "with workers that write": "buffer = started(MultiSyncCollector, storage='shared')\n"
    "for _ in range(20): buffer.sample()",
    "drawn ahead": "buffer = ReplayBuffer(1000, batch_size=8, prefetch=2)\n"
    "buffer.extend(Collector([CountingEnv], frames_per_batch=200).next())\n"
    "for _ in range(20): buffer.sample()",
    "held to a ratio": "buffer = started(samples_per_insert=1, tolerance=0)\ntime.sleep(0.3)",
    "asleep": "buffer = started(env=Sleeping)\ntime.sleep(0.3)",
    "computing": "buffer = started(env=Computing)\ntime.sleep(0.3)",
}
CASES = [("in the background", "", 0), ("in the background", "1 / 0", 1)]
CASES += [(name, "sys.exit(3)", 3) for name in ENDS]


@pytest.mark.parametrize(("name", "last", "code"), CASES)
def test_it_ends_with_its_own_code(name, last, code):
    script = [sys.executable, "-c", f"{HEAD}\n{ENDS[name]}\n{last}"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=50)
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)
    assert bool(done.stderr) == (code == 1), done.stderr
