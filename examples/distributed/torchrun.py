"""REINFORCE on CartPole: rank 0 trains, the other ranks collect. On one machine:

    torchrun --standalone --nproc-per-node 5 examples/distributed/torchrun.py

On two, the same command on both, with the address of the first:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 ...
"""

import sys

import torch
from torch import nn
from torch.distributions import Categorical

from swath.collectors.distributed import DistributedCollector

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(net.parameters(), 3e-3)


def act(observation):
    return Categorical(logits=net(observation)).sample()


def learn(data):
    """Make actions that were followed by much reward more likely; data is [workers, time]."""
    reward, done = (data["next", key].squeeze(-1).float() for key in ("reward", "done"))
    returns, following = torch.zeros_like(reward), torch.zeros(reward.shape[0])
    for step in reversed(range(reward.shape[1])):
        following = reward[:, step] + 0.98 * following * (1 - done[:, step])
        returns[:, step] = following
    log_prob = Categorical(logits=net(data["observation"])).log_prob(data["action"])
    loss = -(log_prob * (returns - returns.mean()) / (returns.std() + 1e-6)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# All ranks come here; all but rank 0 stay, as workers, until rank 0 is done.
with DistributedCollector(
    "CartPole-v1", act, frames_per_batch=400, total_frames=frames, seed=0, sync=True
) as collector:
    for data in collector:
        learn(data)
        collector.update_policy_weights_()
    stats = collector.stats()
print(f"{stats['frames']} frames, return {stats['return']['last_100']:.0f}")
