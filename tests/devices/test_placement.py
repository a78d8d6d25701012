"""Placement on a machine with one device: the CPU under two names, so that all paths are taken."""

from __future__ import annotations

import itertools

import pytest
import torch
from device_kit import Remembering, Steps, Whole, assert_same
from torch import nn

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import GymEnv, SerialEnv, as_group
from swath.errors import EnvError, PolicyError, UsageError
from swath.rollout import DeviceRunner, Plan, Runner, plan
from swath.testing import CountingEnv

OTHER = "cpu:0"
"""Equal to no tensor's device, and yet the CPU."""


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(plan, "_exact", lambda device: device)


def batches(count, env, policy, **options):
    options = {"frames_per_batch": 16 * 8, "seed": 5, **options}
    with Collector(env, policy, **options) as collector:
        return [collector.next() for _ in range(count)]


def serial():
    return SerialEnv(8, "CartPole-v1")


class Rule(nn.Module):
    """Exact for any size of the batch, and stateless."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, observation):
        value = observation[..., 2] * self.weight[0]
        return (value > 0).long(), {"value": value}


# -- rollouts by mask ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, Whole, Remembering])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 4},
        {"set_truncated": True},
        {"reset_at_each_iter": True},
        {"init_random_frames": 37},
        {"init_random_frames": 500},
        {"masked": True, "marks_worker": True, "worker": 3, "first_traj_id": 1 << 40},
        {"memory_order": "batch"},
    ],
)
def test_a_rollout_by_masks_is_that_of_the_hosts_loop(policy, options):
    def runner(kind):
        return kind(as_group(Steps(6)), policy and policy(), Plan(steps=16, seed=3, **options))

    ours, theirs = runner(DeviceRunner), runner(Runner)
    for steps in (16, 16, 5, 16):
        assert_same(ours.lend(ours.collect(steps)), theirs.lend(theirs.collect(steps)))
        assert ours.open_ids == theirs.open_ids
        ours.version = theirs.version = ours.version + 1
    mine, its = ours.ledger.as_dict(), theirs.episodes.as_dict()
    assert mine["episodes"] == its["episodes"] > 10
    for name in ("return", "length"):
        assert mine[name]["mean"] == pytest.approx(its[name]["mean"])


def test_a_rollout_by_masks_draws_what_the_hosts_loop_draws():
    policy = Whole(noise=9)
    ours = DeviceRunner(as_group(Steps(6)), policy, Plan(steps=16, seed=3))
    theirs = Runner(as_group(Steps(6)), policy, Plan(steps=16, seed=3))
    for _ in range(3):
        torch.rand(3)  # the learner's draws are another matter
        assert_same(ours.lend(ours.collect()), theirs.lend(theirs.collect()))


def test_a_rollout_by_masks_can_be_put_into_a_slab_of_the_host():
    made = Plan(steps=16, seed=3, set_truncated=True)
    ours = DeviceRunner(as_group(Steps(6)), Whole(), made)
    theirs = Runner(as_group(Steps(6)), Whole(), made)
    for _ in range(3):
        slab = theirs.pool.make()
        filled = ours.collect(slab=slab)
        assert filled.slab is slab
        expected = theirs.lend(theirs.collect())
        assert_same(theirs.pool.lend(slab, 16, (6,)), expected)
        assert ours.finished == theirs.finished


def test_its_state_goes_on():
    ours = DeviceRunner(as_group(Steps(6)), Whole(5), Plan(steps=16, seed=3))
    ours.collect()
    state = ours.state_dict()
    expected = [ours.lend(ours.collect()) for _ in range(2)]
    other = DeviceRunner(as_group(Steps(6)), Whole(5), Plan(steps=16, seed=4))
    other.collect()
    other.load_state_dict(state)
    for one in expected:
        assert_same(other.lend(other.collect()), one)


def test_kept_rollouts_never_change():
    runner = DeviceRunner(as_group(Steps(6)), Whole(), Plan(steps=16))
    kept = [runner.lend(runner.collect()) for _ in range(3)]
    copies = [batch.clone() for batch in kept]
    for _ in range(5):
        runner.lend(runner.collect())
    assert runner.pool.made == 4
    for batch, copy in zip(kept, copies, strict=True):
        assert_same(batch, copy)


class Failing(Steps):
    def step(self, action):
        if float(self.state[0, 0]) == 2:
            raise RuntimeError("no more")
        return super().step(action)


def test_its_failures_are_told_as_those_of_the_hosts_loop():
    runner = DeviceRunner(as_group(Failing(6)), Whole(), Plan(steps=16, seed=3))
    with pytest.raises(EnvError, match=r"no more in step\(\)"):
        runner.collect()
    assert runner.partial is not None
    assert runner.partial.steps == 2

    class Wrong(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            return torch.zeros(3 if self.calls == 4 else len(observation)).long()

    runner = DeviceRunner(as_group(Steps(6)), Wrong(), Plan(steps=16, seed=3))
    with pytest.raises(PolicyError, match=r"has shape \(3,\)"):
        runner.collect()


def test_an_action_outside_the_space_is_told_by_the_next_rollout():
    policy = Whole()
    runner = DeviceRunner(as_group(Steps(6)), policy, Plan(steps=16, seed=3))
    policy.forward = lambda observation: (torch.full((6,), 3), {"value": torch.zeros(6)})
    runner.collect()
    with pytest.raises(PolicyError, match="not in the action space"):
        runner.collect()


# -- a policy elsewhere -------------------------------------------------------------------------


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("places", list(itertools.product(["cpu", OTHER], repeat=2)))
@pytest.mark.parametrize("policy", [Whole, Remembering, None])
def test_each_placement_gives_the_same_data(places, policy):
    computes, storing = places
    options = {"max_frames_per_traj": 9, "init_random_frames": 150}
    expected = batches(3, Steps(8), policy and policy(), **options)
    places = {"policy_device": computes, "storing_device": storing}
    ours = batches(3, Steps(8), policy and policy(), **places, **options)
    for batch, one in zip(ours, expected, strict=True):
        assert_same(batch, one)


@pytest.mark.usefixtures("two_devices")
def test_one_env_alone_is_staged_too():
    expected = batches(2, GymEnv("CartPole-v1"), Rule(), frames_per_batch=50)
    ours = batches(2, GymEnv("CartPole-v1"), Rule(), frames_per_batch=50, policy_device=OTHER)
    for batch, one in zip(ours, expected, strict=True):
        assert_same(batch, one)


@pytest.mark.usefixtures("two_devices")
def test_a_policy_elsewhere_is_a_copy_that_gets_its_weights():
    policy = Rule()
    with Collector(serial(), policy, frames_per_batch=80, policy_device=OTHER) as collector:
        assert "a copy" in collector.describe()
        with torch.no_grad():
            policy.weight.zero_()
        assert collector.next()["action"].any()
        collector.update_policy_weights_()
        batch = collector.next()
        assert not batch["action"].any()
        assert batch["collector", "policy_version"].unique().tolist() == [1]
        state = collector.state_dict()
        with torch.no_grad():
            policy.weight.fill_(1.0)
        collector.update_policy_weights_()
        assert collector.next()["action"].any()
        collector.load_state_dict(state)
        assert not collector.next()["action"].any()


@pytest.mark.usefixtures("two_devices")
def test_what_is_wrong_with_an_answer_is_told_from_there_too():
    class Wrong(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            return torch.full((8,), 5 if self.calls == 20 else 0)

    with Collector(serial(), Wrong(), frames_per_batch=800, policy_device=OTHER) as collector:
        with pytest.raises(PolicyError, match="outside the action space"):
            collector.next()


def test_the_plan_is_in_words():
    with Collector(serial(), Rule(), frames_per_batch=80, total_frames=160) as collector:
        assert collector.describe().splitlines() == [
            "envs         cpu      8, GymGroup",
            "policy       cpu      yours",
            "rollouts     cpu      10 steps, 6,016 bytes",
            "batches      cpu      views of the rollout, nothing is copied",
            "each step             nothing is copied between devices",
        ]


@pytest.mark.usefixtures("two_devices")
def test_the_plan_tells_what_is_copied():
    options = {"policy_device": OTHER, "storing_device": OTHER, "frames_per_batch": 80}
    with Collector(serial(), Rule(), **options) as collector:
        text = collector.describe()
    assert "128 bytes up to cpu:0, 96 down, in one copy each; call by call" in text
    assert "copied from cpu once per rollout, 6,016 bytes" in text


# -- groups that take turns ---------------------------------------------------------------------


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 13}, {"init_random_frames": 150}])
def test_groups_that_take_turns_give_the_same_batches(groups, options):
    expected = batches(3, serial(), Rule(), **options)
    ours = batches(3, serial(), Rule(), env_groups=groups, policy_device=OTHER, **options)
    for batch, one in zip(ours, expected, strict=True):
        assert_same(batch, one)


@pytest.mark.usefixtures("two_devices")
def test_while_a_group_steps_the_other_is_on_its_way():
    seen = []

    class Env(CountingEnv):
        def step(self, action):
            seen.append("env")
            return super().step(action)

    class Counted(nn.Module):
        def forward(self, observation):
            seen.append("policy")
            return (observation.flatten(1).sum(-1) * 0).long()

    options = {"frames_per_batch": 6, "env_groups": 2, "policy_device": OTHER}
    with Collector([Env, Env], Counted(), **options) as collector:
        seen.clear()
        collector.next()
    assert seen == ["policy", "policy", "env", *["policy", "env"] * 4, "env"]


@pytest.mark.usefixtures("two_devices")
def test_new_weights_hold_from_a_whole_step_on():
    policy = Rule()
    with Collector(serial(), policy, frames_per_batch=80, env_groups=2, policy_device=OTHER) as one:
        one.next()
        one.update_policy_weights_()
        assert one.next()["collector", "policy_version"].unique().tolist() == [1]


@pytest.mark.usefixtures("two_devices")
def test_an_env_that_fails_in_its_turn_is_named():
    class Failing(CountingEnv):
        made = 0

        def step(self, action):
            self.made += 1
            if self.made == 3:
                raise RuntimeError("no more")
            return super().step(action)

    class Still(nn.Module):
        def forward(self, observation):
            return (observation.flatten(1).sum(-1) * 0).long()

    makers = [CountingEnv, CountingEnv, CountingEnv, Failing]
    options = {"frames_per_batch": 40, "env_groups": 2, "policy_device": OTHER}
    with Collector(makers, Still(), **options) as collector:
        with pytest.raises(EnvError, match=r"no more in step\(\).*env 3"):
            collector.next()
        assert collector.partial().batch_size == (4, 2)  # whole rows, whoever was first


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (lambda: Steps(8), {"env_groups": 2}, "env_groups=2 needs that many envs"),
        (serial, {"env_groups": 9}, "env_groups=9 needs that many envs"),
        (serial, {"env_groups": 2}, "same device as the envs"),
        (serial, {"env_groups": 0}, "env_groups must be an int of at least 1"),
        (serial, {"cudagraph_policy": True}, "cudagraph_policy needs a policy on a CUDA device"),
        (serial, {"cudagraph": "yes"}, "cudagraph must be one of"),
        (serial, {"cudagraph": True}, r"cudagraph is True, .* these envs are not torch-native"),
        (lambda: Steps(8), {"cudagraph": True}, r"cudagraph is True, .* the envs are on cpu"),
        (serial, {"device": ["cpu", "cpu"]}, "device as a list is for collectors with workers"),
    ],
)
def test_what_cannot_be_is_refused(env, options, message):
    with pytest.raises(UsageError, match=message):
        Collector(env(), Rule(), frames_per_batch=80, **options)


@pytest.mark.usefixtures("two_devices")
def test_envs_that_cannot_move_say_so():
    class Fixed:
        num_envs, device = 4, torch.device("cpu")
        observation_space, action_space = Steps.observation_space, Steps.action_space
        inner = Steps(4)
        seed, reset, step = inner.seed, inner.reset, inner.step

    with pytest.raises(UsageError, match=r"has no method to\(device\)"):
        Collector(Fixed(), Whole(), frames_per_batch=80, env_device=OTHER)


# -- workers ------------------------------------------------------------------------------------


def test_workers_have_a_plan_too():
    makers = ["CartPole-v1", "CartPole-v1"]
    options = {"frames_per_batch": 20, "policy_device": ["cpu", "cpu"], "devices": "cpu"}
    with MultiSyncCollector(makers, Rule(), **options) as collector:
        text = collector.describe()
        assert text.startswith("workers 0, 1\nenvs         cpu      1, GymGroup\n")
        assert "weights      through memory of the host, 64 bytes an update" in text
        assert collector.next()["action"].device == torch.device("cpu")
