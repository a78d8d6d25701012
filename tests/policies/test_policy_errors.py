"""Policies that do wrong: refused at construction where it shows, else at the very step."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
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
from tensordict.nn import InteractionType
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from swath.errors import PolicyError, SwathError, UsageError

PAIR = spaces.Dict({"a": spaces.Discrete(2), "b": TORQUE})
DEEP = spaces.Dict({"eye": spaces.Dict({"left": BOX})})


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Callable[[Any], torch.Tensor]:
    return lambda x: torch.zeros(shape, dtype=dtype)


def with_extra(name: Any, value: Any) -> Callable[[Any], Any]:
    return lambda x: {"action": torch.zeros(3, dtype=torch.int64), name: value}


@pytest.mark.parametrize(
    ("policy", "num_envs", "space", "message"),
    [
        (zeros(4), 3, None, r"'action' has shape \(4,\); \(3,\) is needed .*Discrete\(2\).*\(3,\)"),
        (zeros(3, 2), 3, None, r"shape \(3, 2\).*logits or a one-hot vector: .*argmax\(-1\)"),
        (zeros(2), None, None, r"shape \(2,\); \(\) is needed.*argmax\(-1\)"),
        (zeros(3, 1), 3, None, r"shape \(3, 1\); \(3,\).*squeeze\(-1\)"),
        (zeros(3, dtype=torch.float32), 3, TORQUE, r"\(3, 1\) is needed.*unsqueeze\(-1\)"),
        (zeros(3, dtype=torch.float32), 3, None, r"has dtype torch.float32; torch.int64 is needed"),
        (
            zeros(3, 1, dtype=torch.complex64),
            3,
            TORQUE,
            r"has dtype torch.complex64; torch.",
        ),
        (lambda x: np.full((3, 1), "a"), 3, TORQUE, r"of type ndarray; numbers are needed"),
        (lambda x: zeros(3)(x) + 2, 3, None, r"outside the action space Discrete\(2\): 2 in row 0"),
        (lambda x: torch.tensor([0, 1, -1]), 3, None, r"outside .*: -1 in row 2 of 3"),
        (lambda x: 5, None, None, r"outside the action space Discrete\(2\): 5"),
        (lambda x: torch.tensor([1, 9]), None, spaces.MultiDiscrete([2, 3]), r"outside .*\[1, 9\]"),
        (lambda x: torch.tensor([1, 2]), None, spaces.MultiBinary(2), r"outside .*\[1, 2\]"),
        (lambda x: 1, None, spaces.Discrete(3, start=5), r"outside .*start=5.*: 1"),
        (lambda x: x[:1] * torch.nan, None, TORQUE, r"'action' is not finite: \[nan\]"),
        (lambda x: x[:, :1] / 0, 3, TORQUE, r"'action' is not finite: \[-?inf\] in row 0 of 3"),
        (lambda x: {"logits": x}, 3, None, r"returned no 'action'; it returned \[\"'logits'\"\]"),
        (lambda x: {"a": zeros(3)(x)}, 3, PAIR, r"returned no \('action', 'b'\); it returned"),
        (lambda x: zeros(3)(x), 3, PAIR, r"returned no \('action', 'a'\); it returned \[\]"),
        (lambda x: zeros(2, 3)(x), 2, spaces.Tuple([TORQUE] * 2), r"returned no \('action', '0'\)"),
        (
            lambda x: torch.tensor([300]),
            None,
            spaces.Box(-99, 99, (1,), np.int8),
            r"'action' has numbers that do not fit into torch.int8, 300 to 300",
        ),
        (lambda x: None, None, None, r"'action' is None, of type NoneType; numbers are needed"),
        (
            lambda x: collections.namedtuple("Out", "value action")(1, 1),
            None,
            None,
            r"a Out of 2 values whose first value is 'value'; it must be the action",
        ),
        (
            Mod(Argmax(), ["observation"], ["act"]),
            3,
            None,
            r"returned no 'action'; it returned .*'act'",
        ),
    ],
)
def test_a_wrong_action_is_refused_at_construction(policy, num_envs, space, message):
    with pytest.raises(PolicyError, match=message):
        make_collector(policy, make_envs(num_envs, space))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("value", torch.zeros(()), r"'value' has shape \(\); .*start with the batch shape \(3,\)"),
        ("value", torch.zeros(1, 3), r"'value' has shape \(1, 3\).*\(3,\)"),
        ("value", 0.5, r"'value' has shape \(\)"),
        ("value", None, r"'value' is None, of type NoneType; numbers are needed"),
        ("value", "high", r"'value' is 'high', of type str; .*convert it"),
        ("value", [[1], [2, 3]], r"'value' is .*, of type list"),
        ("value", torch.zeros(3).to(torch.float8_e5m2), r"of type torch.float8_e5m2; .*convert it"),
        ("observation", torch.zeros(3), r"'observation' clashes with 'observation'.*taken.*Rename"),
        ("done", torch.zeros(3), r"'done' clashes with 'done', which swath fills in itself"),
        ("truncated", torch.zeros(3), r"'truncated' clashes"),
        ("collector", {"ids": torch.zeros(3)}, r"\('collector', 'ids'\) clashes with 'collector'"),
        ("next", {"reward": torch.zeros(3)}, r"\('next', 'reward'\) clashes with 'next'"),
        ("next", {"h": torch.zeros(3)}, r"\('next', 'h'\) .*A state must be read at 'h' too"),
        ("observation", {"more": torch.zeros(3)}, r"\('observation', 'more'\) clashes"),
    ],
)
def test_a_wrong_extra_is_refused_at_construction(name, value, message):
    with pytest.raises(SwathError, match=message):
        make_collector(with_extra(name, value), make_envs(3))


def test_an_extra_may_not_hide_a_nested_observation():
    envs = make_envs(3, observation_space=DEEP)
    with pytest.raises(UsageError, match=r"'eye' clashes with \('eye', 'left'\)"):
        make_collector(with_extra("eye", torch.zeros(3)), envs)


def test_an_output_of_a_module_may_not_replace_an_observation():
    normalised = Mod(lambda x: x / 2, ["observation"], ["observation"])
    with pytest.raises(UsageError, match=r"'observation' clashes.*Rename the output"):
        make_collector(Seq(normalised, Mod(discrete, ["observation"], ["action"])))


@pytest.mark.parametrize(
    ("in_keys", "message"),
    [
        (["pixels"], r"the policy reads 'pixels', which nothing provides. The env provides 'obs"),
        (["observation", ("a", "b")], r"reads \('a', 'b'\), which nothing provides"),
        (["observation", "h", "c"], r"reads 'h', 'c', .*Change the in_keys.*'next', key"),
    ],
)
def test_a_key_that_nothing_provides_is_named(in_keys, message):
    with pytest.raises(UsageError, match=message):
        make_collector(Mod(Argmax(), in_keys, ["action"]))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (3, r"policy is 3; expected None \(random\), a callable"),
        ("CartPole-v1", r"policy is 'CartPole-v1'; expected"),
        (
            Argmax,
            r"policy is <class .*Argmax'>; .*Pass a policy, or pass a function that makes one",
        ),
    ],
)
def test_what_is_no_policy_is_refused(policy, message):
    with pytest.raises(UsageError, match=message):
        make_collector(policy)


def test_policy_and_factory_exclude_each_other():
    with pytest.raises(UsageError, match=r"policy and policy_factory are both given"):
        make_collector(discrete, policy_factory=lambda: discrete)


@pytest.mark.parametrize("make", [lambda f: f, lambda f: Mod(f, ["observation"], ["action"])])
def test_an_exception_at_construction_is_the_cause_and_says_what_was_passed(make):
    def policy(observation):
        raise ZeroDivisionError("no way")

    message = (
        r"the policy raised ZeroDivisionError: no way.*called with \{'observation': \(3, 3\)\}"
    )
    with pytest.raises(PolicyError, match=message) as caught:
        make_collector(make(policy), make_envs(3))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Turning:
    """Does right until it is told otherwise, then does wrong from some call on."""

    def __init__(self, right: Any, wrong: Any) -> None:
        self.right, self.wrong, self.left = right, wrong, float("inf")

    def __call__(self, observation: torch.Tensor) -> Any:
        self.left -= 1
        return (self.right if self.left >= 0 else self.wrong)(observation)


def torque(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1]


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no way")


def big(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x[..., :1], 3e38)


def valued(x: torch.Tensor) -> Any:
    return {"action": discrete(x), "value": x[..., 0]}


def halved(x: torch.Tensor) -> Any:
    return {"action": discrete(x), "value": x[..., 0].bfloat16()}


def bytes_of(x: torch.Tensor, name: str) -> Any:
    """Bytes fit into 16 bits, but they are no bfloat16."""
    return halved(x) | {name: torch.ones_like(x[..., 0], dtype=torch.uint8)}


CHANGES: dict[str, tuple[Any, Any, Any, str]] = {
    "nan": (torque, lambda x: x[..., :1] * torch.nan, TORQUE, r"is not finite: \[nan\]"),
    "inf": (torque, lambda x: x[..., :1] / 0, TORQUE, r"is not finite: \[-?inf\]"),
    "range": (discrete, lambda x: discrete(x) + 2, None, r"outside the action space Discrete"),
    "below": (discrete, lambda x: discrete(x) - 2, None, r"outside the action space Discrete"),
    "shape": (discrete, lambda x: discrete(x)[None], None, r"'action' has shape \(1"),
    "dtype": (discrete, lambda x: discrete(x).float(), None, r"'action' has dtype torch.float32"),
    "a tuple": (discrete, lambda x: (discrete(x), discrete(x)), None, r"'action' has shape \(2"),
    "extra's shape": (
        valued,
        lambda x: valued(x) | {"value": x},
        None,
        r"'value' has shape .*is needed, as at the first call",
    ),
    "extra's dtype": (
        valued,
        lambda x: valued(x) | {"value": x[..., 0].double()},
        None,
        r"'value' has dtype torch.float64; torch.float32 is needed",
    ),
    "bfloat16": (
        halved,
        lambda x: bytes_of(x, "value"),
        None,
        r"has dtype torch.uint8; torch.bfloat16 is",
    ),
    "missing extra": (
        valued,
        lambda x: {"action": discrete(x)},
        None,
        r"differs from its first call.*'value'",
    ),
    "no dict": (valued, discrete, None, r"returned a Tensor that differs from its first call"),
}


@pytest.mark.parametrize(
    ("name", "num_envs"),
    [*itertools.product(CHANGES, [None, 2]), *((name, 70) for name in ("nan", "inf", "range"))],
)
def test_a_policy_that_goes_wrong_stops_before_its_step_and_keeps_those_before(name, num_envs):
    right, wrong, space, message = CHANGES[name]
    undisturbed = collect(right, make_envs(num_envs, space))
    policy = Turning(right, wrong)
    with make_collector(policy, make_envs(num_envs, space)) as collector:
        first = collector.next().clone()
        policy.left = 3
        with pytest.raises(PolicyError, match=message):
            collector.next()
        assert_equal(collector.partial(), undisturbed[..., 7:10])
        policy.left = float("inf")
        assert collector.next().shape == first.shape


@pytest.mark.parametrize("make", [lambda f: f, lambda f: Mod(f, ["observation"], ["action"])])
def test_an_exception_while_collecting_is_the_cause_and_says_when(make):
    policy = Turning(discrete, fail)
    with make_collector(make(policy), make_envs(2)) as collector:
        collector.next()
        policy.left = 3
        with pytest.raises(
            PolicyError, match=r"ZeroDivisionError: no way.*step 10, seed 0"
        ) as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.step == 10
        assert collector.partial().shape == (2, 3)


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_output_says_when(name):
    right, wrong, space, message = CHANGES[name]
    policy = Turning(right, wrong)
    with make_collector(policy, make_envs(2, space)) as collector:
        collector.next()
        policy.left = 3
        with pytest.raises(PolicyError, match=message) as caught:
            collector.next()
    assert caught.value.step == 10
    assert caught.value.seed == 0


@pytest.mark.parametrize("num_envs", [None, 3, 70])
def test_large_actions_are_finite(num_envs):
    space = spaces.Box(-np.inf, np.inf, (1,))
    with make_collector(big, make_envs(num_envs, space)) as collector:
        assert (collector.next()["action"] == 3e38).all()


def test_a_module_that_writes_nothing_new_gives_no_action():
    class Empty:
        in_keys = ("observation",)
        out_keys = ("action",)

        def __call__(self, data: TensorDict) -> TensorDict:
            return data

    with pytest.raises(PolicyError, match=r"returned no 'action'; it returned \[\]"):
        make_collector(Empty())


class Rowwise(nn.Module):
    """Flattens and has a row of parameters, as written for a batch."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(12, outputs))
        self.log_std = nn.Parameter(torch.zeros(1, outputs))

    def forward(self, observation):
        return self.head(observation) + self.log_std


@pytest.mark.parametrize(
    ("policy", "space"),
    [(Rowwise(), spaces.Box(-1, 1, (4, 3))), (nn.Unflatten(0, (1, 1)), spaces.Box(-1, 1, (1,)))],
)
def test_a_policy_that_wants_a_batch_dimension_is_told_how_to_get_one(policy, space):
    lone = make_envs(None, TORQUE, observation_space=space)
    message = r"single env has no batch dimension.*Pass the env in a list, \[env\]"
    with pytest.raises(PolicyError, match=message):
        make_collector(policy, lone)
    if isinstance(policy, Rowwise):
        with make_collector(policy, [lone]) as collector:
            assert collector.next()["action"].shape == (1, 7, 1)


def test_a_policy_that_fails_with_a_batch_dimension_too_is_told_nothing_of_it():
    with pytest.raises(PolicyError) as caught:
        make_collector(nn.Linear(7, 2), make_envs(None))
    assert "batch dimension" not in str(caught.value)


class Drawing(nn.Module):
    """Draws its actions by itself, unless it is told to be asked."""

    def __init__(self, asks: bool = False, draws: bool = True) -> None:
        super().__init__()
        self.asks, self.draws = asks, draws

    def forward(self, observation):
        asked = interaction_type() if self.asks else InteractionType.RANDOM
        if asked is InteractionType.DETERMINISTIC or not self.draws:
            return discrete(observation)
        return torch.randint(2, observation.shape[:-1])


DETERMINISTIC = {"exploration_type": "deterministic"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_policy_that_draws_whatever_is_asked_of_it_is_told_so(wrapped):
    policy = Mod(Drawing(), ["observation"], ["action"]) if wrapped else Drawing()
    with pytest.warns(UserWarning, match=r"exploration_type='deterministic' has no effect"):
        data = collect(policy, make_envs(3), **DETERMINISTIC)
    assert_equal(data, collect(policy, make_envs(3)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Drawing(), {}),
        (Drawing(), {"exploration_type": "random"}),
        (Drawing(asks=True), DETERMINISTIC),
        (Drawing(draws=False), DETERMINISTIC),
    ],
)
def test_others_are_not(policy, options):
    with make_collector(policy, make_envs(3), **options) as collector:
        collector.next()
