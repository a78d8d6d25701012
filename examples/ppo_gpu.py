"""PPO on 4,096 CartPoles that live on a GPU: envs, policy, data and learner never leave it.

    python examples/ppo_gpu.py                  # some seconds on a GPU; prints the curve
    python examples/ppo_gpu.py --curve ppo.csv  # and writes it

A rollout of 32 steps of all envs is one CUDA graph. On a machine without a GPU the same script runs
on the CPU with fewer envs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from swath.collectors import Collector
from swath.envs import TorchCartPole

STEPS, GAMMA, LAMBDA, CLIP = 32, 0.99, 0.95, 0.2


class ActorCritic(nn.Module):
    """Called by the collector: from observations to actions, their log-probability and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = self.actor(observation).log_softmax(-1)
        action = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(-1)
        log_prob = log_probs.gather(-1, action[..., None])[..., 0]
        return action, log_prob, self.critic(observation)[..., 0]


def advantages(batch, policy: ActorCritic) -> Tensor:
    """Generalised advantages `[N, T]`; an episode that was cut off goes on in its value."""
    with torch.no_grad():
        following = policy.critic(batch["next", "observation"])[..., 0]
    reward, terminated, done = (
        batch["next", key][..., 0] for key in ("reward", "terminated", "done")
    )
    delta = reward + GAMMA * following * ~terminated - batch["value"]
    out, carried = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        carried = out[:, t] = delta[:, t] + GAMMA * LAMBDA * ~done[:, t] * carried
    return out


def learn(batch, policy: ActorCritic, optimizer: torch.optim.Optimizer, minibatches: int) -> None:
    """Make four passes over a batch."""
    advantage = advantages(batch, policy)
    data = [
        batch["observation"],
        batch["action"],
        batch["log_prob"],
        advantage,
        advantage + batch["value"],
    ]
    data = [value.reshape(-1, *value.shape[2:]) for value in data]
    for _ in range(4):
        order = torch.randperm(len(data[0]), device=data[0].device)
        for part in order.chunk(minibatches):
            observation, action, old, gain, target = (value[part] for value in data)
            log_probs = policy.actor(observation).log_softmax(-1)
            ratio = (log_probs.gather(-1, action[:, None])[:, 0] - old).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            value_loss = (policy.critic(observation)[:, 0] - target).square().mean()
            optimizer.zero_grad()
            (0.5 * value_loss - surrogate - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the curve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--envs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path)
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # small networks
    envs = given.envs or (4096 if device.type == "cuda" else 64)
    torch.manual_seed(given.seed)
    policy = ActorCritic().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, fused=device.type == "cuda")
    env = TorchCartPole(envs, device)
    frames = envs * STEPS
    curve = []
    with Collector(
        env, policy, frames_per_batch=frames, total_frames=given.batches * frames, seed=given.seed
    ) as collector:
        print(collector.describe())
        started = time.perf_counter()
        for number, batch in enumerate(collector):
            learn(batch, policy, optimizer, minibatches=8)
            collector.update_policy_weights_()
            if number % 5 == 4:
                stats = collector.stats()
                episode = stats["return"]["last_100"] if stats["return"] else 0.0
                curve.append((stats["frames"], time.perf_counter() - started, episode))
                print("{:>12,} frames  {:6.2f} s  return {:6.1f}".format(*curve[-1]), flush=True)
    if given.curve is not None:
        lines = [f"{count},{seconds:.3f},{episode:.2f}" for count, seconds, episode in curve]
        given.curve.write_text("\n".join(["frames,seconds,return", *lines]) + "\n")


if __name__ == "__main__":
    main()
