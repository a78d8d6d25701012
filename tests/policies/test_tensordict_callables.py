"""Functions and modules that take a TensorDict without being `tensordict.nn` modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from policy_kit import Argmax, assert_equal, collect, make_collector, make_envs
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from swath.collectors import MultiSyncCollector
from swath.errors import PolicyError


def choose(observation: torch.Tensor) -> torch.Tensor:
    return (observation.sum(-1) > 0).long()


def in_place(td):
    return td.set("action", choose(td["observation"]))


def out_of_place(tensordict):
    return TensorDict({"action": choose(tensordict["observation"])}, tensordict.shape)


def annotated(data: TensorDict):
    return in_place(data)


def annotated_as_optional(data: TensorDictBase | None = None):
    assert data is not None
    return in_place(data)


def annotated_in_quotes(data: "TensorDictBase"):  # noqa: UP037
    return in_place(data)


def with_options(td, scale=1.0, *rest, flag=False, **others):
    return in_place(td)


class Module(nn.Module):
    def forward(self, tensordict):
        return in_place(tensordict)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TensorDictModule(choose, ["observation"], ["action"])

    def forward(self, td):
        return self.inner(td)


class Callable_:
    def __call__(self, td):
        return in_place(td)

    def act(self, tensordict):
        return in_place(tensordict)


FORMS = {
    "in place": lambda: in_place,
    "out of place": lambda: out_of_place,
    "lambda": lambda: lambda td: td.set("action", choose(td["observation"])),
    "annotated": lambda: annotated,
    "annotated as optional": lambda: annotated_as_optional,
    "annotated in quotes": lambda: annotated_in_quotes,
    "with options": lambda: with_options,
    "partial": lambda: functools.partial(with_options, scale=2.0),
    "module": Module,
    "around a module": Around,
    "object": Callable_,
    "method": lambda: Callable_().act,
}


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("name", FORMS)
def test_what_takes_a_tensordict_gets_one(name, num_envs):
    data = collect(FORMS[name](), make_envs(num_envs))
    assert_equal(data, collect(choose, make_envs(num_envs)))


def test_all_else_that_it_writes_is_stored():
    def policy(td):
        td["value"] = td["observation"].sum(-1, keepdim=True)
        td["inner", "value"] = td["value"] * 2
        td["_secret"] = td["value"] * 3
        return in_place(td)

    data = collect(policy, make_envs(3))
    assert torch.equal(data["value"], data["observation"].sum(-1, keepdim=True))
    assert torch.equal(data["inner", "value"], data["value"] * 2)
    assert "_secret" not in data.keys()


@pytest.mark.processes
@pytest.mark.parametrize("given", ["policy", "factory"])
def test_in_workers_too(given):
    make = functools.partial(make_envs, 2)
    options: Any = {"frames_per_batch": 28, "seed": 0, "cat_results": "stack"}

    def policy(td):
        return in_place(td)

    if given == "policy":
        ours = MultiSyncCollector([make] * 2, policy, **options)
    else:
        ours = MultiSyncCollector([make] * 2, policy_factory=lambda: policy, **options)
    with ours, MultiSyncCollector([make] * 2, choose, **options) as others:
        assert_equal(ours.next(), others.next())


def test_a_random_action_of_torchrls_env_is_a_policy():
    from torchrl.envs import GymEnv

    env = GymEnv("Pendulum-v1")
    data = collect(env.rand_action, env, frames_per_batch=50)
    assert data["action"].min() < -1.5
    assert data["action"].max() > 1.5


FLAGS = ["done", "terminated", "truncated"]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_it_may_read_the_flags_of_its_row_and_the_number_of_its_trajectory(num_envs):
    def policy(td):
        td["none"] = torch.stack([td[flag] for flag in FLAGS]).any(0)
        td["trajectory"] = td["collector", "traj_ids"] + 0
        return in_place(td)

    data = collect(policy, make_envs(num_envs, longest=4), batches=3)
    assert data["next", "done"].sum() > 3
    assert not data["none"].any()
    assert torch.equal(data["trajectory"], data["collector", "traj_ids"])


def test_a_module_may_read_them_by_its_in_keys():
    ids = ("collector", "traj_ids")
    policy = TensorDictModule(
        lambda x, done, number: (choose(x), done.clone(), number.clone()),
        ["observation", "done", ids],
        ["action", "was_done", "trajectory"],
    )
    data = collect(policy, make_envs(3, longest=4), batches=3)
    assert not data["was_done"].any()
    assert torch.equal(data["trajectory"], data[ids])


def test_a_module_may_read_more_than_its_in_keys_say():
    class Curious(TensorDictModuleBase):
        in_keys, out_keys = ["observation"], ["action", "trajectory"]

        def forward(self, td):
            td["trajectory"] = td["collector", "traj_ids"] * (~td["done"][..., 0]).long()
            return in_place(td)

    data = collect(Curious(), make_envs(3, longest=4), batches=3)
    assert torch.equal(data["trajectory"], data["collector", "traj_ids"])


def test_envs_that_stay_ended_say_so():
    def policy(td):
        td["was_done"] = td["done"] + False
        return in_place(td)

    data = collect(policy, make_envs(3, longest=4), batches=1, reset_when_done=False)
    assert data["was_done"].any()
    assert torch.equal(data["was_done"], data["done"])


CPU = torch.device("cpu")
DEVICES: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, None, None),
    ({"device": "cpu"}, CPU, CPU),
    ({"policy_device": "cpu"}, CPU, None),
    ({"storing_device": "cpu"}, None, CPU),
    ({"env_device": "cpu"}, None, None),
    ({"env_device": "cpu", "policy_device": "cpu"}, CPU, CPU),
]


@pytest.mark.parametrize(("options", "policys", "batchs"), DEVICES)
def test_its_tensordict_and_the_batch_have_the_device_that_was_asked_for(options, policys, batchs):
    seen = set()

    def policy(td):
        seen.add(td.device)
        return in_place(td)

    data = collect(policy, make_envs(3), **options)
    assert seen == {policys}
    assert data.device == batchs


def test_one_that_takes_a_tensor_is_told_how_to_ask_for_a_tensordict():
    def policy(state):
        return state.set("action", choose(state["observation"]))

    with pytest.raises(PolicyError, match=r"name its argument td or tensordict"):
        make_collector(policy)


@pytest.mark.parametrize("workers", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_a_trusted_policy_gets_one_whatever_its_argument_is_called(workers):
    def policy(state):
        return in_place(state)

    if not workers:
        data = collect(policy, make_envs(3), trust_policy=True)
        assert_equal(data, collect(choose, make_envs(3)))
        return
    options: Any = {"frames_per_batch": 14, "seed": 0, "trust_policy": True}
    makers = [functools.partial(make_envs, 1)] * 2
    with MultiSyncCollector(makers, policy_factory=lambda: policy, **options) as ours:
        assert torch.equal((batch := ours.next())["action"], choose(batch["observation"]))


def test_what_takes_tensors_is_not_mistaken():
    def policy(observation, td=None):
        return choose(observation)

    assert_equal(collect(policy, make_envs(3)), collect(choose, make_envs(3)))
    assert_equal(collect(Argmax(), make_envs(3)), collect(Argmax().forward, make_envs(3)))
