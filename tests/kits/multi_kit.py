"""Envs, policies and helpers for tests of collectors with worker processes.

Workers import this file, so it imports no test tools.
"""

from __future__ import annotations

import os
import signal as signals
import subprocess
import time
import warnings

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from wait_kit import alive as alive
from wait_kit import gone as gone

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from swath.testing import CountingEnv, SlowEnv


def sync(makers, policy=None, **options):
    return MultiSyncCollector(makers, policy, **options)


def first_come(makers, policy=None, **options):
    return MultiAsyncCollector(makers, policy, **options)


def beside(makers, policy=None, **options):
    """Return an `AsyncCollector` over all these envs: one worker."""
    return AsyncCollector(list(makers), policy, **options)


KINDS = {"sync": sync, "async": first_come, "beside": beside}


def wide() -> gym.Env:
    """Return a counting env that takes many actions, so that an action can tell something."""
    return CountingEnv(action_space=gym.spaces.Discrete(10_000))


def slow_wide(seconds: float) -> gym.Env:
    return SlowEnv(seconds, action_space=gym.spaces.Discrete(10_000))


class Telling(nn.Module):
    """A policy whose actions tell a parameter, and whose extras tell a buffer."""

    def __init__(self, value: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(value)))
        self.register_buffer("mean", torch.tensor(float(value)))

    def become(self, value: int) -> Telling:
        with torch.no_grad():
            self.weight.fill_(value)
            self.mean.fill_(value)
        return self

    def forward(self, observation):
        lead = observation.shape[:-1]
        action = self.weight.round().long().expand(lead)
        return {"action": action, "told": self.mean.expand(lead)}


def told_right(batch, offset: int = 0) -> bool:
    """Tell whether each frame has the version of the weights that chose its action."""
    version = batch["collector", "policy_version"]
    mask = version == version
    if ("collector", "mask") in batch.keys(True):
        mask = batch["collector", "mask"]
    action, mean = batch["action"] - offset, batch["told"] - offset
    return bool(((action == version) & (mean == version))[mask].all())


class Uneven(CountingEnv):
    """Waits at every n-th step; how long is in a file, so that a test can change it."""

    def __init__(self, path: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.path = path

    def _before(self, call: str) -> None:
        while os.path.exists(self.path):
            time.sleep(0.001)


class Broken(CountingEnv):
    """Does something at one call, the first time that a marker file does not exist.

    Args:
        call: "step" or "reset".
        number: Of the call.
        what: Done there.
        once: A path that is made then, so that it is done once, restarts included.
    """

    def __init__(self, call: str, number: int, what, once: str | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.call, self.number, self.what, self.once = call, number, what, once
        self.counts = {"step": 0, "reset": 0}

    def _before(self, call: str) -> None:
        number, self.counts[call] = self.counts[call], self.counts[call] + 1
        if call != self.call or number != self.number:
            return
        if self.once is not None:
            if os.path.exists(self.once):
                return
            open(self.once, "w").close()
        self.what()


class Child(subprocess.Popen):
    """A script under way; killed at the end of the block, whatever happens there."""

    def __exit__(self, *exc_info) -> None:
        self.kill()
        super().__exit__(*exc_info)


def ended_by_ctrl_c(code: int) -> bool:
    """Tell whether a script ended as one does whose KeyboardInterrupt nobody caught.

    Python forgets how it ended, and ends with 1, if anything runs `exec` on a text at exit, as some
    libraries do.
    """
    return code in (1, -signals.SIGINT)


def kill(signal: int):
    return lambda: os.kill(os.getpid(), signal)


def exit_at_once():
    os._exit(7)


def block():
    while True:
        time.sleep(60)


def rows(batch) -> np.ndarray:
    return batch["observation"].reshape(-1, 3).numpy()


def each_once(whole, others) -> int:
    """Assert that trajectories are whole, and that no frame came twice; return how many came.

    Args:
        whole: Batches `[frames]` of whole trajectories.
        others: Batches of further frames.
    """
    for batch in whole:
        ids = batch["collector", "traj_ids"]
        for one in ids.unique():
            part = batch[ids == one]
            assert rows(part)[:, 2].tolist() == list(range(part.numel())), "a hole"
            assert part["next", "done"][:, 0].tolist() == [False] * (part.numel() - 1) + [True]
    seen = [
        tuple(row)
        for batch in [*whole, *others]
        if batch is not None  # nothing was left
        for row in rows(batch).tolist()
    ]
    assert len(set(seen)) == len(seen), "a frame came twice"
    return len(seen)


def pids_of(collector) -> list[int]:
    return [worker["pid"] for worker in collector.stats()["per_worker"]]


def warn(words: str) -> None:
    warnings.warn(words, stacklevel=2)
