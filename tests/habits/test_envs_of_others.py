"""Envs as other packages make and register them work, or are refused by name."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import ParallelEnv, SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions


@pytest.fixture
def registered():
    """Return an id that is registered in this process only, as by an import in a script."""
    gym.register("InTheScript-v0", CountingEnv)
    yield "InTheScript-v0"
    del gym.registry["InTheScript-v0"]


MAKES = {
    "sync": lambda envs: MultiSyncCollector(envs, frames_per_batch=40),
    "async": lambda envs: MultiAsyncCollector(envs, frames_per_batch=40),
    "beside": lambda envs: AsyncCollector(envs, frames_per_batch=40),
    "parallel": lambda envs: Collector(ParallelEnv(2, envs[0]), frames_per_batch=40),
    "parallel in a worker": lambda envs: MultiSyncCollector(
        [lambda: ParallelEnv(2, envs[0])], frames_per_batch=40
    ),
}


@pytest.mark.parametrize("as_maker", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_ids_that_only_the_script_has_registered_work_in_workers(registered, make, as_maker):
    env = (lambda: gym.make(registered)) if as_maker else registered
    with MAKES[make]([env] * 2) as collector:
        assert check_transitions(collector.next()) == 40


def test_what_cannot_travel_keeps_no_other_id_from_workers(registered):
    frame = sys._getframe()
    gym.register("Stuck-v0", lambda: CountingEnv(frame))
    try:
        with MultiSyncCollector([registered], frames_per_batch=20) as collector:
            assert check_transitions(collector.next()) == 20
    finally:
        del gym.registry["Stuck-v0"]


def test_an_id_is_free_for_who_registers_it_in_the_worker(registered):
    """Gymnasium warns of an id that is registered twice."""

    def make():
        import warnings

        import gymnasium as gym

        from swath.testing import CountingEnv

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gym.register("InTheScript-v0", CountingEnv)
        return gym.make("InTheScript-v0")

    with MultiSyncCollector([make], frames_per_batch=20) as collector:
        assert check_transitions(collector.next()) == 20


@pytest.mark.parametrize("env", ["Nowhere/Env-v0", lambda: gym.make("Nowhere/Env-v0")])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_id_that_nobody_registered_names_both_ways_out(kind, env):
    with pytest.raises(UsageError, match=r"Nowhere.* in the function that .* 'ale_py:ALE/Pong-v5'"):
        kind(env if kind is Collector else [env], frames_per_batch=20)


class MissionSpace(spaces.Space):
    """As MiniGrid's: a space of texts that leaves it to the base class to say what it is."""

    def __init__(self):
        super().__init__(dtype=str, seed=None)


class Grid(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(mission=MissionSpace(), image=spaces.Box(0, 1, (2,)))


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_minigrids_missions_are_refused_by_name(kind):
    with pytest.raises(UsageError, match=r"MissionSpace at 'mission'.*ImgObsWrapper"):
        kind(Grid if kind is Collector else [Grid], frames_per_batch=20)


class Parallel:
    """As PettingZoo's envs: no Gymnasium env, but the same methods for several agents."""

    possible_agents = ("player_0", "player_1")

    def reset(self, seed=None, options=None): ...


@pytest.mark.parametrize("env", [Parallel, Parallel(), lambda: Parallel()])
def test_a_pettingzoo_env_is_said_to_have_several_agents(env):
    with pytest.raises(
        UsageError, match=r"several agents \('player_0', 'player_1'\).*PettingZooWrapper"
    ):
        Collector(env, frames_per_batch=20)


class MarkovVectorEnv(gym.vector.VectorEnv):
    """As SuperSuit's: a VectorEnv in the sense of Stable-Baselines3."""

    def __init__(self):
        self.num_envs = 2
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)


def test_a_vector_env_of_another_kind_is_refused_by_name():
    with pytest.raises(UsageError, match=r"MarkovVectorEnv is .* without single_observation_space"):
        Collector(MarkovVectorEnv(), frames_per_batch=20)


@pytest.mark.parametrize("key", ["next", "collector"])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_keys_that_are_swaths_own_are_refused_by_name(kind, key):
    class Named(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({key: spaces.Box(0, 1, (2,), np.float32)})

        def reset(self, *, seed=None, options=None):
            return {key: np.zeros(2, np.float32)}, super().reset(seed=seed)[1]

    with pytest.raises(UsageError, match=f"'{key}' is the key of a value, but .* is below it"):
        kind(Named if kind is Collector else [Named], frames_per_batch=20)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_postproc_that_returns_nothing_is_refused(kind):
    def scale(batch):
        batch["next", "reward"] *= 2

    envs = CountingEnv if kind is Collector else [CountingEnv]
    with kind(envs, frames_per_batch=20, postproc=scale) as collector:
        with pytest.raises(UsageError, match="postproc returned None; expected the batch"):
            collector.next()


def test_a_list_of_one_env_has_a_dimension_of_envs_in_every_class():
    for source in (["CartPole-v1"], [["CartPole-v1"]], SerialEnv(1, "CartPole-v1")):
        with Collector(source, frames_per_batch=6) as collector:
            assert collector.next().batch_size == (1, 6)
    for kind in (MultiSyncCollector, MultiAsyncCollector, AsyncCollector):
        with kind([["CartPole-v1"]], frames_per_batch=6) as collector:
            size = collector.next().batch_size
            assert size == ((1, 1, 6) if kind is MultiSyncCollector else (1, 6)), kind
