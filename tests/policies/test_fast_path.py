"""The inner modules called directly: the same bits as the plain call, and only where it may be."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_kit import BOX, TORQUE, Argmax, assert_equal, collect, make_collector, make_envs, net
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModuleBase
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as dist
from torch import nn

from swath.policies.calls import Call

Make = Callable[[], Any]

NESTED = spaces.Dict(
    {"camera": spaces.Dict({"eye": BOX}), "speed": spaces.Box(0, 1, ()), "gear": spaces.Discrete(5)}
)
FREE = spaces.Box(-np.inf, np.inf, (1,))
PARAMETERS = spaces.Dict({"loc": TORQUE, "scale": spaces.Box(0.1, 1, (1,))})


def argmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(-1)


def actor(**kwargs: Any) -> list[Any]:
    """Scores, then a choice from them."""
    kwargs = {"distribution_class": dist.Categorical, "return_log_prob": True} | kwargs
    return [Mod(net(), ["observation"], ["logits"]), Prob(["logits"], ["action"], **kwargs)]


def gaussian(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loc = observation[..., :1]
    return loc, loc.exp()


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)
        self.initial_state = torch.full((4,), 0.5)

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor) -> Any:
        hidden = self.cell(observation, hidden)
        return self.head(hidden).argmax(-1), hidden


FAST: dict[str, tuple[Make, dict[str, Any]]] = {
    "module": (lambda: Mod(Argmax(), ["observation"], ["action"]), {}),
    "function": (lambda: Mod(lambda x: argmax(x[..., :2]), ["observation"], ["action"]), {}),
    "module with extras": (
        lambda: Mod(lambda x: (argmax(x), x.sum(-1), x), ["observation"], ["action", "v", "w"]),
        {"action_space": spaces.Discrete(3)},
    ),
    "ignored output": (
        lambda: Mod(lambda x: (x, argmax(x)), ["observation"], ["_", "action"]),
        {"action_space": spaces.Discrete(3)},
    ),
    "nested keys": (
        lambda: Mod(
            lambda eye, speed: (argmax(eye), speed * 2),
            [("camera", "eye"), "speed"],
            ["action", ("stats", "deep", "double")],
        ),
        {"action_space": spaces.Discrete(3), "observation_space": NESTED},
    ),
    "sequence": (
        lambda: Seq(Mod(net(), ["observation"], ["logits"]), Mod(argmax, ["logits"], ["action"])),
        {},
    ),
    "sequence in sequence": (
        lambda: Seq(
            Seq(Mod(net(), ["observation"], ["h"]), Mod(torch.tanh, ["h"], ["h"])),
            Mod(argmax, ["h"], ["action"]),
            Mod(lambda h: h.mean(-1), ["h"], ["value"]),
        ),
        {},
    ),
    "named sequence": (
        lambda: Seq(
            collections.OrderedDict(
                first=Mod(net(), ["observation"], ["h"]), second=Mod(argmax, ["h"], ["action"])
            )
        ),
        {},
    ),
    "sequence in place": (
        lambda: Seq(Mod(Argmax(), ["observation"], ["action"]), inplace=True),
        {},
    ),
    "probabilistic": (lambda: ProbSeq(*actor()), {}),
    "probabilistic without log-prob": (lambda: ProbSeq(*actor(return_log_prob=False)), {}),
    "probabilistic, renamed": (
        lambda: ProbSeq(
            Mod(net(), ["observation"], [("head", "scores")]),
            Prob(
                {"logits": ("head", "scores")},
                ["action"],
                distribution_class=dist.Categorical,
                return_log_prob=True,
                log_prob_key=("head", "log_prob"),
            ),
        ),
        {},
    ),
    "continuous": (
        lambda: ProbSeq(
            Mod(gaussian, ["observation"], ["loc", "scale"]),
            Prob(
                ["loc", "scale"], ["action"], distribution_class=dist.Normal, return_log_prob=True
            ),
        ),
        {"action_space": FREE},
    ),
    "probabilistic module alone": (
        lambda: Prob(["loc", "scale"], ["action"], distribution_class=dist.Normal),
        {"action_space": FREE, "observation_space": PARAMETERS},
    ),
    "two choices": (
        lambda: ProbSeq(
            Mod(net(), ["observation"], ["logits"]),
            Prob(["logits"], ["hint"], distribution_class=dist.Categorical),
            Mod(lambda hint, x: hint[..., None] + x[..., :2], ["hint", "logits"], ["probs_of"]),
            Prob({"logits": "probs_of"}, ["action"], distribution_class=dist.Categorical),
            return_composite=True,
        ),
        {},
    ),
    "recurrent": (
        lambda: Mod(Gru(), ["observation", "hidden"], ["action", ("next", "hidden")]),
        {},
    ),
}


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("exploration", ["random", "deterministic"])
@pytest.mark.parametrize("name", FAST)
def test_both_ways_give_the_same_bits(name, exploration, num_envs, monkeypatch):
    make, worlds = FAST[name]
    options = {"exploration_type": exploration, "init_random_frames": 4}
    with make_collector(make(), make_envs(num_envs, **worlds)) as collector:
        assert collector._runner.policy.unwrapped
    fast = collect(make(), make_envs(num_envs, **worlds), **options)
    monkeypatch.setattr("swath.policies.tensordicts.unwrap", lambda module: None)
    with make_collector(make(), make_envs(num_envs, **worlds)) as collector:
        assert not collector._runner.policy.unwrapped
    assert_equal(fast, collect(make(), make_envs(num_envs, **worlds), **options))


class Flip(nn.Module):
    def forward(self, action: torch.Tensor) -> torch.Tensor:
        return 1 - action


class Doubling(Mod):
    """Overrides what calling a module means."""

    def forward(self, tensordict: Any) -> Any:
        out = super().forward(tensordict)
        return out.set("action", 2 - out["action"])


class Called(Mod):
    def __call__(self, tensordict: Any) -> Any:
        return super().__call__(tensordict)


class Wide(nn.Module):
    def forward(self, observation: torch.Tensor, *, flip: bool = False) -> torch.Tensor:
        return argmax(-observation if flip else observation)

    def choose(self, observation: torch.Tensor) -> torch.Tensor:
        return argmax(observation)


class Custom(TensorDictModuleBase):
    in_keys: Any = ["observation"]  # noqa: RUF012 - as tensordict documents it
    out_keys: Any = ["action"]  # noqa: RUF012

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", argmax(tensordict["observation"]))


# Most of these answer as if they were taken apart: values alone would not tell them.
def module(**kwargs: Any) -> Mod:
    return Mod(argmax, ["observation"], ["action"], **kwargs)


def changed(policy: Any, change: Callable[[Any], Any]) -> Any:
    change(policy)
    return policy


def flip(module: Any, inputs: Any, out: Any) -> Any:
    return out.set("action", 2 - out["action"])


SLOW: dict[str, Make] = {
    "forward hook": lambda: changed(module(), lambda m: m.register_forward_hook(flip)),
    "pre-hook": lambda: changed(
        module(), lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 1,))
    ),
    "hook that only looks": lambda: changed(
        module(), lambda m: m.register_forward_hook(lambda m, args, out: None)
    ),
    "hook on a part": lambda: Seq(changed(module(), lambda m: m.register_forward_hook(flip))),
    "overridden forward": lambda: Doubling(argmax, ["observation"], ["action"]),
    "forward of the object": lambda: changed(
        module(),
        lambda m: setattr(m, "forward", lambda td: td.set("action", argmax(td["observation"]))),
    ),
    "overridden call": lambda: Called(argmax, ["observation"], ["action"]),
    "custom module": Custom,
    "plain function in a sequence": lambda: Seq(module(), lambda td: td.set("x", td["action"])),
    "not in place": lambda: module(inplace=False),
    "empty": lambda: module(inplace="empty"),
    "sequence not in place": lambda: Seq(module(), inplace=False),
    "method": lambda: Mod(Wide(), ["observation"], ["action"], method="choose"),
    "method kwargs": lambda: Mod(
        Wide(), ["observation"], ["action"], method_kwargs={"flip": False}
    ),
    "named arguments": lambda: Mod(lambda x: argmax(x), {"x": "observation"}, ["action"]),
    "selected keys": lambda: Mod(
        lambda x: (argmax(x), x), ["observation"], ["action", "x"]
    ).select_out_keys("action"),
    "selected keys of a sequence": lambda: Seq(
        Mod(net(3, 3), ["observation"], ["h"]), Mod(argmax, ["h"], ["action"])
    ).select_out_keys("action"),
    "tolerant": lambda: Seq(module(), Mod(lambda x: x, ["nowhere"], ["x"]), partial_tolerant=True),
    "answers with a dict": lambda: Mod(
        lambda x: {"action": argmax(x)}, ["observation"], ["action"]
    ),
    "answers with a tuple of one": lambda: Mod(lambda x: (argmax(x),), ["observation"], ["action"]),
    "answers with numpy": lambda: Mod(lambda x: x.numpy().argmax(-1), ["observation"], ["action"]),
    "numpy in between": lambda: Seq(
        Mod(lambda x: x.numpy(), ["observation"], ["_between"]),
        Mod(lambda x: torch.as_tensor(x).argmax(-1), ["_between"], ["action"]),
    ),
    "nested answer": lambda: Mod(
        lambda x: (argmax(x), {"a": x, "b": {"c": x}}), ["observation"], ["action", "info"]
    ),
    "arguments for reading": lambda: module(get_kwargs={"as_list": False}),
    "generator": lambda: ProbSeq(*actor3(generator=1)),
    "number of samples": lambda: ProbSeq(*actor3(num_samples=torch.Size([]))),
    "sample made before": lambda: ProbSeq(
        Mod(lambda x: (x, argmax(x)), ["observation"], ["logits", "action"]),
        Prob(["logits"], ["action"], distribution_class=dist.Categorical, return_log_prob=True),
    ),
    "composite": lambda: ProbSeq(
        Mod(
            lambda x: (x, x),
            ["observation"],
            [("params", "action", "logits"), ("params", "c", "logits")],
        ),
        Prob(
            ["params"],
            ["action", "c"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"action": dist.Categorical, "c": dist.Categorical}
            },
        ),
    ),
}

if "generator" not in inspect.signature(Prob.__init__).parameters:  # tensordict 0.10
    del SLOW["generator"]


def actor3(**kwargs: Any) -> list[Any]:
    return [
        Mod(net(3, 3), ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=dist.Categorical, **kwargs),
    ]


def by_hand(policy: Any, data: TensorDict) -> torch.Tensor:
    """The actions of the plain module, called on each stored observation."""
    rows = data.select("observation").reshape(-1).unbind(0)
    return torch.stack([policy(row.clone())["action"] for row in rows])


@pytest.mark.parametrize("name", SLOW)
def test_a_module_that_does_more_is_called_as_it_is(name):
    envs = make_envs(None, spaces.Discrete(3))
    options = {"exploration_type": "deterministic", "frames_per_batch": 30}
    with make_collector(SLOW[name](), envs, **options) as collector:
        assert not collector._runner.policy.unwrapped
        data = collector.next()
    if "sample" not in name:
        assert data["action"].unique().numel() > 1
    assert torch.equal(by_hand(SLOW[name](), data), data["action"])


def test_a_nested_observation_may_be_read_as_a_whole():
    policy = Mod(lambda camera: argmax(camera["eye"]), ["camera"], ["action"])
    data = collect(policy, make_envs(3, spaces.Discrete(3), NESTED))
    assert torch.equal(data["action"], argmax(data["camera", "eye"]))


def test_a_module_may_read_nothing():
    policy = Mod(lambda: torch.ones(3, dtype=torch.int64), [], ["action"])
    assert collect(policy, make_envs(3))["action"].eq(1).all()


def test_what_is_changed_between_batches_counts():
    policy = Seq(Mod(net(3, 3), ["observation"], ["h"]), Mod(argmax, ["h"], ["action"]))
    with make_collector(policy, make_envs(None, spaces.Discrete(3))) as collector:
        before = collector.next().clone()
        assert collector._runner.policy.unwrapped
        policy[1].register_forward_hook(flip)
        after = collector.next()
        assert not collector._runner.policy.unwrapped
    with torch.no_grad():
        assert torch.equal(before["action"], argmax(policy[0].module(before["observation"])))
        assert torch.equal(after["action"], 2 - argmax(policy[0].module(after["observation"])))


def test_an_inner_module_that_is_replaced_between_batches_counts():
    policy = Mod(Argmax(), ["observation"], ["action"])
    with make_collector(policy) as collector:
        collector.next()
        policy.module = nn.Sequential(Argmax(), Flip())
        data = collector.next()
    assert torch.equal(data["action"], 1 - Argmax()(data["observation"]))


def test_weights_that_change_count():
    policy = Mod(Argmax(), ["observation"], ["action"])
    with make_collector(policy, frames_per_batch=30) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.net[2].weight.neg_()
        data = collector.next()
        assert torch.equal(data["action"], policy.module(data["observation"]))
        assert data["action"].unique().numel() == 2


def test_a_global_hook_is_called():
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda *args: seen.append(args[0]))
    try:
        policy = Mod(Argmax(), ["observation"], ["action"])
        with make_collector(policy) as collector:
            seen.clear()
            collector.next()
    finally:
        hook.remove()
    assert sum(module is policy for module in seen) == 7


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: 2 - argmax(x),
        lambda x: argmax(x).int(),
        lambda x: (torch.rand(()), argmax(x))[1],
        lambda x: argmax(x)[None],
        lambda x: 1 / 0,
    ],
)
def test_taking_apart_is_given_up_if_a_call_shows_a_difference(wrong, monkeypatch):
    steps = [Call(wrong, (("observation",),), (("action",),))]
    monkeypatch.setattr("swath.policies.tensordicts.unwrap", lambda module: steps)
    with make_collector(module(), make_envs(None, spaces.Discrete(3))) as collector:
        assert not collector._runner.policy.unwrapped
        data = collector.next()
    assert torch.equal(data["action"], argmax(data["observation"]))
