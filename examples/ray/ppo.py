"""PPO on CartPole-v1 with Ray actors: on this machine, or on a cluster.

    python examples/ray/ppo.py                          # starts a small cluster here
    python examples/ray/ppo.py --address 10.0.0.1:6379  # uses one that runs

Nothing else changes: Ray places the actors, swath replaces those that are lost.
"""

from __future__ import annotations

import argparse

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from swath.collectors.distributed import RayCollector

ENV, ENVS_PER_ACTOR, STEPS = "CartPole-v1", 8, 64
GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCH = 0.98, 0.8, 0.2, 4, 256


class ActorCritic(nn.Module):
    """Chooses an action; its log-probability and the value are stored beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(4, 64, 2, gain=0.01), mlp(4, 64, 1, gain=1.0)

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        choice = Categorical(logits=self.actor(observation))
        action = choice.sample()
        value = self.critic(observation).squeeze(-1)
        return {"action": action, "log_prob": choice.log_prob(action), "value": value}


def mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers with orthogonal weights; `gain` scales the last layer's."""
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@torch.no_grad()
def advantages(batch: TensorDict, critic: nn.Module) -> Tensor:
    """Estimate advantages of a batch `[actors, envs, time]` (GAE)."""
    reward, terminated, done = (
        batch["next", key].squeeze(-1) for key in ("reward", "terminated", "done")
    )
    later = critic(batch["next", "observation"]).squeeze(-1)
    error = reward + GAMMA * later * ~terminated - batch["value"]
    keep = GAMMA * LAMBDA * ~done
    found, running = torch.empty_like(error), torch.zeros_like(error[..., 0])
    for t in reversed(range(error.shape[-1])):
        running = error[..., t] + keep[..., t] * running
        found[..., t] = running
    return found


def learn(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    """Improve the network on one batch."""
    batch = batch.select("observation", "action", "log_prob", "value", "next")
    batch["advantage"] = advantages(batch, network.critic)
    batch["target"] = batch["advantage"] + batch["value"]
    frames = batch.exclude("next", "value").reshape(-1)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(frames)).split(MINIBATCH):
            optimizer.zero_grad()
            loss(network, frames[index]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def loss(network: ActorCritic, frames: TensorDict) -> Tensor:
    """Return the clipped loss of PPO, of the value and of the entropy."""
    choice = Categorical(logits=network.actor(frames["observation"]))
    ratio = (choice.log_prob(frames["action"]) - frames["log_prob"]).exp()
    advantage = frames["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    value = network.critic(frames["observation"]).squeeze(-1)
    return 0.5 * F.mse_loss(value, frames["target"]) - gain - 0.005 * choice.entropy().mean()


def main() -> None:
    """Train, and print the mean return now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a Ray cluster; one is started here by default")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # a small network; the cores are the actors'
    network = ActorCritic()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True)
    frames_per_batch = args.actors * ENVS_PER_ACTOR * STEPS
    batches = -(-args.frames // frames_per_batch)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, batches)
    with RayCollector(
        [[ENV] * ENVS_PER_ACTOR] * args.actors,
        network,
        sync=True,
        address=args.address,
        frames_per_batch=frames_per_batch,
        total_frames=args.frames,
        seed=args.seed,
    ) as collector:
        for number, batch in enumerate(collector, 1):
            learn(network, optimizer, batch)
            decay.step()
            collector.update_policy_weights_()
            stats = collector.stats()
            if (number % 20 == 0 or number == batches) and stats["return"]:
                print(f"{stats['frames']:>8,} frames: return {stats['return']['last_100']:.1f}")


if __name__ == "__main__":
    main()
