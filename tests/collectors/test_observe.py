"""Statistics and the progress bar."""

from __future__ import annotations

import gc
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

from swath.collectors import Collector
from swath.envs import SerialEnv
from swath.observe import Episodes


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


def test_progress_shows_frames_episodes_and_return(capsys):
    with Collector(Fixed, frames_per_batch=50, total_frames=200, progress=True) as collector:
        for _ in collector:
            pass
    shown = capsys.readouterr().out
    assert "200 frames" in shown
    assert "40 episodes" in shown
    assert "return 10.0" in shown


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
