"""Every kind of env that a collector takes delivers true transitions, alone and mixed in lists."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from swath.collectors import Collector
from swath.envs import GymEnv, SerialEnv, TorchCartPole, as_group
from swath.envs.gymnasium import GymGroup
from swath.envs.joined import JoinedGroup
from swath.errors import UsageError
from swath.testing import CountingEnv, check_replay, check_transitions

ID = "SwathCounting-v0"
SEED = 11


@pytest.fixture(autouse=True)
def counting_id():
    gym.register(ID, CountingEnv, max_episode_steps=1000)
    yield
    del gym.registry[ID]


def sync(n, mode=AutoresetMode.SAME_STEP):
    return SyncVectorEnv([CountingEnv] * n, autoreset_mode=mode)


ONE = {
    "id": lambda: ID,
    "env": CountingEnv,
    "wrapped env": lambda: gym.wrappers.TimeLimit(CountingEnv(), 100),
    "class": lambda: CountingEnv,
    "callable to env": lambda: lambda: CountingEnv(),
    "callable to id": lambda: lambda: ID,
    "partial": lambda: functools.partial(CountingEnv, longest=9),
    "GymEnv of id": lambda: GymEnv(ID),
    "GymEnv of env": lambda: GymEnv(CountingEnv()),
    "callable to GymEnv": lambda: lambda: GymEnv(ID),
}
MANY = {
    "list of classes": lambda: [CountingEnv] * 4,
    "list of ids": lambda: [ID] * 4,
    "list of envs": lambda: [CountingEnv() for _ in range(4)],
    "list of gymnasium kinds": lambda: [ID, CountingEnv, CountingEnv(), GymEnv(ID)],
    "tuple": lambda: (CountingEnv,) * 4,
    "SerialEnv": lambda: SerialEnv(4, CountingEnv),
    "SerialEnv of id": lambda: SerialEnv(4, ID),
    "SerialEnv of list": lambda: SerialEnv(4, [ID, CountingEnv, lambda: GymEnv(ID), CountingEnv()]),
    "SerialEnv of SerialEnvs": lambda: SerialEnv(4, [SerialEnv(2, ID), SerialEnv(2, ID)]),
    "callable to SerialEnv": lambda: lambda: SerialEnv(4, ID),
    "list of SerialEnvs": lambda: [SerialEnv(3, ID), SerialEnv(1, ID)],
    "SyncVectorEnv": lambda: sync(4),
    "GymEnv of a vector env": lambda: GymEnv(sync(4)),
    "list of vector envs": lambda: [sync(2), lambda: sync(2, AutoresetMode.NEXT_STEP)],
    "mixed list": lambda: [CountingEnv, sync(2), GymEnv(ID)],
    "SerialEnv of vector envs": lambda: SerialEnv(4, [sync(2), sync(2)]),
}


@pytest.mark.parametrize("make", ONE.values(), ids=ONE)
def test_one_env_is_delivered_without_a_batch_dimension(make):
    with Collector(make(), frames_per_batch=37, seed=SEED) as collector:
        batches = [collector.next() for _ in range(3)]
    assert batches[0].batch_size == (37,)
    assert batches[0].names == ["time"]
    assert check_transitions(batches) == 111
    check_replay(batches, CountingEnv, SEED)


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
def test_many_envs_are_delivered_as_rows(make):
    with Collector(make(), frames_per_batch=4 * 13, seed=SEED) as collector:
        batches = [collector.next() for _ in range(3)]
    assert batches[0].batch_size == (4, 13)
    assert batches[0].names == [None, "time"]
    assert check_transitions(batches) == 156
    check_replay(batches, CountingEnv, SEED)


def test_gymnasium_envs_in_a_list_are_one_group_and_others_are_joined():
    assert isinstance(as_group([ID, SerialEnv(2, ID), GymEnv(ID)]), GymGroup)
    assert isinstance(as_group([ID, sync(1)]), JoinedGroup)


LISTS_OF_ONE = {
    "class": lambda: [CountingEnv],
    "id": lambda: [ID],
    "env": lambda: [CountingEnv()],
    "GymEnv": lambda: [GymEnv(ID)],
    "vector env": lambda: [sync(1)],
    "tuple": lambda: (CountingEnv,),
}


@pytest.mark.parametrize("make", LISTS_OF_ONE.values(), ids=LISTS_OF_ONE)
def test_a_list_of_one_has_a_dimension_of_envs(make):
    with Collector(make(), frames_per_batch=37, seed=SEED) as collector:
        batches = [collector.next() for _ in range(3)]
    assert batches[0].batch_size == (1, 37)
    assert check_transitions(batches) == 111
    check_replay(batches, CountingEnv, SEED)


def test_a_serial_env_of_one_keeps_its_batch_dimension():
    with Collector(SerialEnv(1, ID), frames_per_batch=10, seed=SEED) as collector:
        assert collector.next().batch_size == (1, 10)
    with Collector(SerialEnv(2, lambda: sync(1)), frames_per_batch=10, seed=SEED) as collector:
        assert collector.next().batch_size == (2, 5)


def test_a_torch_env_stands_beside_gymnasium_envs_of_the_same_form():
    envs = [TorchCartPole(3), "CartPole-v1"]
    with Collector(envs, frames_per_batch=200, seed=SEED) as collector:
        batch = collector.next()
    assert batch.batch_size == (4, 50)
    check_replay(batch[3:], lambda: gym.make("CartPole-v1"), SEED, first_env=3)
    start = batch["next", "done"][:, :-1, 0]
    assert torch.equal(
        batch["observation"][:, 1:][~start], batch["next", "observation"][:, :-1][~start]
    )
    assert (batch["observation"][:, 1:][start].abs() <= 0.05).all()
    assert start[:3].any()
    assert start[3].any()


def test_keyword_arguments_reach_ids_and_callables():
    with Collector(ID, frames_per_batch=10, create_env_kwargs={"longest": 1}) as collector:
        assert collector.next()["next", "done"].all()
    with Collector(
        [CountingEnv] * 2, frames_per_batch=10, create_env_kwargs={"longest": 1}
    ) as collector:
        assert collector.next()["next", "done"].all()


class NeverMade(gym.Env):
    def __init__(self):
        raise OSError("no display")


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        (lambda: None, None, "returned NoneType; expected a gymnasium id"),
        (lambda: [CountingEnv], None, "returned list"),
        (NeverMade, None, "raised OSError: no display"),
        ("Nothing-v0", None, "cannot make the env 'Nothing-v0'"),
        ("no_such_module:Env-v0", None, "cannot make the env 'no_such_module:Env-v0'"),
        (CountingEnv, {"size": 3}, "unexpected keyword"),
        (CountingEnv(), {"size": 3}, r"\['size'\] can only be given with an env id or a callable"),
    ],
)
def test_what_cannot_be_made_is_refused(source, kwargs, message):
    with pytest.raises(UsageError, match=message):
        as_group(source, kwargs)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["CartPole-v1", "Pendulum-v1"], "env 1 has observation_space"),
        ([CountingEnv, lambda: CountingEnv(gym.spaces.Discrete(3))], "env 1 has action_space"),
        ([CountingEnv, lambda: sync(2), "CartPole-v1"], "env 2 has observation_space"),
        ([CountingEnv, GymEnv(CountingEnv(), info_keys=["step"])], "the same info_keys"),
    ],
)
def test_different_envs_in_a_list_are_refused_and_closed(sources, message):
    closed = []

    class Noting(CountingEnv):
        def close(self):
            closed.append(True)

    sources = [Noting if source is CountingEnv else source for source in sources]
    with pytest.raises(UsageError, match=message):
        as_group(sources)
    assert closed == [True] * sources.count(Noting)


@pytest.mark.parametrize("make", [CountingEnv, lambda: sync(2), lambda: GymEnv(ID)])
def test_one_object_cannot_be_two_envs(make):
    env = make()
    for sources in ([env, env], [env, lambda: env]):
        with pytest.raises(UsageError, match="one env object cannot be used for several"):
            as_group(sources)
    with pytest.raises(UsageError, match="one env object cannot be used for several"):
        SerialEnv(3, env)


def test_envs_made_before_one_fails_are_closed():
    closed = []

    class Noting(CountingEnv):
        def close(self):
            closed.append(True)

    with pytest.raises(UsageError, match="no display"):
        as_group([Noting, Noting, NeverMade])
    assert closed == [True, True]


def test_closing_goes_on_when_one_env_fails_to_close():
    closed = []

    class Stuck(CountingEnv):
        def close(self):
            closed.append(self.stamp)
            raise OSError("stuck")

    envs = [Stuck() for _ in range(3)]
    with pytest.raises(OSError, match="stuck"):
        as_group(envs).close()
    assert sorted(closed) == sorted(env.stamp for env in envs)


def test_a_wrong_number_of_envs_is_refused():
    for number, makers in ((3, [ID, ID]), (2, lambda: SerialEnv(2, ID)), (1, sync(2))):
        with pytest.raises(UsageError, match=f"num_envs is {number}, but"):
            SerialEnv(number, makers)
    for number in (0, 2.0, True):
        with pytest.raises(UsageError, match="num_envs must be an int of at least 1"):
            SerialEnv(number, ID)
    with pytest.raises(UsageError, match="got int 3"):
        GymEnv(3)


def test_the_env_may_keep_and_change_what_it_gives_and_gets():
    class Reusing(gym.Env):
        observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
        action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        buffer = np.zeros(2, np.float32)

        def reset(self, seed=None, options=None):
            self.buffer[:] = 0
            return self.buffer, {}

        def step(self, action):
            self.buffer += 1
            action[:] = 7
            return self.buffer, 0.0, False, False, {}

    with Collector(Reusing(), frames_per_batch=10, seed=0) as collector:
        batch = collector.next()
    assert batch["observation"][:, 0].tolist() == list(range(10))
    assert batch["next", "observation"][:, 0].tolist() == list(range(1, 11))
    assert (batch["action"].abs() <= 1).all()
