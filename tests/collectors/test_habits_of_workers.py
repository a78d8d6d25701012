"""Collectors with workers take env objects, and a policy beside a factory."""

from __future__ import annotations

import contextlib
import threading

import gymnasium as gym
import multi_kit as kit
import pytest
import torch

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.envs import ParallelEnv, SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions

OPTIONS = {"frames_per_batch": 20, "total_frames": 40}


def moved() -> gym.Env:
    """Return an env that has drawn numbers and is in the middle of an episode."""
    env = gym.make("CartPole-v1")
    env.reset(seed=3)
    env.step(0)
    return env


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_env_objects_are_copied_to_the_workers(kind):
    env = moved()
    before = env.unwrapped.state
    with kind([env, env], seed=5, **OPTIONS) as collector:
        batches = list(collector)
    with kind([moved] * 2, seed=5, **OPTIONS) as collector:
        made = list(collector)
    assert sum(batch.numel() for batch in batches) == 40
    if kind is MultiSyncCollector:
        for ours, theirs in zip(batches, made, strict=True):
            assert (ours["observation"] == theirs["observation"]).all()
    assert env.unwrapped.state is before
    env.step(0)  # it is still the caller's


def test_copies_of_an_env_do_not_draw_the_same_numbers():
    with MultiSyncCollector([moved()] * 2, **OPTIONS) as collector:
        starts = collector.next()["observation"][:, 0]
    assert (starts[0] != starts[1]).all()


def test_one_env_object_for_all_and_lists_of_them():
    with MultiSyncCollector(moved(), num_workers=2, **OPTIONS) as collector:
        assert collector.next().batch_size == (2, 10)
    with MultiSyncCollector([[moved(), moved()]] * 2, **OPTIONS) as collector:
        assert collector.next().batch_size == (2, 2, 5)
    with MultiSyncCollector([SerialEnv(2, "CartPole-v1")] * 2, **OPTIONS) as collector:
        assert collector.next().batch_size == (2, 2, 5)
    with AsyncCollector(CountingEnv(), **OPTIONS) as collector:
        assert check_transitions(list(collector)) == 40


def test_torchrl_env_objects():
    from torchrl.envs import GymEnv
    from torchrl.envs import SerialEnv as TheirSerialEnv

    with MultiSyncCollector([GymEnv("Pendulum-v1")] * 2, **OPTIONS) as collector:
        batch = collector.next()
    assert batch.batch_size == (2, 10)
    assert (batch["observation"][0, 0] != batch["observation"][1, 0]).any()
    theirs = TheirSerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    with MultiSyncCollector([theirs] * 2, **OPTIONS) as collector:
        assert collector.next().batch_size == (2, 2, 5)


class Locked(gym.Wrapper):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.lock = threading.Lock()


def test_env_objects_that_cannot_travel_are_refused_with_the_way():
    message = r"create_env_fn\.lock is a lock, which cannot be pickled.*in the function that makes"
    with pytest.raises(UsageError, match=message):
        MultiSyncCollector([Locked()], frames_per_batch=10)
    with contextlib.closing(ParallelEnv(2, "CartPole-v1")) as parallel:
        with pytest.raises(
            UsageError, match=r"create_env_fn cannot be sent.*the function that makes"
        ):
            MultiSyncCollector([parallel], frames_per_batch=10)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_policy_beside_a_factory_gives_the_weights(kind):
    policy = kit.Telling(7)
    scheme = {"policy": object()}
    with kind(
        [kit.wide] * 2,
        policy,
        policy_factory=lambda: kit.Telling(1),
        weight_sync_schemes=scheme,
        frames_per_batch=10,
    ) as collector:
        assert (collector.next()["action"] == 7).all()
        policy.become(9)
        collector.update_policy_weights_(wait=True)
        data = torch.cat([collector.next().reshape(-1) for _ in range(8)])
    versions = data["collector", "policy_version"]
    assert versions[-1] == 1
    assert (data["action"] == 7 + 2 * versions).all()


def test_a_policy_beside_a_factory_is_published_by_itself():
    policy = kit.Telling(7)
    options = {"policy_factory": [kit.Telling] * 2, "update_at_each_batch": True}
    with MultiSyncCollector([kit.wide] * 2, policy, frames_per_batch=10, **options) as collector:
        for value in (7, 8, 9):
            policy.become(value)
            if value > 7:
                assert (collector.next()["action"] == value).all()
            else:
                assert (collector.next()["action"] == 7).all()


def test_weights_of_a_policy_that_the_factory_does_not_make_are_refused():
    with pytest.raises(UsageError, match="these weights do not fit the policy"):
        MultiSyncCollector(
            [kit.wide],
            torch.nn.Linear(3, 1),
            policy_factory=kit.Telling,
            frames_per_batch=10,
        )


def test_in_one_process_there_is_one_policy():
    with pytest.raises(UsageError, match="policy and policy_factory are both given"):
        Collector(kit.wide, kit.Telling(), policy_factory=kit.Telling, frames_per_batch=10)
