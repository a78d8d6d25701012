"""The policies: one module per work, the same object type for every contestant.

``agrees`` tells which stored actions the policy would have taken; it allows for the last bits of
a float sum, which depend on the number of rows that a matrix product is given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLOSE = 1e-4


def mlp(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    """inputs-64-64-outputs with tanh, with the weights that the seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )


class Greedy(nn.Module):
    """The most likely of a few actions."""

    def __init__(self, inputs: int, actions: int, seed: int) -> None:
        super().__init__()
        self.net = mlp(inputs, actions, seed)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation).argmax(-1)

    def agrees(self, observation: Tensor, action: Tensor) -> Tensor:
        scores = self.net(observation)
        return scores.gather(-1, action[..., None])[..., 0] >= scores.amax(-1) - CLOSE


class Torque(nn.Module):
    """A continuous action in [-2, 2]."""

    def __init__(self, inputs: int, seed: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 1, seed)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation).tanh() * 2.0

    def agrees(self, observation: Tensor, action: Tensor) -> Tensor:
        return (self(observation) - action).abs().amax(-1) <= CLOSE


class Glance(nn.Module):
    """Almost free: adds up four cells of the observation, so that collection is what is timed."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.cells = (..., *[0] * (dims - 1), slice(4))

    def forward(self, observation: Tensor) -> Tensor:
        return observation[self.cells].sum(-1).long()

    def agrees(self, observation: Tensor, action: Tensor) -> Tensor:
        return self(observation) == action
