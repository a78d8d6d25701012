"""DQN on CartPole-v1: actors fill a replay buffer that is an actor itself; this process learns.

    python examples/ray/dqn_replay.py [--address 10.0.0.1:6379]

No frame passes through this process but those that it samples.
"""

from __future__ import annotations

import argparse
import copy

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer

GAMMA, BATCH, TARGET_EVERY, PUBLISH_EVERY = 0.99, 128, 100, 20


class Greedy(nn.Module):
    """Takes the best action, and some random one with probability `epsilon`."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(
            nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
        )
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, observation: Tensor) -> Tensor:
        best = self.values(observation).argmax(-1)
        random = torch.rand(best.shape) < self.epsilon
        return torch.where(random, torch.randint_like(best, 2), best)


def loss(online: nn.Module, target: nn.Module, frames: TensorDict) -> Tensor:
    """Return the error of double Q-learning."""
    chosen = online(frames["observation"]).gather(-1, frames["action"].unsqueeze(-1))
    after = frames["next"]
    with torch.no_grad():
        best = online(after["observation"]).argmax(-1, keepdim=True)
        later = target(after["observation"]).gather(-1, best)
        wanted = after["reward"] + GAMMA * later * ~after["terminated"]
    return F.smooth_l1_loss(chosen, wanted)


def main() -> None:
    """Train, and print the mean return now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a Ray cluster; one is started here by default")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    policy = Greedy()
    target = copy.deepcopy(policy.values)
    optimizer = torch.optim.Adam(policy.values.parameters(), 5e-4)
    with (
        RayReplayBuffer(
            50_000,
            batch_size=BATCH,
            min_size=2_000,
            samples_per_insert=16.0,  # who is ahead, waits: the actors or this process
            seed=args.seed,
            address=args.address,
            remote_config={"num_cpus": 0},
        ) as buffer,
        RayCollector(
            ["CartPole-v1"] * args.actors,
            policy,
            frames_per_batch=200,
            replay_buffer=buffer,
            seed=args.seed,
            remote_configs={"num_cpus": 0.5},
        ) as collector,
    ):
        collector.start()
        for update in range(1, args.updates + 1):
            optimizer.zero_grad()
            loss(policy.values, target, buffer.sample()).backward()
            optimizer.step()
            if update % TARGET_EVERY == 0:
                target.load_state_dict(policy.values.state_dict())
            if update % PUBLISH_EVERY == 0:
                policy.epsilon.fill_(max(0.05, 1 - 2 * update / args.updates))
                collector.update_policy_weights_()
            if update % 1000 == 0 and (returns := collector.stats()["return"]):
                print(f"{update:>7,} updates: return {returns['last_100']:.1f}, {buffer.stats()}")


if __name__ == "__main__":
    main()
