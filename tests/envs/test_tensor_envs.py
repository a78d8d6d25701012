"""Envs that speak in tensors: torch-native ones, and TorchRL's against TorchRL's own rollouts."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from swath.collectors import Collector
from swath.envs import BatchedTorchEnv, Env, TorchCartPole, TorchPendulum, as_group
from swath.envs.torchrl import OneHot
from swath.errors import EnvError, UsageError
from swath.seeding import env_seed
from swath.testing import CountingEnv, check_transitions

SEED = 6


def zeros(observation):
    seen = observation["observation"] if isinstance(observation, dict) else observation
    return torch.zeros(seen.shape[:-1], dtype=torch.int64)


# -- torch-native -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TorchCartPole, TorchPendulum])
def test_a_torch_env_delivers_what_stepping_it_by_hand_gives(make):
    with Collector(make(5, max_episode_steps=30), frames_per_batch=175, seed=SEED) as collector:
        data = torch.cat([collector.next() for _ in range(3)], 1)
    env = make(5, max_episode_steps=30)
    env.seed(torch.tensor([env_seed(SEED, index) for index in range(5)]))
    observation = env.reset()
    for frame in data.unbind(1):
        assert torch.equal(frame["observation"], observation)
        observation, reward, terminated, truncated = env.step(frame["action"])
        assert torch.equal(frame["next", "observation"], observation)
        assert torch.equal(frame["next", "reward"][:, 0], reward)
        assert torch.equal(frame["next", "terminated"][:, 0], terminated)
        assert torch.equal(frame["next", "truncated"][:, 0], truncated)
        observation = env.reset(terminated | truncated)
    assert data["next", "done"].sum() >= 15


def check_one_episode_each(collector, n):
    """Check what is collected until all envs have ended and stay so."""
    before = collector.stats()["episodes"]
    data = torch.cat(list(collector), 1)
    mask = data["collector", "mask"]
    ended = data["next", "done"][..., 0] & mask
    assert ended.sum(1).tolist() == [1] * n
    assert torch.equal(mask.sum(1), ended.int().argmax(1) + 1)
    assert (data["next", "reward"][~mask] == 0).all()
    assert collector.stats()["episodes"] - before == n
    return data[mask]


def test_torch_envs_that_ended_stay_ended_until_all_are_reset():
    options = {"frames_per_batch": 80, "seed": SEED, "reset_when_done": False}
    with Collector(TorchCartPole(4), zeros, **options) as collector:
        for _ in range(2):
            check_one_episode_each(collector, 4)
            assert collector.next() is None
            collector.reset()


class Drifting(BatchedTorchEnv):
    """Gives `wrong` from its fifth step on."""

    observation_space = spaces.Dict(place=spaces.Box(-1, 1, (1,)), size=spaces.Box(0, 9, ()))
    action_space = spaces.Dict(push=spaces.Discrete(2))

    def __init__(self, wrong=None):
        self.wrong, self.calls = wrong, -1
        super().__init__(2)

    def _initial(self, uniform):
        return uniform

    def _dynamics(self, state, action):
        self.calls += 1
        if self.calls >= 4 and isinstance(self.wrong, Exception):
            raise self.wrong
        return state, action["push"].float(), torch.zeros(2, dtype=torch.bool)

    def _observe(self, state):
        good = {"place": state, "size": state[:, 0]}
        return self.wrong if self.wrong is not None and self.calls >= 4 else good


def test_a_torch_env_may_compute_in_bfloat16():
    class Coarse(Drifting):
        def step(self, action):
            observation, reward, *flags = super().step(action)
            coarse = {key: value.bfloat16() for key, value in observation.items()}
            return coarse, (reward + 0.5).bfloat16(), *flags

    with Collector(Coarse(), frames_per_batch=10, seed=SEED) as collector:
        batch = collector.next()
    assert torch.equal(
        batch["next", "place"], batch["place"][:, :1].bfloat16().float().expand(2, 5, 1)
    )
    assert torch.equal(batch["action", "push"] + 0.5, batch["next", "reward"][..., 0])


def test_nested_spaces_of_a_torch_env_are_keys():
    with Collector(Drifting(), frames_per_batch=10, seed=SEED) as collector:
        batch = collector.next()
    assert torch.equal(batch["place"][..., 0], batch["size"])
    assert torch.equal(batch["action", "push"].float(), batch["next", "reward"][..., 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (KeyError("mass"), r"raised KeyError: 'mass' in step\(\)"),
        ({"place": torch.zeros(2, 1)}, r"no array for 'size', which .*KeyError: 'size'"),
        (
            {"place": torch.zeros(2, 2), "size": torch.zeros(2)},
            r"'place' has shape \(2, 2\) and dtype float32, but .* declares \(2, 1\)",
        ),
        (
            {"place": torch.zeros(2, 1, dtype=torch.complex64), "size": torch.zeros(2)},
            r"dtype complex64, but .* declares \(2, 1\) and float32",
        ),
    ],
)
def test_a_torch_env_that_leaves_its_form_is_blamed(wrong, message):
    with Collector(Drifting(wrong), frames_per_batch=20, seed=SEED) as collector:
        with pytest.raises(EnvError, match=message) as caught:
            collector.next()
        assert caught.value.step == 4
        assert collector.partial().batch_size == (2, 4)


# -- TorchRL ------------------------------------------------------------------------------------

torchrl_envs = pytest.importorskip("torchrl.envs")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torchrl.*")


def rl_gym(name="CartPole-v1", **kwargs):
    return torchrl_envs.GymEnv(name, **{"categorical_action_encoding": True, **kwargs})


def transformed(env):
    T = torchrl_envs
    norm = T.ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"])
    steps = T.Compose(T.StepCounter(max_steps=12), T.RewardSum(), T.DoubleToFloat(), norm)
    return T.TransformedEnv(env, steps)


def serial(**kwargs):
    return torchrl_envs.SerialEnv(3, lambda: rl_gym(**kwargs))


def fixed_actions(spec_shape):
    """A policy of TorchRL and of ours that does the same: a function of the observation alone."""

    def act(observation):
        observation = observation["observation"] if isinstance(observation, dict) else observation
        push = (observation[..., 2] > 0).long()
        return torch.nn.functional.one_hot(push, 2) if spec_shape else push

    return act


RL_ENVS = {
    "single": (rl_gym, ()),
    "single one-hot": (lambda: rl_gym(categorical_action_encoding=False), (2,)),
    "transformed": (lambda: transformed(rl_gym()), ()),
    "serial": (serial, ()),
    "serial one-hot": (lambda: serial(categorical_action_encoding=False), (2,)),
    "serial transformed": (lambda: transformed(serial()), ()),
}


@pytest.mark.parametrize(("make", "shape"), RL_ENVS.values(), ids=RL_ENVS)
def test_torchrl_envs_give_what_torchrl_rolls_out(make, shape):
    act, env = fixed_actions(shape), make()
    n = int(env.batch_size.numel())
    with Collector(env, act, frames_per_batch=n * 30, seed=SEED) as collector:
        ours = torch.cat([collector.next() for _ in range(2)], -1)
    theirs = make()
    theirs.set_seed(env_seed(SEED, 0) % 2**31)
    expected = theirs.rollout(
        60,
        lambda td: td.set("action", act(td["observation"])),
        break_when_any_done=False,
    )
    theirs.close()
    assert expected["next", "done"].any()
    for key in expected.keys(True, True):
        assert torch.equal(ours[key], expected[key]), key
    beside = {("collector", "traj_ids"), ("collector", "policy_version")}
    assert set(ours.keys(True, True)) - set(expected.keys(True, True)) == beside


@pytest.mark.parametrize("make", [rl_gym, serial])
def test_a_torchrl_env_by_itself_resets_what_it_is_asked_to(make):
    env = Env(as_group(make()))
    td = env.rand_step(env.reset(seed=SEED))["next"]
    mask = torch.zeros(env.num_envs, dtype=torch.bool)
    assert torch.equal(env.reset(mask=mask)["observation"], td["observation"])
    moved = td["observation"][..., 0] + 0.02 * td["observation"][..., 1]
    td = env.rand_step()["next"]
    torch.testing.assert_close(td["observation"][..., 0], moved)  # the episode went on
    mask[-1] = True
    changed = env.reset(mask=mask)["observation"] != td["observation"]
    assert torch.equal(changed.reshape(env.num_envs, 4).any(1), mask)
    env.close()


def test_limits_and_truncation_of_torchrl_envs_stay_apart():
    with Collector(
        transformed(serial()), zeros, frames_per_batch=300, seed=SEED, max_frames_per_traj=7
    ) as collector:
        batch = collector.next()
    done = batch["next", "done"]
    assert batch["next", "step_count"].max() == 7
    assert torch.equal(batch["next", "truncated"], (batch["next", "step_count"] == 7) & done)
    assert not batch["next", "terminated"].any()
    starts = batch["step_count"][:, 1:][done[:, :-1]]
    assert (starts == 0).all()


def test_torchrl_envs_that_ended_are_stepped_no_more_on_demand():
    # A counting env refuses to be stepped after the end of its episode.
    inner = torchrl_envs.GymWrapper
    env = torchrl_envs.SerialEnv(3, lambda: inner(CountingEnv(), categorical_action_encoding=True))
    options = {"frames_per_batch": 60, "seed": SEED, "reset_when_done": False}
    with Collector(env, zeros, **options) as collector:
        for _ in range(2):
            check_transitions(check_one_episode_each(collector, 3))
            collector.reset()


@pytest.mark.parametrize("encoding", [True, False])
def test_random_actions_fit_the_spec(encoding):
    env = serial(categorical_action_encoding=encoding)
    with Collector(env, frames_per_batch=90, seed=SEED) as collector:
        batch = collector.next()
        assert all(env.action_spec.is_in(action) for action in batch["action"].unbind(1))
    assert len(batch["action"].unique(dim=1)) > 1


def test_seeding_a_torchrl_env_leaves_torch_alone():
    class Global(type(rl_gym())):
        def _set_seed(self, seed):
            torch.manual_seed(seed)
            super()._set_seed(seed)

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with Collector(Global("CartPole-v1"), frames_per_batch=10, seed=SEED) as collector:
        collector.set_seed(3)
        collector.next()
        assert torch.equal(torch.rand(3), expected)


def test_a_torchrl_env_stands_beside_a_gymnasium_env():
    envs = [rl_gym, "CartPole-v1", serial]
    with Collector(envs, frames_per_batch=100, seed=SEED) as collector:
        batch = collector.next()
    ended = batch["next", "done"][:, :-1, 0]
    assert batch.batch_size == (5, 20)
    assert torch.equal(
        batch["observation"][:, 1:][~ended], batch["next", "observation"][:, :-1][~ended]
    )


def spec_env(action=None, observation=None, **outcome):
    """A TorchRL env of given specs that never ends."""
    from torchrl import data

    class Made(torchrl_envs.EnvBase):
        def __init__(self):
            super().__init__(batch_size=[])
            seen = observation if observation is not None else data.Unbounded((1,))
            self.observation_spec = data.Composite(**{"observation": seen, **outcome})
            self.action_spec = action if action is not None else data.Categorical(2)
            self.reward_spec = data.Unbounded((1,))

        def _reset(self, tensordict):
            return self.observation_spec.rand().update(self.full_done_spec.zero())

        def _step(self, tensordict):
            return self._reset(None).set("reward", torch.ones(1))

        def _set_seed(self, seed):
            pass

    return Made()


def test_specs_become_spaces():
    from torchrl import data

    cases = [
        (data.Categorical(3), spaces.Discrete(3)),
        (data.Categorical(3, shape=(2,)), spaces.MultiDiscrete([3, 3])),
        (data.MultiCategorical([2, 3]), spaces.MultiDiscrete([2, 3])),
        (data.OneHot(3), OneHot([3], np.dtype("int64"))),
        (data.MultiOneHot([2, 3]), OneHot([2, 3], np.dtype("int64"))),
        (data.Binary(3, dtype=torch.int8), spaces.Box(0, 1, (3,), np.int8)),
        (data.Bounded(-2.0, 1.0, (2,)), spaces.Box(-2, 1, (2,), np.float32)),
        (data.Bounded(-2, 5, (2,), dtype=torch.int64), spaces.Box(-2, 5, (2,), np.int64)),
        (
            data.Composite(
                action=data.Composite(a=data.Categorical(2), b=data.Bounded(0.0, 1, (1,)))
            ),
            spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,), np.float32)),
        ),
    ]
    for spec, space in cases:
        group = as_group(spec_env(spec))
        assert group.action_space == space
        with Collector(group.env, frames_per_batch=50, seed=SEED) as collector:
            batch = collector.next()
        spec = group.env.full_action_spec
        assert all(spec.is_in(frame.select("action")) for frame in batch)


def test_what_of_torchrl_has_no_form_here_is_refused():
    from torchrl import data

    with pytest.raises(UsageError, match="a NonTensor at 'name', which is not a tensor"):
        as_group(spec_env(name=data.NonTensor(shape=())))
    with pytest.raises(UsageError, match=r"'size' has shape \(-1, 2\), a size that changes"):
        as_group(spec_env(size=data.Unbounded((-1, 2))))
    parts = torch.stack([data.Unbounded((2,)), data.Unbounded((3,))])
    with pytest.raises(UsageError, match="'parts': parts of different shapes, stacked lazily"):
        as_group(spec_env(parts=parts))
    with pytest.raises(UsageError, match=r"action 'action' has dtype torch.bfloat16, which numpy"):
        as_group(spec_env(data.Bounded(-1, 1, (2,), dtype=torch.bfloat16)))


def test_an_exception_in_a_torchrl_env_names_the_call():
    class Crashing(gym.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 5:
                raise KeyError("mass")
            return super().step(action)

    env = torchrl_envs.GymWrapper(Crashing(gym.make("CartPole-v1")))
    with Collector(env, frames_per_batch=20, seed=SEED) as collector:
        with pytest.raises(EnvError, match=r"KeyError: 'mass' in step\(\)") as caught:
            collector.next()
        assert (caught.value.step, caught.value.seed) == (4, SEED)
        assert collector.partial().batch_size == (4,)
