"""What somebody tries first: names of the package, what a shell and `print` show of things."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import swath
from swath.collectors import Collector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.envs import SerialEnv, TorchCartPole
from swath.errors import UsageError
from swath.testing import CountingEnv

RUN = [sys.executable, "-m", "swath"]


def test_the_names_used_most_come_from_the_package_itself():
    for name in swath.__all__:
        assert name in dir(swath)
        assert getattr(swath, name) is not None
    assert swath.Collector is Collector
    assert swath.ReplayBuffer is ReplayBuffer
    with pytest.raises(AttributeError, match="no attribute 'Collektor'"):
        _ = swath.Collektor


def test_importing_swath_imports_nothing_large_and_type_checkers_see_its_names():
    code = "import sys, swath; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False False\n", "")
    source = Path(swath.__file__).read_text()
    for name in swath._HOMES:
        assert f"import {name} as {name}\n" in source


def test_python_m_swath_is_the_command():
    done = subprocess.run([*RUN, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"swath {swath.__version__}\n")
    done = subprocess.run([*RUN, "collect", "-h"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--frames" in done.stdout


def test_a_shell_completes_commands():
    asked = {"_SWATH_COMPLETE": "complete_bash", "COMP_WORDS": "swath co", "COMP_CWORD": "1"}
    code = "import sys; from swath.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **asked},
    )
    assert done.stdout.split() == ["collect"]


def test_a_collector_says_what_it_is_whether_open_or_closed_and_starts_nothing():
    collector = Collector(SerialEnv(2, CountingEnv), frames_per_batch=6, total_frames=12)
    assert repr(collector) == (
        "Collector(frames_per_batch=6, total_frames=12, frames=0, policy_version=0)"
    )
    collector.next()
    collector.shutdown()
    assert repr(collector) == (
        "Collector(frames_per_batch=6, total_frames=12, frames=6, policy_version=0, closed=True)"
    )
    assert repr(Collector.__new__(Collector)) == "<Collector, not made yet>"
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=6) as workers:
        assert repr(workers) == (
            "MultiSyncCollector(num_workers=2, frames_per_batch=6, frames=0, policy_version=0)"
        )


def test_envs_and_buffers_say_what_they_are():
    assert repr(TorchCartPole(3, device="cpu")) == (
        "TorchCartPole(num_envs=3, device='cpu', max_episode_steps=500)"
    )
    buffer = ReplayBuffer(100, batch_size=4)
    buffer.add(TensorDict({"a": torch.ones(2)}, []))
    assert repr(buffer) == (
        "ReplayBuffer(capacity=100, frames=1, storage='memory', sampler=UniformSampler, "
        "batch_size=4)"
    )
    buffer.close()
    assert repr(buffer).endswith(", batch_size=4, closed=True)")
    assert repr(ReplayBuffer.__new__(ReplayBuffer)) == "<ReplayBuffer, not made yet>"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_size": 10}, "no argument 'max_size'. Did you mean 'capacity'?"),
        ({"capacity": 10, "sampller": "uniform"}, "'sampller'. Did you mean 'sampler'?"),
        ({}, "capacity is missing: give ReplayBuffer"),
        ({"capacity": 1e4}, "capacity=10000.0 must be a whole number of frames, an int. Write 10_"),
        ({"capacity": "10"}, "capacity='10' must be a whole number of frames, an int."),
        ({"capacity": True}, "capacity=True must be"),
        ({"capacity": 2.5}, "capacity=2.5 must be"),
    ],
)
def test_what_a_buffer_is_given_by_habit_is_refused_with_what_was_meant(arguments, words):
    with pytest.raises(UsageError) as caught:
        ReplayBuffer(**arguments)
    assert words in str(caught.value)


def test_a_buffer_takes_numpys_numbers_and_dicts_of_values():
    buffer = ReplayBuffer(np.int64(4))
    for number in range(6):
        buffer.add({"observation": [number, 0], "next": {"reward": float(number)}, "x": np.ones(3)})
    assert buffer[0]["observation"].tolist() == [2, 0]
    assert buffer[-1]["next", "reward"].item() == 5.0
    assert buffer[1:3]["observation"][:, 0].tolist() == [3, 4]
    assert buffer[[0, 3]].batch_size == torch.Size([2])
    assert buffer[torch.tensor([3])]["index"].tolist() == [5]
    with pytest.raises(IndexError):
        _ = buffer[4]
    with pytest.raises(UsageError, match=r"add\(\) takes one frame.*; got list"):
        buffer.add([1])
    with pytest.raises(UsageError, match=r"cannot store 'x': str has no array form"):
        buffer.add({"x": "text"})
    with pytest.raises(UsageError, match=r"this one has \[2\]. Give batches to extend"):
        buffer.add(TensorDict({"observation": torch.ones(2, 2)}, [2]))


def test_frames_that_are_taken_by_their_place_are_copies_and_no_samples():
    buffer = ReplayBuffer(4)
    buffer.add({"x": 1})
    buffer[0]["x"].fill_(9)
    assert buffer[0]["x"].item() == 1
    assert buffer.stats()["samples"] == 0
    with pytest.raises(IndexError):
        _ = ReplayBuffer(4)[0]
