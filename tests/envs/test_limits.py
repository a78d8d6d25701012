"""Time limits are kept by the loop; what is delivered is what the wrapped env would give."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv


class Line(gym.Env):
    """Terminates at step `end` of an episode, if there is one."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, end=None):
        self.end = end

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.end, False, {}


class Through(gym.Wrapper):
    """Hides the wrappers below it, so that they are stepped as they are."""


def limited(end, *limits):
    env = Line(end)
    for limit in limits:
        env = TimeLimit(OrderEnforcing(env), limit)
    return env


@pytest.mark.parametrize("own", [None, 5, 9])
@pytest.mark.parametrize(
    ("end", "limits"), [(None, [7]), (7, [7]), (4, [7]), (None, [9, 6]), (3, [])]
)
def test_a_time_limit_gives_what_the_wrapped_env_gives(end, limits, own):
    batches = []
    for hide in (lambda env: env, Through):
        env = SerialEnv(2, lambda hide=hide: hide(limited(end, *limits)))
        with Collector(env, frames_per_batch=22, max_frames_per_traj=own, seed=0) as collector:
            batches.append(torch.cat([collector.next() for _ in range(5)], 1))
    seen, expected = batches
    for key in expected.keys(True, True):
        assert torch.equal(seen[key], expected[key]), key
    longest = min(x for x in (end, own, *limits, 10**9) if x is not None)
    if longest < 10**9:
        assert seen["next", "observation"].max() == longest


def test_envs_with_different_limits_are_kept_apart():
    env = SerialEnv(3, [lambda n=n: limited(None, n) for n in (2, 3, 5)])
    with Collector(env, frames_per_batch=90) as collector:
        ended = collector.next()["next", "truncated"][..., 0].sum(1)
    assert ended.tolist() == [15, 10, 6]


def test_an_env_by_itself_keeps_its_own_limit_before_and_after_a_rollout():
    env = GymEnv(limited(None, 3))
    td = env.reset()
    assert [bool(env.rand_step(td)["next", "truncated"]) for _ in range(3)] == [False, False, True]
    assert env.rollout(10).batch_size == (3,)
    td = env.reset()
    assert [bool(env.rand_step(td)["next", "truncated"]) for _ in range(3)] == [False, False, True]
    env.close()


def test_a_limit_continues_across_batches_and_through_a_saved_state():
    def make():
        return Collector(limited(None, 8), frames_per_batch=5, seed=0)

    with make() as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next()
    assert expected["next", "truncated"][..., 0].tolist() == [False, False, True, False, False]
    with make() as resumed:
        resumed.load_state_dict(state)
        assert (resumed.next() == expected).all()


def test_an_env_that_is_not_reset_stops_at_its_limit():
    env = SerialEnv(2, [lambda n=n: limited(None, n) for n in (2, 4)])
    with Collector(env, frames_per_batch=12, reset_when_done=False) as collector:
        batches = list(collector)
    assert torch.cat(batches, 1)["collector", "mask"].sum(1).tolist() == [2, 4]
