"""Policies with a state: carried, reset at each episode's start, stored for training."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from policy_kit import assert_equal, collect, discrete, make_collector, make_envs
from tensordict.nn import TensorDictModule
from torch import nn

from swath.errors import PolicyError, UsageError
from swath.policies import RecurrentPolicy

Pair = collections.namedtuple("Pair", ["h", "c"])
START = torch.tensor([0.5, -0.5])
both = pytest.mark.parametrize("num_envs", [None, 1, 3])


def step(observation: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Depends on all observations since the start of the episode."""
    state = (state + observation[..., :2]).sin()
    return (state.sum(-1) > 0).long(), state


class Attribute(nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.initial_state = START.clone()

    def forward(self, observation: torch.Tensor, state: torch.Tensor) -> Any:
        return step(observation, state)


class Method:
    def initial_state(self) -> torch.Tensor:
        return START

    def __call__(self, observation: torch.Tensor, state: torch.Tensor) -> Any:
        return step(observation, state)


class Learned(Attribute):
    def __init__(self) -> None:
        super().__init__()
        del self.initial_state
        self.initial_state = nn.Parameter(START.clone())


FORMS = {
    "wrapped": lambda: RecurrentPolicy(step, START),
    "attribute": Attribute,
    "method": Method,
    "parameter": Learned,
    "module": lambda: RecurrentPolicy(Attribute(), START),
}


@both
@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: {"h": x}, lambda x: ({"h": x},)])
def test_a_structure_of_one_tensor_is_kept(wrap, num_envs):
    def policy(observation: torch.Tensor, state: Any) -> Any:
        assert type(state) is type(wrap(START))
        while not isinstance(state, torch.Tensor):
            state = state["h"] if isinstance(state, dict) else state[0]
        action, state = step(observation, state)
        return action, wrap(state)

    data = collect(RecurrentPolicy(policy, wrap(START)), make_envs(num_envs))
    assert torch.equal(data["action"], collect(Attribute(), make_envs(num_envs))["action"])


def check_state(data: Any, key: Any, start: torch.Tensor) -> None:
    """What came out goes in, except at the start of an episode."""
    went_in, came_out = data[key], data["next"][key]
    data = data.select("next", "collector")
    if data.ndim == 1:
        data, went_in, came_out = data[None], went_in[None], came_out[None]
    starts = data["next", "done"][:, :-1, 0]
    assert 0 < starts.sum() < starts.numel()
    assert torch.equal(starts, data["collector", "traj_ids"].diff(dim=1) != 0)
    assert (went_in[:, 0] == start).all()
    assert (went_in[:, 1:][starts] == start).all()
    assert torch.equal(went_in[:, 1:][~starts], came_out[:, :-1][~starts])
    assert not torch.equal(went_in, came_out)


@both
@pytest.mark.parametrize("name", FORMS)
def test_a_state_is_carried_over_steps_and_batches_and_starts_anew_with_episodes(name, num_envs):
    data = collect(FORMS[name](), make_envs(num_envs, longest=6), batches=4)
    check_state(data, "policy_state", START)
    action, state = step(data["observation"], data["policy_state"])
    assert torch.equal(data["action"], action)
    torch.testing.assert_close(data["next", "policy_state"], state)


@pytest.mark.parametrize("frames", [1, 4, 28])
def test_batches_of_any_length_carry_the_same_states(frames):
    one = collect(Attribute(), frames_per_batch=frames, batches=28 // frames)
    assert_equal(one, collect(Attribute(), frames_per_batch=28, batches=1))


STRUCTURES = {
    "dict": ({"h": START, "deep": {"c": START * 2}}, [("h",), ("deep", "c")]),
    "tuple": ((START, (START * 2,)), [("0",), ("1", "0")]),
    "named tuple": (Pair(START, START * 2), [("0",), ("1",)]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_state_may_be_nested_and_comes_back_as_it_was_given(name):
    initial, keys = STRUCTURES[name]
    kinds = set()

    def policy(observation, state):
        kinds.add(type(state))
        first = state["h"] if name == "dict" else state[0]
        action, first = step(observation, first)
        other = state["deep"]["c"] if name == "dict" else state[1]
        other = other[0] if name == "tuple" else other
        other = other + 1
        if name == "dict":
            return action, {"h": first, "deep": {"c": other}}
        return action, (first, (other,)) if name == "tuple" else Pair(first, other)

    data = collect(RecurrentPolicy(policy, initial), make_envs(3, longest=6), batches=3)
    check_state(data, ("policy_state", *keys[0]), START)
    check_state(data, ("policy_state", *keys[1]), START * 2)
    assert kinds == {type(initial)}


@both
def test_extras_come_between_action_and_state(num_envs):
    def policy(observation, state):
        action, state = step(observation, state)
        return action, {"value": state[..., 0]}, state

    data = collect(RecurrentPolicy(policy, START), make_envs(num_envs), batches=3)
    check_state(data, "policy_state", START)
    assert torch.equal(data["value"], data["next", "policy_state"][..., 0])


def test_a_dict_of_action_and_extras_may_come_with_a_state():
    def policy(observation, state):
        action, state = step(observation, state)
        return {"action": action, "value": state[..., 0]}, state

    data = collect(RecurrentPolicy(policy, START), make_envs(3))
    assert torch.equal(data["value"], data["next", "policy_state"][..., 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_states_of_any_dtype_are_carried(dtype):
    def policy(observation, state):
        return discrete(observation), ~state if dtype is torch.bool else state + 1

    data = collect(RecurrentPolicy(policy, torch.zeros((), dtype=dtype)), make_envs(3), batches=3)
    assert data["policy_state"].dtype == dtype
    check_state(data, "policy_state", torch.zeros((), dtype=dtype))


def test_a_state_of_bfloat16_is_carried():
    start = torch.zeros(2, dtype=torch.bfloat16)
    policy = RecurrentPolicy(lambda x, state: (discrete(x), state + 1), start)
    check_state(collect(policy, make_envs(3), batches=3), "policy_state", start)


def test_a_policy_that_changes_its_state_in_place_does_not_change_what_went_in():
    def policy(observation, state):
        action, new = step(observation, state)
        return action, state.copy_(new)

    data = collect(RecurrentPolicy(policy, START), make_envs(3), batches=3)
    assert_equal(data, collect(Attribute(), make_envs(3), batches=3))
    assert (START == torch.tensor([0.5, -0.5])).all()


def test_a_learned_initial_state_counts_from_the_next_episode_on():
    policy = Learned()
    with make_collector(policy, make_envs(3, longest=4), frames_per_batch=60) as collector:
        collector.next()
        with torch.no_grad():
            policy.initial_state.fill_(0.125)
        data = collector.next()
    started = data["next", "done"][:, :-1, 0]
    assert (data["policy_state"][:, 1:][started] == 0.125).all()


def gate(observation: torch.Tensor, hidden: torch.Tensor, is_init: torch.Tensor) -> Any:
    action, state = step(observation, hidden)
    return action, state, is_init.float()


@both
def test_a_tensordict_module_reads_its_state_and_the_start_of_episodes(num_envs):
    policy = TensorDictModule(
        gate,
        ["observation", ("agent", "hidden"), "is_init"],
        ["action", ("next", "agent", "hidden"), "first"],
    )
    policy.initial_state = {"agent": {"hidden": START}}
    data = collect(policy, make_envs(num_envs, longest=6), batches=4)
    check_state(data, ("agent", "hidden"), START)
    assert torch.equal(data["first"], data["is_init"].float())
    ids = data["collector", "traj_ids"]
    assert torch.equal(data["is_init"][..., 1:, 0], ids.diff(dim=-1) != 0)
    assert data["is_init"][..., 0, 0].all()


def test_a_state_survives_a_resume():
    with make_collector(Attribute(), make_envs(3)) as collector:
        collector.next()
        state = collector.state_dict()
        expected = collector.next().clone()
    with make_collector(Attribute(), make_envs(3)) as collector:
        collector.load_state_dict(state)
        assert_equal(collector.next(), expected)


def test_reset_at_each_batch_starts_the_state_anew():
    data = collect(Attribute(), make_envs(3), reset_at_each_iter=True, batches=3)
    assert (data["policy_state"][:, ::7] == START).all()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (RecurrentPolicy(lambda x, s: discrete(x), START), r"\(action, state\).*a Tensor"),
        (
            RecurrentPolicy(lambda x, s: (discrete(x), 1, 2, s), START),
            r"must return .*returned a tuple of 4 values",
        ),
        (
            RecurrentPolicy(lambda x, s: (discrete(x), s[:1]), START),
            r"'policy_state' has shape \(1,\); \(2,\) is needed",
        ),
        (
            RecurrentPolicy(lambda x, s: (discrete(x), s.double()), START),
            r"'policy_state' has dtype torch.float64; torch.float32 is needed",
        ),
        (
            RecurrentPolicy(lambda x, s: (discrete(x), {"h": s["h"]}), {"h": START, "c": START}),
            r"returned no \('policy_state', 'c'\); it returned",
        ),
        (RecurrentPolicy(step, 3.0), r"initial_state has a float at 'policy_state'"),
        (RecurrentPolicy(step, [START]), r"initial_state has a list"),
        (
            RecurrentPolicy(step, lambda batch_size: START),
            r"initial_state\(\) raised TypeError.*must take no arguments",
        ),
        (
            TensorDictModule(step, ["observation", "h"], ["action", ("next", "h")]),
            r"the recurrent state 'h' has no initial value.*attribute initial_state",
        ),
    ],
)
def test_a_state_that_cannot_be_carried_is_refused_at_construction(policy, message):
    with pytest.raises((UsageError, PolicyError), match=message):
        make_collector(policy)
