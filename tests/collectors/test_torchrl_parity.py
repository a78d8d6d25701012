"""The same keys, shapes, dtypes and values as TorchRL's collector gives for the same work."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from swath.collectors import Collector
from swath.envs import SerialEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class DictEnv(gym.Env):
    """A dict observation with floats, bytes and nesting; everything follows from the seed."""

    observation_space = gym.spaces.Dict(
        {
            "position": gym.spaces.Box(-10, 10, (3,), np.float32),
            "camera": gym.spaces.Box(0, 255, (4, 4, 1), np.uint8),
            "inner": gym.spaces.Dict({"speed": gym.spaces.Box(-1, 1, (2,), np.float64)}),
        }
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        end = self.np_random.random() < 0.1
        return self._observe(), float(action.sum()), end, self.t >= 12, {}

    def _observe(self):
        return {
            "position": self.np_random.uniform(-10, 10, 3).astype(np.float32),
            "camera": self.np_random.integers(0, 256, (4, 4, 1), np.uint8),
            "inner": {"speed": self.np_random.uniform(-1, 1, 2)},
        }


class Seeded(gym.Wrapper):
    """Uses its seed at the first reset, whoever asks for it."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.first_seed = seed

    def reset(self, *, seed=None, options=None):
        seed, self.first_seed = self.first_seed, None
        return super().reset(seed=seed, options=options)


WORKS = {
    "CartPole-v1": (
        lambda: gym.make("CartPole-v1"),
        lambda observation: (observation[..., 2] > 0).long(),
        ["observation"],
    ),
    "Pendulum-v1": (
        lambda: gym.make("Pendulum-v1"),
        lambda observation: observation[..., 2:].sin(),
        ["observation"],
    ),
    "DictEnv": (DictEnv, lambda position: position[..., :2].cos(), ["position"]),
}


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("work", sorted(WORKS))
def test_the_same_data_as_torchrl(work, envs):
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import GymWrapper
    from torchrl.envs import SerialEnv as TheirSerialEnv

    make, act, in_keys = WORKS[work]

    def theirs(seed):
        return lambda: GymWrapper(Seeded(make(), seed), categorical_action_encoding=True)

    policy = TensorDictModule(act, in_keys=in_keys, out_keys=["action"])
    if envs == 1:
        their_env, our_env = theirs(0)(), Seeded(make(), 0)
    else:
        their_env = TheirSerialEnv(envs, [theirs(seed) for seed in range(envs)])
        our_env = SerialEnv(envs, [lambda s=seed: Seeded(make(), s) for seed in range(envs)])
    their = TheirCollector(their_env, policy, frames_per_batch=60 * envs, total_frames=-1)
    expected = [their.next() for _ in range(4)]
    their.shutdown()
    with Collector(our_env, policy, frames_per_batch=60 * envs) as collector:
        got = [collector.next() for _ in range(4)]
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others)
    assert sum(batch["next", "done"].sum() for batch in got) > 0


def compare(ours, others):
    assert ours.batch_size == others.batch_size
    assert ours.names == others.names
    ours_only = set(ours.keys(True, True)) - set(others.keys(True, True))
    assert ours_only == {("collector", "policy_version")}
    assert not set(others.keys(True, True)) - set(ours.keys(True, True))
    for key in others.keys(True, True):
        assert ours[key].shape == others[key].shape, key
        assert ours[key].dtype == others[key].dtype, key
        assert torch.equal(ours[key], others[key]), key


def counting_module():
    """Counts its calls under three keys, and reads what it wrote; needs no initial values."""
    from tensordict.nn import TensorDictModuleBase

    class Counts(TensorDictModuleBase):
        in_keys = ("observation",)
        out_keys = ("action", "_private", "public")

        def forward(self, td):
            shape = (*td.shape, 1)
            private, public = (td.get(key, torch.zeros(shape)) for key in ("_private", "public"))
            td["_private"], td["public"] = private + 1, public + private
            return td.set("action", (td["public"] + td["observation"][..., 2:]).sin())

    return Counts()


def changed_action(td):
    """Remembers its own last action, and a number that it never stores."""
    before = td.get("action", td["observation"][..., 2:] * 0)
    td["_sum"] = td.get("_sum", before * 0) + before
    return td.empty().update({"action": (before + td["_sum"] + 1).cos(), "_sum": td["_sum"]})


def lstm(*, hidden=5):
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import LSTMModule

    torch.manual_seed(0)
    cell = LSTMModule(
        input_size=3,
        hidden_size=hidden,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
    )
    head = TensorDictModule(torch.nn.Linear(hidden, 1), ["features"], ["action"])
    return cell, TensorDictSequential(cell, head)


def pendulum(seed, transforms=()):
    from torchrl.envs import GymWrapper, StepCounter, TransformedEnv

    env = TransformedEnv(GymWrapper(Seeded(gym.make("Pendulum-v1"), seed)), StepCounter(7))
    for transform in transforms:
        env.append_transform(transform)
    return env


def of_both(make_env, policy, envs, **theirs):
    """Batches of both libraries for the same work."""
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import SerialEnv as TheirSerialEnv

    def made():
        makers = [lambda s=seed: make_env(s) for seed in range(envs)]
        return makers[0]() if envs == 1 else TheirSerialEnv(envs, makers)

    their = TheirCollector(made(), policy, frames_per_batch=20 * envs, total_frames=-1, **theirs)
    expected = [their.next().clone() for _ in range(3)]
    their.shutdown()
    with Collector(made(), policy, frames_per_batch=20 * envs, **theirs) as collector:
        return [collector.next() for _ in range(3)], expected


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("policy", [counting_module(), changed_action], ids=["module", "function"])
def test_what_a_policy_writes_comes_back_to_it_as_with_torchrl(policy, envs):
    got, expected = of_both(pendulum, policy, envs)
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others)
    assert sum(batch["next", "done"].sum() for batch in got) > 3 * envs


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("option", [None, False, True])
def test_the_recurrent_recipe_gives_the_same_states_as_torchrl(envs, option):
    from torchrl.envs import InitTracker

    cell, policy = lstm()

    def make_env(seed):
        return pendulum(seed, [InitTracker(), cell.make_tensordict_primer()])

    options = {} if option is None else {"auto_register_policy_transforms": option}
    got, expected = of_both(make_env, policy, envs, **options)
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others)
    assert sum(batch["is_init"].sum() for batch in got) > 3 * envs
    assert all(batch["rs_h"].any() for batch in got)


def test_a_recurrent_policy_without_transforms_is_what_torchrl_makes_with_them():
    _, policy = lstm()
    got, expected = of_both(pendulum, policy, 1, auto_register_policy_transforms=True)
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others)


def named(observation, step_count):
    return observation[..., 2:].sin() + step_count


def many_values(step_count, observation):
    return observation[..., 2:].sin(), *(observation[..., :1] + i for i in range(3))


@pytest.mark.parametrize("policy", [named, many_values])
def test_arguments_and_outputs_have_the_names_that_torchrl_gives_them(policy):
    got, expected = of_both(pendulum, policy, 1)
    for ours, others in zip(got, expected, strict=True):
        compare(ours, others)
