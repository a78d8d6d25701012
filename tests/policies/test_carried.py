"""What a policy writes into its TensorDict comes back to it at the next step of the same env."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gymnasium import spaces
from policy_kit import TORQUE, assert_equal, collect, make_collector, make_envs, net
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import SerialEnv, TorchCartPole, as_group
from swath.errors import PolicyError, UsageError
from swath.rollout import DeviceRunner, Plan, Runner
from swath.testing import CountingEnv

MANY = spaces.Discrete(10_000)


class Counting(TensorDictModuleBase):
    """Its action is the number of the call, as far as it is told what it wrote before."""

    def __init__(self, key: Any = "_calls") -> None:
        super().__init__()
        self.in_keys, self.out_keys, self.key = ["observation"], ["action", key], key

    def forward(self, td: TensorDict) -> TensorDict:
        calls = td.get(self.key, torch.zeros(td.shape, dtype=torch.int64)) + 1
        return td.set(self.key, calls).set("action", calls.clone())


class CountingParity(Counting):
    """Shows the number of the call, and chooses by whether it is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.out_keys = ["action", "calls"]

    def forward(self, td: TensorDict) -> TensorDict:
        super().forward(td)
        return td.set("calls", td["_calls"].clone()).set("action", td["_calls"] % 2)


def numbers(data: TensorDict) -> list[int]:
    """The actions of all envs, which must be equal."""
    actions = data["action"].reshape(-1, data.shape[-1])
    assert (actions == actions[0]).all()
    return actions[0].tolist()


FORMS = {
    "private": lambda: Counting("_calls"),
    "public": lambda: Counting("calls"),
    "below a private parent": lambda: Counting(("_all", "calls")),
    "below a public parent": lambda: Counting(("all", "calls")),
    "function": lambda: Counting().forward,
}


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("name", FORMS)
def test_a_policy_counts_on_over_steps_episodes_and_batches(name, num_envs):
    data = collect(FORMS[name](), make_envs(num_envs, MANY, longest=4), batches=3)
    assert data["next", "done"].sum() > 3
    assert numbers(data) == list(range(1, 22))


def test_another_answer_than_the_tensordict_that_was_given_adds_to_what_is_known():
    def policy(td: TensorDict) -> TensorDict:
        calls = td.get("_calls", torch.zeros(td.shape, dtype=torch.int64)) + 1
        rare = td.get("_rare", torch.zeros(td.shape, dtype=torch.int64))
        out = TensorDict({"action": calls + rare, "_calls": calls}, td.shape)
        return out.set("_rare", torch.full_like(rare, 1000)) if (calls == 1).all() else out

    data = collect(policy, make_envs(2, MANY))
    assert numbers(data) == [1, *range(1002, 1015)]


def test_what_a_policy_takes_out_of_its_tensordict_is_gone():
    def policy(td: TensorDict) -> TensorDict:
        calls = td.pop("_calls", torch.zeros(td.shape, dtype=torch.int64)) + 1
        if (calls < 3).all():
            td.set("_calls", calls)
        return td.set("action", calls)

    assert numbers(collect(policy, make_envs(2, MANY)))[:7] == [1, 2, 3, 1, 2, 3, 1]


def test_only_public_entries_are_stored():
    class Both(Counting):
        def forward(self, td: TensorDict) -> TensorDict:
            super().forward(td)
            td["_all", "deep"] = td["all", "_deep"] = td["all", "seen"] = td["_calls"].clone()
            return td

    policy = Both()
    policy.out_keys += [("_all", "deep"), ("all", "_deep"), ("all", "seen")]
    data = collect(policy, make_envs(2, MANY))
    assert not any(part.startswith("_") for key in data.keys(True, True) for part in key)
    assert data["all", "seen"][0].tolist() == list(range(1, 15))


def test_a_memory_that_is_a_view_of_the_observation_stays_as_it_was():
    def policy(td: TensorDict) -> TensorDict:
        if "_last" in td.keys():
            same = (td["_last"] == td["observation"]).all(-1)
            td["moved"] = (~same).long() + 1
        else:
            td["moved"] = torch.zeros(td.shape, dtype=torch.int64)
        td["_last"] = td["observation"][..., :]
        return td.set("action", td["observation"].argmax(-1))

    envs = make_envs(3, spaces.Discrete(3))
    data = collect(policy, envs, batches=4, frames_per_batch=6)
    expected = torch.full((3, 8), 2)
    expected[:, 0] = 0
    unmoved = (data["observation"][:, 1:] == data["observation"][:, :-1]).all(-1)
    expected[:, 1:][unmoved] = 1
    assert torch.equal(data["moved"], expected)


def test_a_memory_may_grow():
    def policy(td: TensorDict) -> TensorDict:
        seen = td.get("_seen", td["observation"][..., :0])
        td["_seen"] = torch.cat([seen, td["observation"][..., :1]], -1)
        return td.set("action", torch.full(td.shape, td["_seen"].shape[-1]))

    assert numbers(collect(policy, make_envs(2, MANY))) == list(range(1, 15))


def test_a_key_may_be_read_before_it_was_ever_written():
    def count(observation: torch.Tensor, calls: torch.Tensor | None) -> Any:
        calls = observation[..., 0].long() * 0 if calls is None else calls
        return calls + 1, calls + 1

    policy = TensorDictModule(count, ["observation", "calls"], ["action", "calls"])
    data = collect(policy, make_envs(3, MANY, longest=4))
    assert numbers(data) == list(range(1, 15))
    assert torch.equal(data["calls"], data["action"])


def test_what_is_written_at_the_root_and_below_next_is_carried_from_the_root():
    def count(observation: torch.Tensor, calls: torch.Tensor | None) -> Any:
        calls = observation[..., 0].long() * 0 if calls is None else calls
        return calls + 1, calls + 1, calls - 1

    keys = ["action", "calls", ("next", "calls")]
    data = collect(TensorDictModule(count, ["observation", "calls"], keys), make_envs(3, MANY))
    assert numbers(data) == list(range(1, 15))
    assert torch.equal(data["next", "calls"], data["action"] - 2)


@pytest.mark.parametrize("name", ["observation", "reward", "done", "info"])
def test_nothing_else_below_next_is_the_policys(name):
    keys = ["action", name, ("next", name)]
    policy = TensorDictModule(lambda x: (x.argmax(-1), x, x), ["observation"], keys)
    with pytest.raises(UsageError, match=f"output '{name}' clashes"):
        make_collector(policy, make_envs(None, spaces.Discrete(3)))


def test_reset_and_a_new_seed_make_it_forget():
    with make_collector(Counting(), make_envs(2, MANY)) as collector:
        collector.next()
        collector.reset()
        assert numbers(collector.next()) == list(range(1, 8))
        collector.set_seed(1)
        assert numbers(collector.next()) == list(range(1, 8))


def test_reset_at_each_batch_is_a_new_episode_and_no_more():
    data = collect(Counting(), make_envs(2, MANY), reset_at_each_iter=True)
    assert numbers(data) == list(range(1, 15))


def test_it_goes_on_after_a_resume():
    with make_collector(Counting("calls"), make_envs(2, MANY)) as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next().clone()
    with make_collector(Counting("calls"), make_envs(2, MANY)) as collector:
        collector.load_state_dict(state)
        assert_equal(collector.next(), expected)


def test_it_goes_on_when_collecting_goes_on_in_the_background():
    class Buffer:
        def __init__(self) -> None:
            self.batches: list[TensorDict] = []

        def extend(self, batch: TensorDict) -> None:
            self.batches.append(batch.clone())

    buffer = Buffer()
    options = {"total_frames": 28, "replay_buffer": buffer}
    with make_collector(WithWeights(), make_envs(2, MANY), **options) as collector:
        collector.next()
        collector.start()
        while collector.is_running():
            pass
    assert numbers(torch.cat(buffer.batches, -1)) == list(range(1, 15))


class WithWeights(Counting):
    """Has something to publish, so that the background thread gets a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()


@pytest.mark.processes
def test_each_worker_has_its_own_and_a_resume_gives_it_back():
    make = functools.partial(SerialEnv, 2, functools.partial(CountingEnv, MANY))
    options = {"frames_per_batch": 20, "seed": 0, "cat_results": "stack"}
    with MultiSyncCollector([make] * 2, Counting(), **options) as collector:
        assert numbers(collector.next()) == list(range(1, 6))
        state = collector.state_dict()
        assert numbers(collector.next()) == list(range(6, 11))
    with MultiSyncCollector([make] * 2, Counting(), **options) as collector:
        collector.load_state_dict(state)
        assert numbers(collector.next()) == list(range(6, 11))
        collector.reset()
        assert numbers(collector.next()) == list(range(1, 6))


def noisy(module: Any) -> Any:
    """An actor that always says 0, and noise that remembers itself."""
    from torchrl.data import Bounded
    from torchrl.modules import OrnsteinUhlenbeckProcessModule

    noise = OrnsteinUhlenbeckProcessModule(Bounded(-2, 2, (1,)), sigma=0.2, theta=0.01, eps_end=1.0)
    return TensorDictSequential(TensorDictModule(module, ["observation"], ["action"]), noise)


def autocorrelation(values: torch.Tensor) -> float:
    values = values - values.mean()
    return float((values[1:] * values[:-1]).sum() / values.square().sum())


@pytest.mark.filterwarnings("ignore")
def test_ornstein_uhlenbeck_noise_wanders_as_with_torchrl():
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import GymEnv

    def actions(kind: Any) -> torch.Tensor:
        torch.manual_seed(0)
        policy = noisy(lambda x: 0 * x[..., :1])
        collector = kind(GymEnv("Pendulum-v1"), policy, frames_per_batch=150, total_frames=300)
        made = torch.cat([batch["action"].clone() for batch in collector])[:, 0]
        collector.shutdown()
        return made

    theirs, ours = actions(TheirCollector), actions(Collector)
    assert autocorrelation(theirs) > 0.9
    assert autocorrelation(ours) > 0.9
    assert 0.5 < ours.std() / theirs.std() < 2


def test_an_answer_that_is_no_tensordict_is_refused():
    def policy(td: TensorDict) -> None:
        td["action"] = td["observation"].argmax(-1)

    with pytest.raises(PolicyError, match=r"took a TensorDict and returned NoneType; return the"):
        make_collector(policy)


def test_a_policy_that_writes_over_its_observation_is_refused():
    def policy(td: TensorDict) -> TensorDict:
        td["observation"] = td["observation"] * 2
        return td.set("action", td["observation"].argmax(-1))

    with pytest.raises(UsageError, match="'observation' clashes with 'observation'"):
        make_collector(policy, make_envs(None, TORQUE))


def test_rollouts_that_stay_on_a_device_carry_it_in_tensors_that_stay_where_they_are():
    def collected(kind: Any) -> list[TensorDict]:
        group = as_group(TorchCartPole(3))
        runner, made = kind(group, CountingParity(), Plan(steps=7, seed=0)), []
        places = set()
        for number in range(4):
            if number == 3:
                runner.reset()
                assert not runner.policy.can_be_recorded
            made.append(runner.lend(runner.collect()).clone())
            assert runner.policy.can_be_recorded
            places.add(runner.policy.carried.values["_calls",].data_ptr())
        assert len(places) == 1
        return made

    for ours, others in zip(collected(DeviceRunner), collected(Runner), strict=True):
        assert torch.equal(ours["action"], others["action"])
        assert torch.equal(ours["calls"], others["calls"])
    assert numbers(TensorDict({"action": ours["calls"]}, [3, 7])) == list(range(1, 8))
