"""Ctrl-C at random moments, alone and two close together: every row that is delivered is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("SWATH_FUZZ_SECONDS", "5"))
KINDS = ["one", "whole", "parallel", "sync", "sync whole", "async"]

SCRIPT = """
from swath.preload import preload; preload()
import gc, os, random, signal, sys, threading, time, warnings
gc.disable()  # Python swallows what is raised while it lets go of something
warnings.simplefilter("ignore")
from strike_kit import check_cut_transitions
from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import ParallelEnv, SerialEnv
from swath.testing import CountingEnv

kind, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chance, over = random.Random(seed), threading.Event()
whole = {"trajs_per_batch": 2, "traj_format": "cat"} if "whole" in kind else {}
makers = [CountingEnv] * 2
make = {
    "one": lambda **kw: Collector(makers, **kw),
    "whole": lambda **kw: Collector(makers, **kw),
    "parallel": lambda **kw: Collector(ParallelEnv(2, CountingEnv), **kw),
    "sync": lambda **kw: MultiSyncCollector(makers, **kw),
    "sync whole": lambda **kw: MultiSyncCollector(makers, **kw),
    "async": lambda **kw: MultiAsyncCollector(makers, **kw),
}[kind]
inside, told = False, 0

def handler(*signal_and_frame):
    global told
    told += 1
    if inside:
        raise KeyboardInterrupt

def strike():
    while not over.wait(chance.uniform(0, chance.choice([0.005, 0.02, 0.1]))):
        os.kill(os.getpid(), signal.SIGINT)
        if chance.random() < 0.7:
            time.sleep(chance.choice([0, 0, 1e-4, 1e-3]))
            os.kill(os.getpid(), signal.SIGINT)

def called(method):
    global inside
    try:
        inside = True
        return method()
    except KeyboardInterrupt:
        return None
    finally:
        inside = False

def life(until):
    # Each life is short, so that each is checked whole.
    frames, seed = chance.choice([2, 4, 20]), chance.randrange(1000)
    with make(frames_per_batch=frames, seed=seed, **whole) as c:
        batches = []
        for _ in range(300):
            if time.monotonic() > until and len(batches) > 20:
                break
            method = chance.choices([c.next, c.partial, c.state_dict], [8, 1, 1])[0]
            batch = called(method)
            if batch is not None and not isinstance(batch, dict):
                batches.append(batch)
        while (rest := c.partial()) is not None:
            batches.append(rest)
        frames = check_cut_transitions(batches)
        assert frames == c.stats()["frames"], (frames, c.stats()["frames"])
    assert signal.getsignal(signal.SIGINT) is handler
    return frames

signal.signal(signal.SIGINT, handler)
striker = threading.Thread(target=strike)
striker.start()
frames, until = 0, time.monotonic() + seconds
try:
    while time.monotonic() < until:
        frames += life(until)
finally:
    over.set()
    striker.join()
assert frames, "nothing was delivered"
print(kind, "seed", seed, "signals", told, "frames", frames)
"""


@pytest.mark.fuzz
@pytest.mark.timeout(120 + 4 * SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_signals_at_random_moments(kind):
    kits = str(Path(__file__).parent / "kits")
    path = os.pathsep.join(filter(None, [kits, os.environ.get("PYTHONPATH")]))
    seed = os.environ.get("SWATH_FUZZ_SEED", "0")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, seed, str(SECONDS / len(KINDS))],
        capture_output=True,
        text=True,
        timeout=100 + 3 * SECONDS,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
