"""What is made while descriptors run out: whatever was opened is closed, and the user is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from swath.preload import preload; preload()
import gc, logging, os, resource, sys, time, warnings
warnings.simplefilter("ignore")
logging.getLogger("swath").setLevel("ERROR")
from swath.collectors import MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import ParallelEnv
from swath.errors import WorkerError
from swath.links.gate import Gate
from swath.shield import Shield
from swath.testing import CountingEnv
from swath.workers.launchers import LocalLauncher
from swath.workers.place import LocalPlace
from swath.workers.remote import Invitation

class Local:
    def __init__(self):
        self.links = LocalPlace().launch(dict.fromkeys(range(3), b""), Shield())
    def close(self):
        for link in self.links.values():
            link.kill()
            link.close()

class Launching:
    def __init__(self):
        where = Invitation("127.0.0.1", 1, b"s3", 60.0)
        self.started = LocalLauncher().start(where, range(3))
    def close(self):
        for one in self.started.values():
            one.cancel()

OPTIONS = {"frames_per_batch": 30, "sync": True, "launcher": "mp"}
MAKERS = {
    "place": Local,
    "launcher": Launching,
    "gate": lambda: Gate("127.0.0.1", 0, b"s3", 60.0),
    "ParallelEnv": lambda: ParallelEnv(3, CountingEnv, num_workers=3),
    "MultiSync": lambda: MultiSyncCollector([CountingEnv] * 3, frames_per_batch=30),
    "Distributed": lambda: DistributedCollector([CountingEnv] * 3, **OPTIONS),
}

def now():
    return len(os.listdir("/proc/self/fd"))

def attempt(make, free):
    '''Make something while so many descriptors are free; return what went wrong.'''
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
    try:
        made = make()
    except Exception as error:
        return error
    else:
        end(made)
    finally:
        for one in held:
            os.close(one)

def end(made):
    (made.close if hasattr(made, "close") else made.shutdown)()

def check(name):
    before, free, error = now(), 0, True
    while error:
        error = attempt(MAKERS[name], free)
        told = isinstance(error, WorkerError) and "ulimit -n" in str(error)
        assert error is None or told or name in RAW, (name, free, repr(error))
        error = error is not None  # no more: its traceback holds what was in the frames
        deadline = time.monotonic() + 30
        while now() > before and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert now() <= before, (name, free, now(), before)
        free += 1
    print(name, "needs", free - 1, "descriptors")

RAW = ("place", "launcher", "gate")  # who uses these says it in words
names = sys.argv[1:]
for name in names:  # with the fork server, and what else stays
    end(MAKERS[name]())
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for name in names:
    check(name)
"""


@pytest.mark.parametrize(
    "names",
    [
        ("place", "launcher", "gate", "ParallelEnv", "MultiSync"),
        pytest.param(("Distributed",), marks=pytest.mark.cluster),
    ],
)
def test_what_fails_for_want_of_descriptors_leaves_none_open(names):
    """With none free, with one, and so on, until there are enough: each way to fail half way."""
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("needs") == len(names)
