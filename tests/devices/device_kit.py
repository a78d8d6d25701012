"""Envs and policies whose numbers are whole, so that every device computes the same ones."""

from __future__ import annotations

import contextlib
import warnings

import gymnasium
import numpy as np
import torch
from torch import nn

from swath.envs import BatchedTorchEnv

INF = np.float32(np.inf)


class Steps(BatchedTorchEnv):
    """Two counters: the action is added to one, each step to the other; ends at a drawn length."""

    observation_space = gymnasium.spaces.Box(-INF, INF, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def _initial(self, uniform):
        length = (uniform * 8).floor() + 3
        return torch.cat([torch.zeros_like(length), torch.zeros_like(length), length], 1)

    def _dynamics(self, state, action):
        state = state + torch.stack(
            [torch.ones_like(state[:, 0]), action.to(state.dtype), torch.zeros_like(state[:, 0])], 1
        )
        return state, state[:, 1] - 2 * state[:, 0], state[:, 0] >= state[:, 2]

    def _observe(self, state):
        return state.to(torch.float32)


class Whole(nn.Module):
    """A linear policy with whole weights; it adds noise of whole numbers if asked to."""

    def __init__(self, noise: int = 0) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.noise = noise
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[1.0, 2.0, 1.0], [3.0, 1.0, 2.0]]))
            self.net.bias.copy_(torch.tensor([0.0, 1.0]))

    def forward(self, observation):
        value = self.net(observation).sum(-1)
        if self.noise:
            value = value + torch.randint_like(value, self.noise)
        return (value % 3).long(), {"value": value}


class Remembering(nn.Module):
    """A recurrent policy that counts its steps in an episode, and reads the count."""

    initial_state = torch.full((1,), 2.0)

    def forward(self, observation, state):
        return ((observation.sum(-1) + state[..., 0]) % 3).long(), state + 1


def flat(batch):
    """Return a batch on the host, by key."""
    return {key: value.cpu() for key, value in batch.items(True, True)}


def assert_same(ours, theirs):
    ours, theirs = flat(ours), flat(theirs)
    assert set(ours) == set(theirs)
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype, key
        assert torch.equal(value, theirs[key]), key


@contextlib.contextmanager
def waiting_is_an_error():
    """Raise where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once, that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
