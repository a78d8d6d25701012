"""A lone env's module is given a batch of one row where that is the same, and only there."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from swath.collectors import Collector


class Noting(torch.nn.Module):
    """Notes the shapes that it is given; `bend` is applied to the logits."""

    def __init__(self, bend=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.bend, self.shapes = torch.nn.Linear(4, 2), bend, []

    def forward(self, observation):
        self.shapes.append(tuple(observation.shape))
        return self.bend(self.net(observation)).argmax(-1)


def in_tensordict(module):
    return TensorDictModule(module, ["observation"], ["action"])


def collect(policy):
    with Collector("CartPole-v1", policy, frames_per_batch=50, seed=1) as collector:
        return [collector.next() for _ in range(3)]


@pytest.mark.parametrize("wrap", [lambda module: module, in_tensordict])
def test_the_data_is_the_same_as_with_single_rows(wrap, monkeypatch):
    module = Noting()
    fast = collect(wrap(module))
    assert module.shapes[-1] == (1, 4)
    monkeypatch.setattr("swath.policies._takes_batch_of_one", lambda *_: False)
    plain = collect(wrap(module))
    assert module.shapes[-1] == (4,)
    assert all((a == b).all() for a, b in zip(fast, plain, strict=True))


@pytest.mark.parametrize(
    "bend",
    [
        lambda x: x.flip(-1) if x.ndim == 2 else x,
        lambda x: x if x.ndim == 1 else x[:, :0],
        lambda x: x + 0 * torch.randn(x.ndim).sum(),
        lambda x: x if x.ndim == 1 else torch.cat([x, x]),
    ],
    ids=["other values", "an error", "other draws", "other shape"],
)
def test_a_module_that_tells_a_batch_from_a_row_is_given_rows(bend):
    module = Noting(bend)
    collect(module)
    assert set(module.shapes) == {(4,)}


def test_trying_it_leaves_the_module_alone():
    module = Noting()
    with Collector("CartPole-v1", module, frames_per_batch=50):
        assert module.shapes == [(4,)]


def test_a_plain_function_is_always_given_rows():
    module = Noting()
    collect(lambda observation: module(observation))
    assert set(module.shapes) == {(4,)}
