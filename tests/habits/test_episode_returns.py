"""Returns and lengths of single episodes are to be had, wherever people look for them."""

from __future__ import annotations

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv

PATHS = [("episode", "r"), ("episode", "l")]


def made():
    return RecordEpisodeStatistics(CountingEnv())


def vector(mode):
    return GymEnv(SyncVectorEnv([made] * 3, autoreset_mode=mode), info_keys=PATHS)


WAYS = {
    "lone": lambda: GymEnv(made(), info_keys=PATHS),
    "serial": lambda: SerialEnv(3, made, info_keys=PATHS),
    "parallel": lambda: ParallelEnv(3, made, info_keys=PATHS),
    **{mode.name: lambda mode=mode: vector(mode) for mode in AutoresetMode},
    "around a vector env": lambda: GymEnv(
        gym.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv([CountingEnv] * 3)),
        info_keys=PATHS,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_gymnasiums_wrapper_reports_stands_where_an_episode_ended(way):
    with Collector(WAYS[way](), frames_per_batch=150, seed=0) as collector:
        batch = collector.next()
        ended = collector.take_episodes()
    if ("collector", "mask") in batch.keys(True):
        batch = batch[batch["collector", "mask"]]
    done = batch["next", "done"][..., 0]
    told = batch["next", "info", "episode"][done]
    assert len(ended["return"]) == done.sum() > 0
    assert sorted(told["r"].tolist()) == pytest.approx(sorted(ended["return"]), abs=1e-5)
    assert sorted(told["l"].tolist()) == sorted(ended["length"])
    assert batch["next", "info", "episode", "r"][~done].isnan().all()


def test_it_has_the_form_of_its_space():
    form = {("episode", "l"): spaces.Box(0, 1000, (), np.int32)}
    with Collector(GymEnv(made(), info_keys=form), frames_per_batch=80, seed=0) as collector:
        batch = collector.next()
    lengths = batch["next", "info", "episode", "l"]
    assert lengths.dtype == torch.int32
    assert torch.equal(lengths > 0, batch["next", "done"][:, 0])


def test_an_entry_that_never_comes_is_told_of_and_one_that_is_no_name_refused():
    env = GymEnv(made(), info_keys=[("episode", "rr"), ("gone", "r"), "step"])
    with Collector(env, frames_per_batch=80, seed=0) as collector:
        with pytest.warns(UserWarning, match=r"names \('episode', 'rr'\), \('gone', 'r'\), but no"):
            collector.next()
    for name in (("episode", 1), (), 7):
        with pytest.raises(UsageError, match=rf"info_keys has {re.escape(repr(name))}; expected a"):
            GymEnv(made(), info_keys=[name])


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_the_returns_of_workers_are_those_of_their_batches(kind):
    with kind([CountingEnv] * 2, frames_per_batch=60, total_frames=240, seed=0) as collector:
        returns, ends = [], 0
        for batch in collector:
            ends += int(batch["next", "done"].sum())
            returns += collector.take_episodes()["return"]
        assert len(returns) == ends > 0
        assert collector.take_episodes() == {"return": [], "length": []}
