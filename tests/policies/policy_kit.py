"""What the tests of policies share: a predictable env with any spaces, and collecting from it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from swath.collectors import Collector
from swath.envs import SerialEnv
from swath.testing import CountingEnv

BOX = spaces.Box(-1, 1, (3,))
TORQUE = spaces.Box(-2, 2, (1,))


def make_envs(
    num_envs: int | None,
    action_space: gym.Space[Any] | None = None,
    observation_space: gym.Space[Any] = BOX,
    longest: int = 9,
) -> Any:
    """A lone env for None, else so many of them."""

    def make() -> CountingEnv:
        return CountingEnv(action_space, observation_space, longest)

    return make() if num_envs is None else SerialEnv(num_envs, make)


def make_collector(policy: Any, envs: Any = None, **options: Any) -> Collector:
    """A seeded collector with batches of 7 steps."""
    envs = make_envs(None) if envs is None else envs
    options.setdefault("frames_per_batch", 7 * getattr(envs, "num_envs", 1))
    options.setdefault("seed", 0)
    return Collector(envs, policy, **options)


def collect(policy: Any, envs: Any = None, *, batches: int = 2, **options: Any) -> TensorDict:
    """So many batches, one after the other in time."""
    with make_collector(policy, envs, **options) as collector:
        made = [collector.next().clone() for _ in range(batches)]
    return torch.cat(made, made[0].ndim - 1)


def leaves(data: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(sorted(data.items(True, True), key=lambda item: str(item[0])))


def assert_equal(one: TensorDict, other: TensorDict) -> None:
    """Equal keys, dtypes, and every bit."""
    assert list(leaves(one)) == list(leaves(other))
    assert one.batch_size == other.batch_size
    for (key, a), b in zip(leaves(one).items(), leaves(other).values(), strict=True):
        assert a.dtype == b.dtype, key
        assert bits(a) == bits(b), key


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def net(inputs: int = 3, outputs: int = 2) -> nn.Module:
    """A small network with weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Without bias it is an odd function, so that all actions occur.
        layers = [nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1])


class Argmax(nn.Module):
    """The index of the largest output of `net`."""

    def __init__(self, inputs: int = 3, outputs: int = 2) -> None:
        super().__init__()
        self.net = net(inputs, outputs)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def discrete(observation: torch.Tensor) -> torch.Tensor:
    """An action of `Discrete(2)` for each row."""
    return (observation.sum(-1) > 0).long()
