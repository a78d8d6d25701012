"""Plain callables and modules as policies: what they get, what they may answer, what is stored."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_kit import (
    BOX,
    TORQUE,
    Argmax,
    assert_equal,
    collect,
    discrete,
    make_collector,
    make_envs,
)
from tensordict import TensorDict
from torch import nn

from swath.collectors import Collector

Answer = collections.namedtuple("Answer", ["action", "value", "spread"])
both = pytest.mark.parametrize("num_envs", [None, 1, 3])


def actions_of(data: TensorDict) -> TensorDict:
    return data.select("action", "next", "observation", "collector")


@both
def test_a_linear_layer_is_a_policy(num_envs):
    policy = nn.Linear(3, 1)
    envs = make_envs(num_envs, spaces.Box(-np.inf, np.inf, (1,)))
    data = collect(policy, envs)
    torch.testing.assert_close(data["action"], policy(data["observation"]).detach())
    assert not data["action"].requires_grad


def test_pendulum_runs_with_a_linear_layer():
    with Collector("Pendulum-v1", nn.Linear(3, 1), frames_per_batch=5) as collector:
        assert collector.next()["action"].shape == (5, 1)


@pytest.mark.parametrize(("num_envs", "shape"), [(None, (3,)), (1, (1, 3)), (4, (4, 3))])
def test_a_lone_env_gives_single_observations_and_others_give_rows(num_envs, shape):
    shapes = set()

    def policy(observation):
        shapes.add(tuple(observation.shape))
        return discrete(observation)

    collect(policy, make_envs(num_envs))
    assert shapes == {shape}


class Named:
    def __call__(self, *whatever: Any) -> torch.Tensor:
        return discrete(whatever[0])

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return discrete(x)


@both
@pytest.mark.parametrize("policy", [discrete, Named(), Named().act, lambda a, b=1: discrete(a)])
def test_arguments_may_have_any_name(policy, num_envs):
    data = collect(policy, make_envs(num_envs))
    assert torch.equal(data["action"], discrete(data["observation"]))
    assert data["action"].unique().numel() == 2


def numbered(observation: torch.Tensor) -> dict[str, Any]:
    """Extras of every dtype and of several shapes."""
    one = observation.sum(-1)
    return {
        "action": discrete(observation),
        "half": one.to(torch.bfloat16),
        "flag": one > 0,
        "small": (one * 100).to(torch.int32),
        "double": one.double() / 3,
        "grid": torch.stack([observation, observation + 1], -2),
        "complex": torch.complex(one, -one),
        "byte": (one * 10 + 50).to(torch.uint8),
        "deep": {"er": {"value": observation[..., :1]}},
    }


@both
def test_extras_of_any_dtype_and_shape_are_stored(num_envs):
    data = collect(numbered, make_envs(num_envs))
    expected = TensorDict(numbered(data["observation"]), data.batch_size)
    assert_equal(data.select(*expected.keys()), expected)


def as_dict(x: torch.Tensor) -> Any:
    return {"action": discrete(x), "log_prob": x.sum(-1), "value": x[..., 0]}


ANSWERS = {
    "dict": as_dict,
    "tensordict": lambda x: TensorDict(as_dict(x), x.shape[:-1]),
    "tuple": lambda x: tuple(as_dict(x).values()),
    "tuple with a dict": lambda x: (
        discrete(x),
        {"log_prob": x.sum(-1), "value": x[..., 0]},
    ),
    "numpy": lambda x: {key: value.numpy() for key, value in as_dict(x).items()},
}


@both
@pytest.mark.parametrize("name", ANSWERS)
def test_extras_may_come_in_many_forms(name, num_envs):
    data = collect(ANSWERS[name], make_envs(num_envs))
    assert_equal(data, collect(as_dict, make_envs(num_envs)))
    assert torch.equal(data["log_prob"], data["observation"].sum(-1))


def test_a_named_tuple_names_its_extras():
    data = collect(lambda x: Answer(discrete(x), x[..., 0], x[..., 1]), make_envs(3))
    assert torch.equal(data["value"], data["observation"][..., 0])
    assert torch.equal(data["spread"], data["observation"][..., 1])
    assert "log_prob" not in data.keys()


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: int(x.sum() > 0),
        lambda x: bool(x.sum() > 0),
        lambda x: np.int32(x.sum() > 0),
        lambda x: x.numpy().sum() > 0,
        lambda x: (x.sum() > 0).to(torch.uint8),
        lambda x: {"action": int(x.sum() > 0)},
    ],
)
def test_the_action_of_a_lone_env_may_be_any_whole_number(policy):
    assert_equal(actions_of(collect(policy)), actions_of(collect(discrete)))


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: x.numpy().astype(np.float64)[..., :1],
        lambda x: x[..., :1].double(),
        lambda x: [[float(row[0])] for row in x],
    ],
)
def test_actions_are_rounded_to_the_dtype_of_their_space(policy):
    data = collect(policy, make_envs(3, TORQUE))
    assert torch.equal(data["action"], data["observation"][..., :1])
    assert data["action"].dtype == torch.float32


OBSERVATIONS = {
    "dict": spaces.Dict({"b": BOX, "a": spaces.Dict({"n": spaces.Discrete(4)})}),
    "dict of one": spaces.Dict({"observation": BOX}),
    "tuple": spaces.Tuple([BOX, spaces.MultiBinary(2)]),
    "number": spaces.Discrete(5, start=2),
}


@both
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_nested_observations_arrive_as_the_space_nests_them(name, num_envs):
    seen: list[Any] = []

    def policy(observation):
        seen.append(observation)
        return torch.zeros(() if num_envs is None else (num_envs,), dtype=torch.int64)

    data = collect(policy, make_envs(num_envs, observation_space=OBSERVATIONS[name]), batches=1)
    last = data[..., -1]
    expected: Any = {
        "dict": lambda: {"b": last["b"], "a": {"n": last["a", "n"]}},
        "dict of one": lambda: {"observation": last["observation"]},
        "tuple": lambda: (last["observation", "0"], last["observation", "1"]),
        "number": lambda: last["observation"],
    }[name]()
    torch.testing.assert_close(seen[-1], expected, rtol=0, atol=0)
    assert type(seen[-1]) is type(expected)


ACTIONS = spaces.Dict(
    {"go": TORQUE, "bag": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])}
)


def nested_action(x: torch.Tensor) -> Any:
    return {"go": x[..., :1], "bag": (discrete(x), (x[..., :2] > 0).to(torch.int8))}


@both
@pytest.mark.parametrize(
    "policy",
    [
        nested_action,
        lambda x: {"action": nested_action(x)},
    ],
)
def test_nested_actions_are_given_as_the_space_nests_them(policy, num_envs):
    data = collect(policy, make_envs(num_envs, ACTIONS))
    x = data["observation"]
    assert torch.equal(data["action", "go"], x[..., :1])
    assert torch.equal(data["action", "bag", "0"], discrete(x))
    assert torch.equal(data["action", "bag", "1"], (x[..., :2] > 0).to(torch.int8))


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: {"action": nested_action(x), "value": x[..., 0]},
        lambda x: (nested_action(x), {"value": x[..., 0]}),
    ],
)
def test_nested_actions_may_have_extras(policy):
    data = collect(policy, make_envs(3, ACTIONS))
    assert torch.equal(data["action", "go"], data["observation"][..., :1])
    assert torch.equal(data["value"], data["observation"][..., 0])


def test_a_tuple_action_is_told_from_an_action_with_extras():
    space = spaces.Tuple([spaces.Discrete(2), TORQUE])

    def pair(x):
        return discrete(x), x[..., :1]

    plain = collect(pair, make_envs(3, space))
    with_extras = collect(lambda x: (pair(x), {"value": x[..., 0]}), make_envs(3, space))
    assert torch.equal(plain["action", "1"], plain["observation"][..., :1])
    assert torch.equal(with_extras["value"], with_extras["observation"][..., 0])
    assert_equal(plain, with_extras.exclude("value"))


def test_a_dict_action_may_have_an_entry_called_action():
    space = spaces.Dict({"action": spaces.Discrete(2), "more": TORQUE})
    data = collect(lambda x: {"action": discrete(x), "more": x[..., :1]}, make_envs(3, space))
    assert torch.equal(data["action", "more"], data["observation"][..., :1])


def test_a_policy_that_changes_its_input_does_not_change_the_data():
    def policy(observation):
        observation.mul_(0).add_(1)
        return {"action": discrete(observation), "seen": observation}

    data = collect(policy, make_envs(3))
    assert_equal(
        data.select("observation", "next"),
        collect(lambda x: torch.ones(3, dtype=torch.int64), make_envs(3)).select(
            "observation", "next"
        ),
    )
    assert (data["seen"] == 1).all()


class Memory:
    """Remembers its last three inputs, as a frame stack does."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, observation: torch.Tensor) -> Any:
        self.seen = [*self.seen, observation[..., 0]][-3:]
        return {"action": discrete(observation), "oldest": self.seen[0]}


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_a_policy_that_keeps_its_inputs_finds_them_unchanged(frames):
    data = collect(Memory(), frames_per_batch=frames, batches=30 // frames)
    assert torch.equal(data["oldest"][2:], data["observation"][:-2, 0])


class Reusing:
    """Answers with the same memory at every step, its own or its input's."""

    def __init__(self) -> None:
        self.action, self.kept = torch.zeros(3, dtype=torch.int64), []

    def __call__(self, observation: torch.Tensor) -> Any:
        self.action.copy_(discrete(observation))
        self.kept.append(self.action)
        return {"action": self.action.view(3), "same": observation, "part": observation[..., 1:]}


def test_a_policy_may_answer_with_its_input_or_with_memory_that_it_uses_again():
    data = collect(Reusing(), make_envs(3), batches=3)
    assert torch.equal(data["action"], discrete(data["observation"]))
    assert torch.equal(data["same"], data["observation"])
    assert torch.equal(data["part"], data["observation"][..., 1:])


def test_delivered_batches_do_not_change_when_the_policy_writes_into_its_answers():
    policy = Reusing()
    with make_collector(policy, make_envs(3)) as collector:
        batch = collector.next()
        copy = batch.clone()
        collector.next()
        policy.kept[0].fill_(7)
        assert_equal(batch, copy)


def test_an_answer_that_requires_grad_is_stored_without():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.tensor([0.25]))

        def forward(self, observation):
            with torch.enable_grad():
                return {"action": self.mean, "value": self.mean * 2}

    data = collect(Learned(), make_envs(None, TORQUE))
    assert (data["action"] == 0.25).all()
    assert (data["value"] == 0.5).all()
    assert not data["action"].requires_grad


def test_answers_with_odd_strides_are_stored_right():
    def policy(x):
        turned = torch.stack([x[..., 0], x[..., 1]]).T
        return {"action": turned.argmax(-1), "turned": turned, "sign": torch._neg_view(x)}

    data = collect(policy, make_envs(3))
    assert torch.equal(data["turned"], data["observation"][..., :2])
    assert torch.equal(data["sign"], -data["observation"])


@pytest.mark.parametrize("order", ["time", "batch"])
def test_memory_order_does_not_change_what_a_policy_computes(order):
    data = collect(numbered, make_envs(3), memory_order=order)
    assert_equal(data, collect(numbered, make_envs(3)))


def test_a_factory_makes_the_policy():
    made = collect(None, policy_factory=Argmax)
    assert_equal(made, collect(Argmax()))


PLACE = spaces.Dict(
    {"here": BOX, "inner": spaces.Dict({"a": BOX, "b": spaces.Box(-1, 1, (2,))}), "there": TORQUE}
)


@both
def test_several_arguments_that_are_named_after_entries_get_these(num_envs):
    class Net(nn.Module):
        def forward(self, there, inner, here=None, scale=1.0):
            assert set(inner) == {"a", "b"}
            value = there[..., 0] + inner["b"].sum(-1)
            return discrete(here), value

    data = collect(Net(), make_envs(num_envs, observation_space=PLACE))
    assert torch.equal(data["action"], discrete(data["here"]))
    expected = data["there"][..., 0] + data["inner", "b"].sum(-1)
    torch.testing.assert_close(data["log_prob"], expected)


def test_one_argument_is_the_whole_observation_whatever_it_is_called():
    def policy(here):
        return discrete(here["here"])

    data = collect(policy, make_envs(3, observation_space=PLACE))
    assert torch.equal(data["action"], discrete(data["here"]))


def test_more_than_three_values_are_numbered_as_torchrl_does():
    def policy(observation):
        rows = observation.sum(-1)
        return discrete(observation), rows, rows + 1, rows + 2

    data = collect(policy, make_envs(3))
    for number in range(1, 4):
        expected = data["observation"].sum(-1) + number - 1
        torch.testing.assert_close(data[f"output{number}"], expected)
    assert "log_prob" not in data.keys()
