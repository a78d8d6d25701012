"""The call at construction leaves no trace; exploration types; compiled policies."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_kit import (
    Argmax,
    assert_equal,
    bits,
    collect,
    discrete,
    make_collector,
    make_envs,
)
from tensordict.nn import InteractionType
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as dist
from torch import nn


def generators() -> tuple[Any, ...]:
    """Where the learner's generators stand, cached normals included."""
    numpy_state = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy_state],
        random.getstate(),
    )


def drawing(x: torch.Tensor) -> torch.Tensor:
    """Draws from every global generator."""
    chance = random.random() + np.random.randn() + torch.rand(())
    return (x.sum(-1) > chance - 1).long()


@pytest.mark.parametrize("make", [lambda f: f, lambda f: Mod(f, ["observation"], ["action"])])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_probe_draws_nothing(make, seed):
    before = generators()
    collector = make_collector(make(drawing), make_envs(3), seed=seed)
    assert generators() == before
    collector.shutdown()


def test_a_cached_normal_is_part_of_the_state():
    np.random.randn()  # half of a pair
    before = generators()
    make_collector(drawing, make_envs(3), seed=None).shutdown()
    assert generators() == before


def test_the_first_draw_is_for_the_first_frame():
    torch.manual_seed(5)
    data = collect(lambda x: {"action": discrete(x), "draw": torch.rand(())}, seed=None)
    torch.manual_seed(5)
    assert torch.equal(data["draw"], torch.stack([torch.rand(()) for _ in range(14)]))


class Normalised(nn.Module):
    """Has batch statistics, a counter that is replaced, and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("wide", torch.ones(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.rows += len(x)
        return (self.norm(x) * self.wide).argmax(-1)


class Agent:
    """An object that is no module but has one."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.args = net, 3

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    act = __call__


BEHIND = {
    "itself": lambda net: net,
    "tensordict module": lambda net: Mod(net, ["observation"], ["action"]),
    "sequence": lambda net: Seq(Mod(net, ["observation"], ["action"])),
    "lambda": lambda net: lambda x: net(x),
    "method": lambda net: net.forward,
    "partial": lambda net: functools.partial(net),
    "partial with": lambda net: functools.partial(lambda net, x: net(x), net),
    "object": lambda net: Agent(net),
    "method of an object": lambda net: Agent(net).act,
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_buffers_and_modes_as_they_are(name, training):
    net = Normalised().train(training)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    held = dict(net.named_buffers())
    with make_collector(BEHIND[name](net), make_envs(3, spaces.Discrete(3))) as collector:
        for key, value in net.state_dict().items():
            assert torch.equal(value, before[key]), key
        assert all(buffer is held[key] for key, buffer in net.named_buffers())
        collector.next()
        assert all(module.training is training for module in net.modules())
        assert net.calls == 7
        assert net.rows == 21
        assert net.norm.num_batches_tracked == 7 * training


class Running(nn.Module):
    """Answers with statistics of all that it has seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        self.total += x.sum(0)
        return (x > self.total).long().sum(-1), self.total.expand_as(x)


def test_a_module_with_running_statistics_is_taken_apart_all_the_same():
    policy = Mod(Running(), ["observation"], ["action", "total"])
    with make_collector(policy, make_envs(3, spaces.Discrete(4))) as collector:
        assert collector._runner.policy.unwrapped
        data = collector.next()
    sums = data["observation"].sum(0).cumsum(0)
    torch.testing.assert_close(data["total"], sums.expand(3, 7, 3))


LAZY = {
    "module": lambda: nn.LazyLinear(1),
    "sequence": lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)),
    "tensordict": lambda: Mod(nn.LazyLinear(1), ["observation"], ["action"]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_lazy_module_is_made_by_the_probe(name, num_envs):
    policy = LAZY[name]()
    free = spaces.Box(-np.inf, np.inf, (1,))
    before = generators()
    with make_collector(policy, make_envs(num_envs, free)) as collector:
        assert generators() == before
        assert not any(nn.parameter.is_lazy(p) for p in policy.parameters())
        weights = [bits(p.detach()) for p in policy.parameters()]
        data = collector.next()
        assert [bits(p.detach()) for p in policy.parameters()] == weights
    inner = policy.module if name == "tensordict" else policy
    torch.testing.assert_close(data["action"], inner(data["observation"]).detach())


def beta() -> Any:
    """A distribution whose mean, mode and median differ."""
    return ProbSeq(
        Mod(lambda x: (x.exp() + 1, (2 * x).exp() + 1), ["observation"], ["alpha", "beta"]),
        Prob(
            {"concentration1": "alpha", "concentration0": "beta"},
            ["action"],
            distribution_class=dist.Beta,
        ),
    )


def expected_of(data: Any, kind: str) -> torch.Tensor:
    made = dist.Beta(data["alpha"], data["beta"])
    return made.mode if kind == "mode" else made.mean


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("kind", ["mode", "mean", "deterministic"])
@pytest.mark.parametrize("spelling", [str, str.upper, InteractionType])
@pytest.mark.parametrize("option", ["exploration_type", "exploration_mode"])
def test_probabilistic_policies_choose_as_told(kind, spelling, option, num_envs):
    envs = make_envs(num_envs, spaces.Box(0, 1, (3,)))
    data = collect(beta(), envs, batches=1, **{option: spelling(kind)})
    torch.testing.assert_close(data["action"], expected_of(data, kind))


def test_by_default_they_draw():
    data = collect(beta(), make_envs(3, spaces.Box(0, 1, (3,))), frames_per_batch=300)
    chance = (data["action"] < expected_of(data, "mean")).float().mean()
    assert 0.4 < chance < 0.6
    again = collect(beta(), make_envs(3, spaces.Box(0, 1, (3,))), frames_per_batch=300)
    assert_equal(data, again)


def test_a_choice_that_the_env_cannot_take_is_refused_at_construction():
    policy = ProbSeq(
        Mod(lambda x: x, ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=dist.Categorical),
    )
    with pytest.raises(Exception, match=r"'action' has dtype torch.float32; torch.int64 is needed"):
        make_collector(policy, make_envs(3, spaces.Discrete(3)), exploration_type="mean")


def test_frames_per_batch_and_drawing_policies_do_not_depend_on_each_other():
    runs = [
        collect(beta(), make_envs(3, spaces.Box(0, 1, (3,))), frames_per_batch=f, batches=36 // f)
        for f in (3, 36)
    ]
    assert_equal(*runs)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Argmax().net

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.net(x)
        return {"action": scores.argmax(-1), "scores": scores}


COMPILED: dict[str, Any] = {
    "module": Argmax,
    "extras": Scores,
    "tensordict module": lambda: Mod(Argmax(), ["observation"], ["action"]),
    "sequence": lambda: Seq(
        Mod(Argmax().net, ["observation"], ["scores"]),
        Mod(lambda x: x.argmax(-1), ["scores"], ["action"]),
    ),
    "called plainly": lambda: Mod(Argmax(), ["observation"], ["action"], inplace=False),
}


def check_compiled(name: str, compile_policy: Any) -> None:
    torch.compiler.reset()
    compiled = collect(COMPILED[name](), make_envs(3), compile_policy=compile_policy)
    plain = collect(COMPILED[name](), make_envs(3))
    if "scores" in plain.keys():
        torch.testing.assert_close(compiled.pop("scores"), plain.pop("scores"))
    assert_equal(compiled, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_policy_gives_the_same_data(name):
    check_compiled(name, {"backend": "aot_eager", "dynamic": False})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["module", "sequence"])
def test_a_policy_compiled_to_native_code_gives_the_same_data(name):
    check_compiled(name, True)


def test_compiling_is_left_to_torch(monkeypatch):
    seen = []

    def compile(call: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return call

    monkeypatch.setattr(torch, "compile", compile)
    assert_equal(collect(Argmax(), compile_policy={"mode": "fast"}), collect(Argmax()))
    assert seen == [{"mode": "fast"}]
