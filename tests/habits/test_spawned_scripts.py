"""Functions and classes of a script work in a process that the script has spawned."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from swath.links import pack, unpack

MAIN = """
import gymnasium as gym

LENGTH = 7

class Env(gym.Wrapper):
    pass

def make_env():
    return Env(gym.make("CartPole-v1", max_episode_steps=LENGTH))

def policy(observation):
    return (observation[..., 0] > 0).long()
"""
SCRIPT = f"""{MAIN}
import sys, warnings; warnings.simplefilter("ignore")
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import torch.multiprocessing as mp
from swath.collectors import MultiSyncCollector

def longest(envs):
    return envs[0].get_wrapper_attr("spec").max_episode_steps

def collect(rank=0):
    makers = [make_env, lambda: make_env()]
    with MultiSyncCollector(makers, policy, frames_per_batch=40, postproc=lambda b: b) as collector:
        assert collector.next().numel() == 40
        assert collector.map_fn(lambda worker: LENGTH) == [7, 7]
    return 40

if __name__ == "__main__":
    if sys.argv[1] == "torch":
        mp.spawn(collect, nprocs=1)
    else:
        with ProcessPoolExecutor(1, get_context(sys.argv[1])) as pool:
            assert pool.submit(collect).result() == 40
    print("collected")
"""


def test_what_the_script_defines_is_sent_with_its_body(monkeypatch):
    script = types.ModuleType("__mp_main__")
    exec(MAIN, vars(script))
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    parcel = pack((script.make_env, script.policy, script.Env), "the job")
    monkeypatch.delitem(sys.modules, "__mp_main__")  # as in a worker
    make_env, policy, kind = unpack(parcel)
    env = make_env()
    assert env.spec.max_episode_steps == 7
    assert type(env).__name__ == kind.__name__ == "Env"
    assert policy(__import__("torch").ones(1)) == 1


@pytest.mark.parametrize("how", ["torch", pytest.param("forkserver", marks=pytest.mark.cluster)])
def test_a_spawned_process_has_workers_with_the_functions_of_the_script(tmp_path, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "train.py"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
