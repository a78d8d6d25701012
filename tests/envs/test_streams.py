"""Seeds, and states to resume from: the same for every kind of env, whatever stands beside it."""

import functools
import io

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from swath.collectors import Collector
from swath.envs import GymEnv, ParallelEnv, SerialEnv, TorchCartPole
from swath.errors import EnvError
from swath.testing import CountingEnv, check_replay, check_transitions

SEED = 21
# TorchRL, once imported, makes "spawn" the default, which is right but slow for a test.
forked = functools.partial(AsyncVectorEnv, context="fork")


def cart_pole():
    return gym.make("CartPole-v1")


def lean(observation):
    """Push to where the pole leans: deterministic, and falls after a while."""
    return (observation[..., 2] + 0.3 * observation[..., 0] > 0).long()


def vector(n, mode=AutoresetMode.NEXT_STEP, kind=SyncVectorEnv):
    return kind([cart_pole] * n, autoreset_mode=mode)


def collect(env, steps=60, batches=3, policy=lean, **options):
    with Collector(env, policy, **{"frames_per_batch": 4 * steps, "seed": SEED, **options}) as c:
        return torch.cat([c.next() for _ in range(batches)], -1)


FOURS = {
    "list": lambda: [cart_pole] * 4,
    "ids and objects": lambda: ["CartPole-v1", cart_pole, GymEnv("CartPole-v1"), cart_pole()],
    "vector, next step": lambda: vector(4),
    "vector, same step": lambda: vector(4, AutoresetMode.SAME_STEP),
    "vector, disabled": lambda: vector(4, AutoresetMode.DISABLED),
    "async vector": lambda: vector(4, kind=forked),
    "two vectors": lambda: [vector(2), vector(2, AutoresetMode.SAME_STEP)],
    "two serials": lambda: [SerialEnv(1, cart_pole), SerialEnv(3, cart_pole)],
    "serial and vector": lambda: [SerialEnv(2, cart_pole), lambda: vector(2)],
}


@pytest.mark.parametrize("make", FOURS.values(), ids=FOURS)
@pytest.mark.parametrize("policy", [lean, None], ids=["policy", "random"])
def test_the_stream_of_an_env_depends_on_seed_and_index_alone(make, policy):
    expected = collect(SerialEnv(4, cart_pole), policy=policy)
    assert expected["next", "done"].sum() > 4
    data = collect(make(), policy=policy)
    for key in expected.exclude(("collector", "traj_ids")).keys(True, True):
        assert torch.equal(data[key], expected[key]), key


def test_the_first_batch_is_what_gymnasium_gives_for_the_seed():
    check_replay(collect(SerialEnv(4, cart_pole), batches=1), cart_pole, SEED)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_part_of_the_envs_gives_a_part_of_the_data(n):
    whole = collect(SerialEnv(4, cart_pole))
    part = collect(SerialEnv(n, cart_pole), frames_per_batch=60 * n)
    assert torch.equal(part["observation"], whole["observation"][:n])


@pytest.mark.parametrize("make", [*FOURS.values(), lambda: TorchCartPole(4)], ids=[*FOURS, "torch"])
def test_another_seed_gives_other_data_and_set_seed_starts_again(make):
    with Collector(make(), frames_per_batch=120, seed=SEED) as collector:
        first = collector.next().clone()
        collector.set_seed(SEED + 1)
        other = collector.next().clone()
        collector.set_seed(SEED)
        again = collector.next()
    assert not torch.equal(first["observation"], other["observation"])
    assert torch.equal(first["observation"], again["observation"])
    assert torch.equal(first["action"], again["action"])
    assert again["collector", "traj_ids"].min() > other["collector", "traj_ids"].max()


class Stumbling(CountingEnv):
    """Its next reset raises what `error` holds."""

    error = None

    def _before(self, call):
        if call == "reset" and Stumbling.error is not None:
            error, Stumbling.error = Stumbling.error, None
            raise error


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [CountingEnv, Stumbling, CountingEnv],
        lambda: SyncVectorEnv([CountingEnv, Stumbling]),
        lambda: [SyncVectorEnv([CountingEnv]), Stumbling, CountingEnv],
    ],
    ids=["list", "vector", "joined"],
)
def test_a_seed_is_not_lost_by_a_first_reset_that_is_broken_off(make, saved, error):
    with Collector(make(), frames_per_batch=60) as collector:
        collector.set_seed(5)
        expected = collector.next().clone()
        collector.set_seed(5)
        Stumbling.error = error
        with pytest.raises((EnvError, KeyboardInterrupt)):
            collector.next()
        if saved:
            collector.load_state_dict(collector.state_dict())
        batch = collector.next()
        for key in ("observation", "action", ("next", "reward")):
            assert torch.equal(batch[key], expected[key]), key


def test_an_env_keeps_its_seed_until_a_reset_has_used_it():
    env = SerialEnv(2, Stumbling)
    env.set_seed(5)
    expected = env.reset()["observation"].tolist()
    env.set_seed(5)
    Stumbling.error = RuntimeError("no")
    with pytest.raises(EnvError, match="no"):
        env.reset()
    assert env.reset()["observation"].tolist() == expected
    env.close()


def test_no_two_envs_of_a_collector_share_a_stream():
    data = collect(SerialEnv(4, cart_pole))
    starts = data["observation"][:, 0]
    assert len({tuple(row) for row in starts.tolist()}) == 4


# -- states -------------------------------------------------------------------------------------


def torchrl_env():
    envs = pytest.importorskip("torchrl.envs")
    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    return envs.TransformedEnv(env, envs.StepCounter(max_steps=15))


PICKLED = {
    **{name: make for name, make in FOURS.items() if name != "async vector"},
    "serial": lambda: SerialEnv(4, cart_pole),
    "counting": lambda: [CountingEnv] * 4,
    "masked rows": lambda: gym.make_vec("CartPole-v1", 4, "vector_entry_point"),
    "infos": lambda: SerialEnv(4, CountingEnv, info_keys=["step"]),
    "torch": lambda: TorchCartPole(4, max_episode_steps=20),
    "torchrl": lambda: [torchrl_env] * 4,
}


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_a_state_resumes_bit_for_bit(make):
    with Collector(make(), frames_per_batch=4 * 13, seed=SEED) as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next().clone() for _ in range(3)]
    blob = io.BytesIO()
    torch.save(state, blob)
    blob.seek(0)
    with Collector(make(), frames_per_batch=4 * 13, seed=SEED + 1) as collector:
        collector.load_state_dict(torch.load(blob))
        for batch in expected:
            resumed = collector.next()
            assert set(resumed.keys(True, True)) == set(batch.keys(True, True))
            for key in batch.keys(True, True):
                assert torch.equal(resumed[key], batch[key]), key


def test_a_state_can_be_loaded_twice_and_into_the_collector_it_came_from():
    with Collector([CountingEnv] * 2, frames_per_batch=30, seed=SEED) as collector:
        first = collector.next().clone()
        state = collector.state_dict()
        runs = []
        for _ in range(2):
            runs.append([collector.next().clone() for _ in range(2)])
            collector.load_state_dict(state)
    assert check_transitions([first, *runs[0]]) == 90
    assert all((one == other).all() for one, other in zip(*runs, strict=True))


class Lazy(gym.Env):
    """Draws for the first time in its first step: itself, and from a space of its own."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.space = gym.spaces.Dict({"x": gym.spaces.Box(0, 1, (), np.float64)})

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        return np.array([self.np_random.random(), self.space.sample()["x"]]), 0.0, False, False, {}


LAZY = {
    "list": lambda: [Lazy] * 2,
    "serial": lambda: SerialEnv(2, Lazy),
    "parallel": lambda: ParallelEnv(2, Lazy),
    "vector": lambda: SyncVectorEnv([Lazy] * 2),
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_an_unseeded_state_resumes_what_has_not_drawn_yet(make):
    with Collector(make(), frames_per_batch=20) as collector:
        state = collector.state_dict()
        expected = collector.next()
    with Collector(make(), frames_per_batch=20) as collector:
        collector.load_state_dict(state)
        assert torch.equal(collector.next()["next", "observation"], expected["next", "observation"])


closed = []


class Noting(CountingEnv):
    def close(self):
        closed.append(id(self))


def test_the_envs_that_a_loaded_state_replaces_are_closed():
    closed.clear()
    envs = [Noting(), Noting()]
    with Collector(envs, frames_per_batch=30, seed=SEED) as collector:
        collector.load_state_dict(collector.state_dict())
        assert sorted(closed) == sorted(map(id, envs))
    assert len(closed) == 4


class Rebuilt(CountingEnv, EzPickle):
    """Pickled as gymnasium's MuJoCo, Box2D and Atari envs are: as they were made, stateless."""

    def __init__(self):
        CountingEnv.__init__(self)
        EzPickle.__init__(self)


class Unpicklable(CountingEnv):
    def __reduce__(self):
        raise TypeError("holds a socket")


UNPICKLED = {
    "AsyncVectorEnv": (
        lambda: forked([CountingEnv] * 2),
        "envs of AsyncVectorEnv live in other",
    ),
    "EzPickle": (lambda: [Rebuilt] * 2, "EzPickle only keeps how the Rebuilt was made"),
    "EzPickle in a wrapper": (
        lambda: [lambda: gym.wrappers.TimeLimit(Rebuilt(), 50)] * 2,
        "EzPickle only keeps how the Rebuilt",
    ),
    "EzPickle in a vector env": (
        lambda: SyncVectorEnv([Rebuilt] * 2),
        "EzPickle only keeps how the Rebuilt",
    ),
    "socket": (lambda: [Unpicklable] * 2, "TypeError: holds a socket"),
    "one of a joined list": (
        lambda: [Unpicklable, SyncVectorEnv([CountingEnv])],
        "TypeError: holds a socket",
    ),
}


@pytest.mark.parametrize(("make", "reason"), UNPICKLED.values(), ids=UNPICKLED)
def test_envs_that_cannot_be_pickled_start_new_episodes_and_that_is_said(make, reason):
    with Collector(make(), frames_per_batch=20, seed=SEED) as collector:
        first = collector.next().clone()
        with pytest.warns(UserWarning, match=rf"cannot be pickled \(.*({reason}).*new episodes"):
            state = collector.state_dict()
        with pytest.warns(UserWarning, match="has no envs"):
            collector.load_state_dict(state)
        second = collector.next()
    check_transitions(first)
    check_transitions(second)
    assert (second["observation"][:, 0, 2] == 0).all()
    assert second["collector", "traj_ids"].min() > first["collector", "traj_ids"].max()


@pytest.mark.parametrize("name", ["ParallelEnv", "SerialEnv"])
def test_batched_envs_of_torchrl_go_on_though_they_cannot_be_pickled(name):
    envs = pytest.importorskip("torchrl.envs")
    inner = functools.partial(envs.GymEnv, "CartPole-v1", categorical_action_encoding=True)
    kwargs = {"mp_start_method": "fork"} if name == "ParallelEnv" else {}
    env = getattr(envs, name)(2, inner, **kwargs)
    with Collector(env, frames_per_batch=40, seed=SEED) as collector:
        first = collector.next().clone()
        with pytest.warns(UserWarning, match=f"{name} loses the memory it shares with its envs"):
            collector.state_dict()
        second = collector.next()
    going_on = ~first["next", "done"][:, -1, 0]
    assert going_on.any()
    assert torch.equal(
        second["observation"][:, 0][going_on], first["next", "observation"][:, -1][going_on]
    )
