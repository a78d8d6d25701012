"""Statistics."""

from __future__ import annotations

import gc
import json
import pickle
import re
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from multi_kit import KINDS

from swath.collectors import Collector
from swath.data import ReplayBuffer
from swath.envs import SerialEnv, TorchCartPole
from swath.errors import UsageError
from swath.observe import Episodes
from swath.rollout import DeviceRunner
from swath.testing import CountingEnv


class Fixed(gym.Env):
    """Episodes of a given length with reward 2 a step; a step can take a while."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, seconds=0.0):
        self.length, self.seconds = length, seconds

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.seconds:
            time.sleep(self.seconds)
        return np.zeros(1, np.float32), 2.0, self.t == self.length, False, {}


def test_episodes_are_counted_with_their_return_and_length():
    env = SerialEnv(2, [lambda: Fixed(5), lambda: Fixed(7)])
    with Collector(env, frames_per_batch=22) as collector:
        assert collector.stats()["return"] is None
        for _ in range(7):  # 77 steps of each: 15 episodes of 5, 11 of 7
            collector.next()
        stats = collector.stats()
    assert (stats["frames"], stats["batches"], stats["episodes"]) == (154, 7, 26)
    mean = (15 * 5 + 11 * 7) / 26
    expected = {"mean": mean, "min": 5, "max": 7, "last_100": mean}
    assert stats["length"] == pytest.approx(expected)
    assert stats["return"] == pytest.approx({k: 2 * v for k, v in expected.items()})
    assert stats["frames_per_second"] > 0


def test_the_last_hundred_forget_what_was_before():
    lengths = iter([50] + [3] * 200)

    class Varying(Fixed):
        def reset(self, *, seed=None, options=None):
            self.length = next(lengths)
            return super().reset()

    with Collector(Varying, frames_per_batch=50 + 3 * 120) as collector:
        collector.next()
        length = collector.stats()["length"]
    assert length["last_100"] == 3
    assert length["max"] == 50
    assert length["mean"] == pytest.approx((50 + 3 * 120) / 121)


@pytest.mark.parametrize("slow", ["env", "policy"])
def test_the_slow_part_has_the_largest_share_of_the_time(slow):
    def policy(observation):
        if slow == "policy":
            time.sleep(0.005)
        return torch.tensor(0)

    env = Fixed(50, 0.005 if slow == "env" else 0.0)
    with Collector(env, policy, frames_per_batch=64) as collector:
        for _ in range(3):
            collector.next()
        shares = collector.stats()["time"]
    assert set(shares) == {"env", "policy", "rest"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[slow] > 0.6


def test_slow_resets_count_as_time_of_the_env():
    class SlowReset(Fixed):
        def reset(self, *, seed=None, options=None):
            time.sleep(0.05)
            return super().reset()

    with Collector(SlowReset, frames_per_batch=50) as collector:
        collector.next()
        assert collector.stats()["time"]["env"] > 0.6


def test_memory_stays_flat_while_batches_are_dropped():
    with Collector(SerialEnv(4, Fixed), frames_per_batch=40) as collector:
        for _ in range(300):
            collector.next()
        assert collector.stats()["slabs"] == 1
        for _ in collector:
            if collector.stats()["batches"] == 600:
                break
        assert collector.stats()["slabs"] <= 2


def test_a_lent_slab_is_no_garbage():
    with Collector(SerialEnv(4, Fixed), frames_per_batch=40) as collector:
        for _ in range(20):
            batch = collector.next()
            gc.collect()
            del batch
        assert collector.stats()["slabs"] == 1


def test_episodes_may_end_while_another_thread_asks_for_statistics():
    episodes = Episodes(1)

    class Meddling(float):
        """Adds an episode while it is added up itself."""

        def __radd__(self, other):
            if asked:
                episodes.record([(100.0, 1)])
            return float(self) + other

    asked: list[bool] = []
    episodes.record([(Meddling(2.0), 1), (4.0, 3)])
    asked.append(True)
    stats = episodes.as_dict()
    assert stats["episodes"] == 2
    assert stats["return"] == {"mean": 3.0, "min": 2.0, "max": 4.0, "last_100": 3.0}
    assert episodes.as_dict()["episodes"] > 2


def alone(makers, **options):
    return Collector(makers[0], **options)


@pytest.mark.parametrize("kind", ["alone", *KINDS])
def test_stats_are_plain_and_say_how_far_the_collection_is(kind):
    make = {"alone": alone, **KINDS}[kind]
    with make([CountingEnv] * 2, frames_per_batch=10, total_frames=20) as collector:
        before = collector.stats()
        assert (before["frames"], before["batches"], before["completed"]) == (0, 0, False)
        assert (before["total_frames"], before["requested_frames_per_batch"]) == (20, 10)
        collector.next()
        assert collector.stats()["frames"] == 10
        collector.next()
        stats = json.loads(json.dumps(collector.stats()))
    assert (stats["frames"], stats["batches"], stats["completed"]) == (20, 2, True)
    if kind != "alone":
        assert stats["workers"] == stats["workers_alive"] == len(stats["per_worker"])
        assert collector.stats()["workers_alive"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_of_workers_has_their_rows_where_they_were_at_first(kind):
    with KINDS[kind]([CountingEnv] * 2, frames_per_batch=10) as collector:
        collector.next()
        stats = collector.stats()
    assert [row["pid"] for row in stats["workers"]] == [row["pid"] for row in stats["per_worker"]]
    assert stats["workers"][-1] is stats["per_worker"][-1]
    assert len(stats["workers"]) == stats["workers"] == len(stats["per_worker"])
    assert type(pickle.loads(pickle.dumps(stats))["workers"]) is int


@pytest.mark.parametrize("kind", ["alone", *KINDS])
def test_stats_know_of_no_end_where_there_is_none(kind):
    make = {"alone": alone, **KINDS}[kind]
    with make([CountingEnv] * 2, frames_per_batch=10) as endless:
        assert endless.stats()["total_frames"] is None
        assert endless.stats()["completed"] is False


@pytest.mark.parametrize("kind", ["alone", *KINDS])
def test_each_episode_is_told_once(kind):
    make = {"alone": alone, **KINDS}[kind]
    with make([CountingEnv] * 2, frames_per_batch=40, total_frames=400) as collector:
        assert collector.take_episodes() == {"return": [], "length": []}
        told, batches = {"return": [], "length": []}, []
        for batch in collector:
            batches.append(batch)
            for name, values in collector.take_episodes().items():
                told[name] += values
        stats = collector.stats()
        assert collector.take_episodes() == {"return": [], "length": []}
    ended = sum(batch["next", "done"].sum().item() for batch in batches)
    assert len(told["length"]) == len(told["return"]) == stats["episodes"] == ended > 0
    assert sum(told["length"]) / ended == pytest.approx(stats["length"]["mean"])
    assert sum(told["return"]) / ended == pytest.approx(stats["return"]["mean"])


def test_episodes_that_nobody_asks_for_do_not_pile_up():
    episodes = Episodes(0)
    episodes.record([(float(n), n) for n in range(15_000)])
    assert episodes.take()["length"] == list(range(5_000, 15_000))


def test_episodes_on_a_device_are_not_told_one_by_one(monkeypatch):
    monkeypatch.setattr("swath.collectors.single.runner_for", DeviceRunner)
    with (
        Collector(TorchCartPole(4), frames_per_batch=40) as collector,
        pytest.raises(UsageError, match=r"only sums over episodes are kept.*trajs_per_batch"),
    ):
        collector.take_episodes()


def test_the_speed_is_that_of_this_object_and_of_all_the_time(monkeypatch):
    clock = iter(range(0, 10_000, 1))
    with Collector(CountingEnv, frames_per_batch=10) as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(CountingEnv, frames_per_batch=10) as collector:
        collector.load_state_dict(state)
        assert collector.stats()["frames_per_second"] == 0
        monkeypatch.setattr("swath.collectors.base.perf_counter", lambda: next(clock))
        collector.next()
        assert collector.stats()["frames_per_second"] == 10  # one second is between two looks
        assert collector.stats()["frames_per_second"] == 5
        assert collector.stats()["frames"] == 20


def test_the_table_of_the_docs_has_every_key():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "stats.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    told = set()
    for make in (alone, *KINDS.values()):
        with make(
            [CountingEnv], frames_per_batch=10, total_frames=10, replay_buffer=ReplayBuffer(100)
        ) as collector:
            told |= set(collector.stats())
    assert set(re.findall(r"`(\w+)`", rows)) >= told
