"""Seeds, random state and resuming."""

from __future__ import annotations

import io
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sample
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from swath.collectors import Collector, MultiSyncCollector
from swath.collectors.setup import packed
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import EnvError, UsageError
from swath.testing import CrashingEnv


def stochastic(env_id: str) -> nn.Module:
    torch.manual_seed(3)
    if env_id == "CartPole-v1":
        net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
        head = Sample(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
        return ProbabilisticTensorDictSequential(net, head)
    return Gaussian()


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        mean = self.net(observation)
        action = mean + torch.randn_like(mean)
        return {"action": action, "log_prob": -((action - mean) ** 2)[..., 0], "mean": mean}


def make(env_id, policy, **options):
    env = SerialEnv(3, env_id)
    chosen = None if policy == "random" else stochastic(env_id)
    return Collector(env, chosen, frames_per_batch=60, **options)


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.values(True, True), b.values(True, True), strict=True)
    )


@pytest.mark.parametrize("policy", ["random", "stochastic"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("seeded", [True, False])
def test_resuming_equals_not_having_stopped(env_id, policy, seeded):
    options = {"seed": 5} if seeded else {}
    with make(env_id, policy, **options, max_frames_per_traj=37) as collector:
        for _ in range(3):
            collector.next()
        saved = io.BytesIO()
        torch.save(collector.state_dict(), saved)
        going_on = [collector.next() for _ in range(3)]
        stats = collector.stats()
    saved.seek(0)
    with make(env_id, policy, seed=99, max_frames_per_traj=37) as resumed:
        resumed.next()
        resumed.load_state_dict(torch.load(saved))
        torch.randn(17)  # what the learner draws is its own business
        for batch in going_on:
            assert same(resumed.next(), batch)
        again = resumed.stats()
    for name in ("frames", "batches", "episodes", "return", "length", "policy_version"):
        assert again[name] == stats[name], name


def test_resuming_with_whole_trajectories_keeps_those_that_wait():
    options = {"seed": 1, "trajs_per_batch": 4, "traj_format": "cat"}
    with make("CartPole-v1", "random", **options) as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(4)]
    with make("CartPole-v1", "random", **{**options, "seed": 8}) as resumed:
        resumed.load_state_dict(state)
        for batch in expected:
            assert same(resumed.next(), batch)


def test_an_env_that_cannot_be_pickled_resumes_with_new_episodes_and_says_so():
    class Stubborn(gym.Wrapper):
        def __reduce__(self):
            raise TypeError("not me")

    def make_env():
        return Stubborn(gym.make("CartPole-v1"))

    with Collector(make_env, frames_per_batch=30, seed=0) as collector:
        ids = set(collector.next()["collector", "traj_ids"].tolist())
        with pytest.warns(UserWarning, match=r"cannot be pickled .*not me.* starts new episodes"):
            state = collector.state_dict()
    with Collector(make_env, frames_per_batch=30, seed=0) as resumed:
        with pytest.warns(UserWarning, match="new episodes start"):
            resumed.load_state_dict(state)
        batch = resumed.next()
        assert resumed.stats()["frames"] == 60
    assert not ids & set(batch["collector", "traj_ids"].tolist())


def test_a_state_that_was_damaged_is_not_unpickled():
    with make("CartPole-v1", "random") as collector:
        collector.next()
        state = collector.state_dict()
        for place in (0, len(state["collector"]) // 2, -1):
            state["collector"][place] += 1
            with pytest.raises(UsageError, match="differs from its checksum"):
                collector.load_state_dict(state)
            state["collector"][place] -= 1
        collector.load_state_dict(state)


class Trap:
    """Tells when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("the state was unpickled",)


class Alike(gym.Env):
    """Its spaces are those of CartPole."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.observation_space = gym.make("CartPole-v1").observation_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}


def two(policy=None, env="CartPole-v1", n=2, **options):
    env = env if isinstance(env, ParallelEnv) else SerialEnv(n, env)
    return Collector(env, policy, frames_per_batch=12, **options)


OTHERS = {
    "class": (lambda: MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=12), "workers"),
    "env": (lambda: two(env=Alike), r"2 CartPole-v1.*; this collector has envs \[.*2 Alike"),
    "spaces": (lambda: two(env="Pendulum-v1"), "Pendulum-v1"),
    "number": (lambda: two(n=3), "of 2 CartPole-v1.*of 3 CartPole-v1"),
    "vector env": (
        lambda: Collector(gym.make_vec("CartPole-v1", 2, "sync"), frames_per_batch=12),
        "GymGroup.*VectorGroup",
    ),
    "in processes": (lambda: two(env=ParallelEnv(2, "CartPole-v1")), "GymGroup.*ParallelGroup"),
    "keys": (lambda: two(init_random_frames=5), r"\('collector', 'random'\)"),
    "mask": (lambda: two(reset_when_done=False), r"\('collector', 'mask'\)"),
    "compact": (lambda: two(compact_obs=True), "not delivered"),
    "policy": (lambda: two(nn.Sequential(nn.Linear(4, 2), Argmax())), r"0.weight \[2, 4\]"),
    "whole": (lambda: two(trajs_per_batch=3), "batches of one process with trajs_per_batch"),
}


@pytest.mark.parametrize(("make_other", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_setup_is_refused_before_anything_is_done(make_other, message):
    with two() as collector, make_other() as other:
        collector.next()
        for source, into in ((collector, other), (other, collector)):
            state = source.state_dict()
            state["collector"] = packed(Trap())
            module, before = into._module(), into.stats()
            weights = None if module is None else [p.clone() for p in module.parameters()]
            with pytest.raises(UsageError, match=message if into is other else "this state is of"):
                into.load_state_dict(state)
            after = into.stats()
            assert (after["frames"], after["batches"]) == (before["frames"], before["batches"])
            if module is not None:
                assert all(map(torch.equal, weights, module.parameters()))
            assert into.next() is not None


def test_a_state_that_is_damaged_or_old_changes_nothing_and_says_so():
    policy = nn.Sequential(nn.Linear(4, 2), Argmax())
    with two(policy) as collector:
        state = collector.state_dict()
        policy[0].weight.data.zero_()
        torn = {**state, "collector": state["collector"][:-9]}
        with pytest.raises(UsageError, match=r"cannot be read .*only states that you trust"):
            collector.load_state_dict(torn)
        with pytest.raises(UsageError, match=r"format 1, .*; format 2 is expected"):
            collector.load_state_dict({**state, "format": 1})
        assert not policy[0].weight.any()
        collector.load_state_dict(state)
        assert policy[0].weight.any()


@pytest.mark.parametrize(
    "changed", [{"setup": None}, {"frames": "x"}, {"batches": -1}, {"policy": {}}], ids=str
)
def test_a_state_whose_plain_part_was_changed_is_refused_before_anything_is_done(changed):
    policy = nn.Sequential(nn.Linear(4, 2), Argmax())
    with two(policy) as collector:
        state = collector.state_dict()
        collector.next()
        before = collector.stats()["frames"]
        with pytest.raises(UsageError, match="was changed since state_dict"):
            collector.load_state_dict({**state, **changed})
        assert collector.stats()["frames"] == before
        assert collector.next() is not None


def test_a_state_may_be_loaded_with_other_sizes_of_batches():
    with two(seed=1, trajs_per_batch=3) as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next()["observation"][0]
    options = {"frames_per_batch": 50, "trajs_per_batch": 1, "total_frames": 10_000}
    with Collector(SerialEnv(2, "CartPole-v1"), **options) as other:
        other.load_state_dict(state)
        batch = other.next()["observation"][0]
        assert torch.equal(batch, expected[: len(batch)])


def test_a_state_of_something_else_is_refused():
    with make("CartPole-v1", "random") as collector:
        with pytest.raises(UsageError, match="not a state of a swath collector"):
            collector.load_state_dict({"frames": 3})
        state = collector.state_dict()
    with (
        Collector("CartPole-v1", frames_per_batch=9, trajs_per_batch=1) as other,
        pytest.raises(UsageError, match="trajs_per_batch"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("extra", [{}, {"trajs_per_batch": 9, "traj_format": "cat"}])
def test_a_state_replaces_what_a_failure_has_left(extra):
    env = CrashingEnv(at_step=17)
    with Collector(env, frames_per_batch=5, seed=2, **extra) as collector:
        collector.rollout()
        state = collector.state_dict()
        with pytest.raises(EnvError, match="crashed as asked"):
            list(collector)
        collector.load_state_dict(state)
        assert collector.partial() is None
        assert collector.stats()["frames"] == 5


@pytest.mark.parametrize("random", [{}, {"init_random_frames": 200}])
def test_an_unseeded_state_from_before_the_first_random_action_resumes(random):
    with make("CartPole-v1", "stochastic" if random else "random", **random) as collector:
        for _ in range(2):  # from the start, and later
            state = collector.state_dict()
            expected = [collector.next() for _ in range(2)]
            collector.load_state_dict(state)
            for batch in expected:
                assert same(collector.next(), batch)
            collector.reset()


@pytest.mark.parametrize("policy", ["random", "stochastic"])
def test_the_same_seed_gives_the_same_data_from_the_first_batch(policy):
    with make("CartPole-v1", policy, seed=11) as one:
        first = [one.next() for _ in range(3)]
        one.set_seed(11)
        second = [one.next() for _ in range(3)]
    with make("CartPole-v1", policy) as other:
        other.next()
        other.set_seed(11)
        third = [other.next() for _ in range(3)]
    for a, b, c in zip(first, second, third, strict=True):
        for key in ("observation", "action", ("next", "reward"), ("next", "done")):
            assert torch.equal(a[key], b[key])
            assert torch.equal(a[key], c[key])


def test_no_two_envs_share_a_stream_and_neighbouring_seeds_share_none():
    starts = set()
    for seed in range(20):
        with Collector(SerialEnv(8, "CartPole-v1"), frames_per_batch=8, seed=seed) as collector:
            starts.update(map(tuple, collector.next()["observation"][:, 0].tolist()))
    assert len(starts) == 160


def test_an_env_has_the_same_stream_in_any_company():
    def policy(observation):
        return (observation[..., 2] > 0).long()

    with Collector(SerialEnv(6, "CartPole-v1"), policy, frames_per_batch=600, seed=4) as collector:
        six = collector.next()
    with Collector(SerialEnv(2, "CartPole-v1"), policy, frames_per_batch=200, seed=4) as collector:
        two = collector.next()
    with Collector("CartPole-v1", policy, frames_per_batch=100, seed=4) as collector:
        one = collector.next()
    for key in ("observation", "action", ("next", "observation"), ("next", "done")):
        assert torch.equal(six[:2][key], two[key])
        assert torch.equal(six[0][key], one[key])


def test_a_seeded_collector_and_the_learner_do_not_disturb_each_other():
    draws, data = [], []
    for collecting, learning in ((True, True), (False, True), (True, False)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        with make("Pendulum-v1", "stochastic", seed=2) as collector:
            torch.manual_seed(1)
            for _ in range(3):
                if collecting:
                    data.append(collector.next())
                if learning:
                    draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[:3] == draws[3:]
    assert all(same(a, b) for a, b in zip(data[:3], data[3:], strict=True))


def test_a_normal_that_numpy_drew_ahead_stays_with_its_owner():
    def policy(observation):
        return np.random.randn(1).astype(np.float32)  # numpy draws two and keeps one

    def actions(frames, between=lambda: None):
        with Collector("Pendulum-v1", policy, frames_per_batch=frames, seed=6) as collector:
            batches = []
            for _ in range(15 // frames):
                between()
                batches.append(collector.next()["action"])
        return torch.cat(batches)

    assert torch.equal(actions(5), actions(15))
    np.random.seed(3)
    expected = np.random.randn(3).tolist()
    np.random.seed(3)
    drawn = []
    assert torch.equal(actions(5, lambda: drawn.append(np.random.randn())), actions(15))
    assert drawn == expected


def test_an_unseeded_collector_draws_from_the_global_generator():
    values = []
    for _ in range(2):
        with Collector(GymEnv("Pendulum-v1"), lambda o: torch.randn(1), frames_per_batch=5) as c:
            torch.manual_seed(7)
            values.append(c.next()["action"])
    assert torch.equal(*values)


def test_weights_are_copied_and_the_version_counts():
    net = nn.Linear(4, 2)
    policy = nn.Sequential(net, Argmax())
    with Collector("CartPole-v1", policy, frames_per_batch=10) as collector:
        assert collector.next()["collector", "policy_version"].unique().tolist() == [0]
        assert collector.update_policy_weights_() == 1
        learner = nn.Sequential(nn.Linear(4, 2), Argmax())
        before = [p.clone() for p in learner.parameters()]
        assert collector.update_policy_weights_(learner) == 2
        assert torch.equal(net.weight, learner[0].weight)
        assert net.weight.data_ptr() != learner[0].weight.data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters(), strict=True))
        assert collector.update_policy_weights_(policy.state_dict()) == 3
        with pytest.raises(UsageError, match="do not fit the policy"):
            collector.update_policy_weights_({"0.weight": net.weight})
        assert collector.policy_version == 3
        assert collector.next()["collector", "policy_version"].unique().tolist() == [3]
    with Collector(
        "CartPole-v1", None, frames_per_batch=10, update_at_each_batch=True
    ) as collector:
        for version in range(3):
            assert collector.next()["collector", "policy_version"].unique().tolist() == [version]


class Argmax(nn.Module):
    def forward(self, x):
        return x.argmax(-1)
