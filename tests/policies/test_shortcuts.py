"""Layers called without `nn.Module.__call__`: same values, nothing left behind, nothing skipped."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector
from swath.policies.shortcuts import Shortcut, installed, shortened


class Actor(nn.Module):
    """A user's module with layers of torch.nn."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, observation):
        return self.net(observation).argmax(-1)


def collected(policy, envs=2, batches=3):
    makers = ["CartPole-v1"] * envs
    with Collector(makers, policy, frames_per_batch=50 * envs, seed=3) as collector:
        return torch.stack([collector.next() for _ in range(batches)])


@pytest.fixture
def without(monkeypatch):
    """Collect without shortcuts."""

    def collect(policy, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr("swath.policies._takes_shortcuts", lambda *_: False)
            return collected(policy, **kwargs)

    return collect


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = Actor()
        self.none = None
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

    def forward(self, observation):
        for layer in self.layers:
            observation = layer(observation)
        return self.actor(observation)


class Looking(Actor):
    """Looks into its layer instead of only calling it."""

    def forward(self, observation):
        assert isinstance(self.net, nn.Module)
        assert len(self.net) == 3
        assert self.net[1] is list(self.net)[1]
        hidden = self.net[1](self.net[0](input=observation))
        return nn.functional.linear(hidden, self.net[2].weight, self.net[2].bias).argmax(-1)


class Functional(Actor):
    """Calls its layer with other parameters than its own."""

    def forward(self, observation):
        zero = {name: -value for name, value in self.net.named_parameters()}
        return torch.func.functional_call(self.net, zero, (observation,)).argmax(-1)


class Copying(Actor):
    def forward(self, observation):
        twin = pickle.loads(pickle.dumps(copy.deepcopy(self)))
        assert type(twin.net) is nn.Sequential
        return Actor.forward(twin, observation)


def shared_layer():
    tanh, relu = nn.Tanh(), nn.ReLU(inplace=True)
    middle = nn.Sequential(nn.Linear(8, 8), tanh, nn.LayerNorm(8), relu)
    return nn.Sequential(nn.Linear(4, 8), tanh, middle, nn.Identity(), nn.Linear(8, 2, bias=False))


def in_tensordict():
    return TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action"])


def probabilistic():
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), ["observation"], ["hidden"]),
        TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


@pytest.mark.parametrize(
    "make",
    [
        Actor,
        Outer,
        Looking,
        Functional,
        Copying,
        lambda: Actor(shared_layer()),
        lambda: Actor(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))),
        lambda: Actor(nn.Linear(4, 2)).forward,
        lambda: (lambda actor: lambda observation: actor(observation))(Actor()),
        in_tensordict,
        probabilistic,
    ],
)
@pytest.mark.parametrize("envs", [1, 2])
def test_the_data_is_the_same_bit_for_bit(make, envs, without):
    fast, plain = collected(make(), envs=envs), without(make(), envs=envs)
    assert set(fast.keys(True, True)) == set(plain.keys(True, True))
    for key, value in plain.items(True, True):
        assert torch.equal(fast[key], value), key


def test_a_bare_network_is_shortened_too():
    net = shared_layer()
    row = torch.randn(3, 4)
    assert type(shortened(net)) is Shortcut
    assert torch.equal(shortened(net)(row), net(row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 1), (7, 3), (300, 200)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_vector_gives_the_same_bit_for_bit(shape, dtype, transposed):
    net = nn.Sequential(nn.Tanh(), nn.Linear(*shape), nn.ReLU(), nn.Linear(shape[1], 5), nn.Tanh())
    net = net.to(dtype)
    if transposed:
        net[1].weight = nn.Parameter(net[1].weight.detach().t().contiguous().t())
    short = shortened(net)
    for _ in range(20):
        row = torch.randn(shape[0], dtype=dtype)
        given = row.clone()
        assert torch.equal(short(row), net(row))
        assert torch.equal(row, given)


def test_what_a_module_of_the_user_keeps_is_not_written_to():
    kept = []

    class Keeping(nn.Module):
        def forward(self, x):
            kept.append((x, x.clone()))
            return x

    inner = nn.Sequential(nn.Tanh(), Keeping(), nn.Tanh(), Keeping(), nn.ReLU())
    net = nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 8), Keeping(), nn.Tanh())
    for row in torch.randn(4), torch.randn(3, 4):
        shortened(net)(row)
    assert len(kept) == 6
    assert all(torch.equal(one, was) for one, was in kept)


def test_vectors_with_a_stride_and_weights_that_share_rows():
    net, row = nn.Linear(64, 5), torch.randn(64, 2)
    assert all(torch.equal(shortened(net)(row[:, n]), net(row[:, n])) for n in (0, 1))
    net.weight = nn.Parameter(torch.randn(1, 64).expand(5, 64))
    assert torch.equal(shortened(net)(row[:, 0].clone()), net(row[:, 0].clone()))


def test_within_autocast_vectors_have_its_type():
    net, row = nn.Linear(64, 5), torch.randn(64)
    short = shortened(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert short(row).dtype is torch.bfloat16
        assert torch.equal(short(row), net(row))


def test_a_lone_env_is_spared_the_longer_way_that_torch_has_for_vectors(monkeypatch):
    net, calls, addmv = (
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)),
        [],
        torch.addmv,
    )
    monkeypatch.setattr(torch, "addmv", lambda *args: calls.append(1) or addmv(*args))
    short = shortened(net)
    short(torch.randn(3, 4))
    assert not calls
    short(torch.randn(4))
    assert len(calls) == 2


def test_shortcuts_are_in_use_and_gone_afterwards():
    seen = []

    class Seeing(Actor):
        def forward(self, observation):
            seen.append(type(self.net))
            return super().forward(observation)

    actor = Seeing()
    with Collector("CartPole-v1", actor, frames_per_batch=10, seed=0) as collector:
        seen.clear()
        collector.next()
        assert set(seen) == {Shortcut}
        assert type(actor.net) is nn.Sequential
        assert "net" not in vars(actor)


def test_they_are_gone_after_a_failure():
    class Failing(Actor):
        calls = 0

        def forward(self, observation):
            Failing.calls += 1
            if self.calls > 20:
                raise ValueError("enough")
            return super().forward(observation)

    actor = Failing()
    with (
        Collector("CartPole-v1", actor, frames_per_batch=100) as collector,
        pytest.raises(Exception, match="enough"),
    ):
        collector.next()
    assert "net" not in vars(actor)


@pytest.mark.parametrize("where", ["layer", "network", "actor"])
def test_hooks_are_called_from_the_next_rollout_on(where):
    actor = Actor()
    module = {"layer": actor.net[0], "network": actor.net, "actor": actor}[where]
    calls = []
    with Collector("CartPole-v1", actor, frames_per_batch=10) as collector:
        collector.next()
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        collector.next()
        assert len(calls) == 10
        handle.remove()
        collector.next()
        assert len(calls) == 10


def test_new_weights_and_new_layers_count_at_once():
    actor = Actor()
    with Collector("CartPole-v1", actor, frames_per_batch=10) as collector:
        for wanted in (0, 1):
            with torch.no_grad():
                actor.net[2].weight.zero_()
                actor.net[2].bias.copy_(torch.tensor([1.0 - wanted, wanted]))
            assert collector.next()["action"].eq(wanted).all()
        actor.net[2] = nn.Linear(8, 2)
        with torch.no_grad():
            actor.net[2].weight.zero_()
            actor.net[2].bias.copy_(torch.tensor([1.0, 0.0]))
        assert collector.next()["action"].eq(0).all()


def test_another_thread_calls_the_layer_itself():
    actor, calls = Actor(), []
    with installed([actor]):
        assert type(actor.net) is Shortcut
        actor.net._module.register_forward_hook(lambda *_: calls.append(threading.get_ident()))
        thread = threading.Thread(target=actor, args=[torch.zeros(4)])
        thread.start()
        thread.join()
        actor(torch.zeros(4))
        assert calls == [thread.ident]


def test_gradients_flow_through_a_shortcut():
    actor = Actor()
    with installed([actor]):
        actor.net(torch.ones(4)).sum().backward()
    assert actor.net[0].weight.grad is not None


def test_assigning_a_layer_meanwhile_wins():
    actor, other = Actor(), nn.Linear(4, 2)
    with installed([actor]):
        actor.net = other
        assert actor.net is other
    assert actor.net is other


def test_parametrized_layers_are_left_alone():
    actor = Actor()
    nn.utils.parametrizations.weight_norm(actor.net[0])
    row = torch.randn(4)
    assert torch.equal(shortened(actor.net)(row), actor.net(row))
    assert type(shortened(actor.net[0])) is not Shortcut
