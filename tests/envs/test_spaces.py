"""Every space with a fixed form is delivered value for value; the others are refused by key."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from swath.collectors import Collector
from swath.envs import SerialEnv, as_group
from swath.errors import UsageError
from swath.testing import CountingEnv, check_replay

SEED = 2

LEAVES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "float64": spaces.Box(-1e300, 1e300, (2,), np.float64),
    "float16": spaces.Box(-2, 2, (2,), np.float16),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "int32": spaces.Box(-(2**31), 2**31 - 1, (2, 2), np.int32),
    "uint16": spaces.Box(0, 2**16 - 1, (2,), np.uint16),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "empty": spaces.Box(-1, 1, (0,), np.float32),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(4, start=-2),
    "multi discrete": spaces.MultiDiscrete([3, 2, 9]),
    "multi discrete 2d": spaces.MultiDiscrete([[3, 2], [4, 9]], start=[[1, 2], [3, 4]]),
    "multi binary": spaces.MultiBinary(4),
    "multi binary 2d": spaces.MultiBinary([2, 2]),
}
NESTED = {
    "dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,), np.float32)),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "nested": spaces.Dict(
        pair=spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(deep=spaces.Discrete(2, start=7))]),
        image=spaces.Box(0, 255, (2, 2), np.uint8),
    ),
    "tuple in tuple": spaces.Tuple(
        [spaces.Tuple([spaces.Discrete(2)]), spaces.Dict(x=spaces.Discrete(2))]
    ),
    "dict of one": spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float64)),
}
ALL = {**LEAVES, **NESTED}
every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)


@every_space
def test_observations_of_every_space_are_delivered_as_they_are(space):
    def make():
        return CountingEnv(observation_space=space)

    for envs in ([make, make], SyncVectorEnv([make] * 2)):
        with Collector(envs, frames_per_batch=40, seed=SEED) as collector:
            check_replay([collector.next(), collector.next()], make, SEED)


@every_space
# Gymnasium's vector envs give scalar actions as numbers, and its spaces then complain of it.
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array:UserWarning")
def test_actions_of_every_space_reach_the_env_as_they_are(space):
    def make():
        return CountingEnv(action_space=space)

    for envs in ([make, make], SyncVectorEnv([make] * 2)):
        with Collector(envs, frames_per_batch=40, seed=SEED) as collector:
            check_replay([collector.next(), collector.next()], make, SEED)


@every_space
def test_an_env_by_itself_takes_and_gives_every_space(space):
    env = SerialEnv(2, lambda: CountingEnv(space, space, longest=1))
    frames = []
    td = env.reset(seed=SEED)
    for _ in range(5):
        frames.append(env.rand_step(td).clone())
        td = env.reset()
    env.close()
    check_replay(torch.stack(frames, 1), lambda: CountingEnv(space, space, longest=1), SEED)


def test_keys_follow_the_nesting():
    space = NESTED["nested"]
    with Collector(CountingEnv(space, space), frames_per_batch=10) as collector:
        batch = collector.next()
    leaves = {("image",), ("pair", "0"), ("pair", "1", "deep")}
    assert {("next", *leaf) for leaf in leaves} <= set(batch.keys(True, True))
    assert {("action", *leaf) for leaf in leaves} <= set(batch.keys(True, True))
    assert {leaf if len(leaf) > 1 else leaf[0] for leaf in leaves} <= set(batch.keys(True, True))
    assert batch["image"].dtype == torch.uint8
    assert batch["pair", "0"].dtype == torch.int8
    assert batch["pair", "1", "deep"].dtype == torch.int64
    assert (batch["pair", "1", "deep"] >= 7).all()
    with Collector(CountingEnv(None, NESTED["tuple"]), frames_per_batch=10) as collector:
        assert collector.next()["observation", "1"].shape == (10, 2)


def test_a_bool_box_is_delivered_as_bool():
    class Flagging(CountingEnv):
        def _observe(self):
            return np.array([self.count % 2 == 0, True])

    env = Flagging()
    env.observation_space = spaces.Box(0, 1, (2,), bool)
    with Collector(env, frames_per_batch=20, seed=SEED) as collector:
        batch = collector.next()
    assert batch["observation"].dtype == torch.bool
    going_on = ~batch["next", "done"][:-1, 0]
    assert torch.equal(
        batch["observation"][1:][going_on], batch["next", "observation"][:-1][going_on]
    )
    assert batch["next", "observation"][:, 0].any()
    assert not batch["next", "observation"][:, 0].all()


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (spaces.Text(5), "'observation'"),
        (spaces.Dict(x=spaces.Discrete(2), words=spaces.Text(5)), "'words'"),
        (spaces.Dict(a=spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])), r"\('a', '0'\)"),
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "'observation'"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "'observation'"),
    ],
)
def test_a_space_without_a_fixed_form_is_refused_by_its_key(space, key):
    with pytest.raises(UsageError, match=rf"observation space has a \w+ at {key}, which has no"):
        as_group(CountingEnv(observation_space=space))
    key = key.replace("(", "('action', ").replace("'observation'", "'action'")
    key = key if "action" in key else rf"\('action', {key}\)"
    env = CountingEnv()
    env.action_space = space
    with pytest.raises(UsageError, match=rf"action space has a \w+ at {key}, which has no"):
        as_group(env)


def test_an_observation_that_clashes_with_a_key_of_ours_is_refused():
    space = spaces.Dict(action=spaces.Discrete(2))
    with pytest.raises(UsageError, match="two entries have the key 'action'"):
        Collector(CountingEnv(observation_space=space), frames_per_batch=10)
