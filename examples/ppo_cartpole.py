"""PPO on CartPole-v1: two workers collect with the newest policy, this process learns.

    python examples/ppo_cartpole.py --seed 0 --out results

The same seed gives the same run, to the last bit on one machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from swath.collectors import MultiSyncCollector

ENV = "CartPole-v1"
WORKERS, ENVS_PER_WORKER, STEPS = 2, 8, 64
FRAMES_PER_BATCH = WORKERS * ENVS_PER_WORKER * STEPS
EPOCHS, MINIBATCH = 4, 256
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-3, 0.2, 0.5
GAMMA, LAMBDA = 0.98, 0.8
VALUE_WEIGHT, ENTROPY_WEIGHT = 0.5, 0.005


class ActorCritic(nn.Module):
    """Chooses an action; its log-probability and the value are stored beside it."""

    def __init__(self, observations: int = 4, actions: int = 2, hidden: int = 64) -> None:
        super().__init__()
        self.actor = mlp(observations, hidden, actions, gain=0.01)
        self.critic = mlp(observations, hidden, 1, gain=1.0)

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
    """Estimate advantages (GAE) of a batch `[*, T]`.

    An episode that was truncated would have gone on, so the value of its last observation counts.
    """
    reward, terminated, done = (
        batch["next", key].squeeze(-1) for key in ("reward", "terminated", "done")
    )
    next_value = critic(batch["next", "observation"]).squeeze(-1)
    error = reward + GAMMA * next_value * ~terminated - batch["value"]
    keep = GAMMA * LAMBDA * ~done
    advantage, running = torch.empty_like(error), torch.zeros_like(error[..., 0])
    for t in reversed(range(error.shape[-1])):
        running = error[..., t] + keep[..., t] * running
        advantage[..., t] = running
    return advantage


def learn(network: ActorCritic, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    """Improve the network on one batch, several times over."""
    batch = batch.select("observation", "action", "log_prob", "value", "next")
    batch["advantage"] = advantages(batch, network.critic)
    batch["target"] = batch["advantage"] + batch["value"]
    frames = batch.exclude("next", "value").reshape(-1)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(frames)).split(MINIBATCH):
            optimizer.zero_grad()
            loss(network, frames[index]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def loss(network: ActorCritic, frames: TensorDict) -> Tensor:
    """Return the clipped loss of PPO, of the value and of the entropy."""
    choice = Categorical(logits=network.actor(frames["observation"]))
    ratio = (choice.log_prob(frames["action"]) - frames["log_prob"]).exp()
    advantage = frames["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    value_loss = F.mse_loss(network.critic(frames["observation"]).squeeze(-1), frames["target"])
    return VALUE_WEIGHT * value_loss - gain - ENTROPY_WEIGHT * choice.entropy().mean()


def train(seed: int, frames: int) -> list[tuple[int, float]]:
    """Return the curve: frames so far, and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    network = ActorCritic()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, -(-frames // FRAMES_PER_BATCH))
    curve: list[tuple[int, float]] = []
    with MultiSyncCollector(
        [[ENV] * ENVS_PER_WORKER] * WORKERS,
        network,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        seed=seed,
        progress=True,
    ) as collector:
        for batch in collector:  # [workers, envs, time]
            learn(network, optimizer, batch)
            decay.step()
            collector.update_policy_weights_()
            curve += point(collector.stats())
    return curve


def point(stats: dict[str, Any]) -> list[tuple[int, float]]:
    """Return a point of the curve, or none if no episode has ended yet."""
    returns = stats["return"]
    return [] if returns is None else [(stats["frames"], returns["last_100"])]


def report(args: argparse.Namespace, curve: list[tuple[int, float]], seconds: float) -> None:
    """Say how it went, and write it and the curve to `--out`."""
    if not curve:
        raise SystemExit(f"no episode ended in {args.frames} frames; give more with --frames")
    name, final = Path(__file__).stem, curve[-1][1]
    print(f"{name}: {final:.1f}, the mean return of the last 100 episodes, in {seconds:.0f} s")
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"seed": args.seed, "frames": args.frames, "seconds": seconds, "mean_return": final}
    (args.out / f"{name}.json").write_text(json.dumps(result))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no learning curve: it needs matplotlib (pip install matplotlib)")
        return
    figure = Figure((6, 3.5), layout="constrained")
    axes = figure.add_subplot(title=f"PPO, {ENV}, seed {args.seed}", xlabel="frames")
    axes.plot(*zip(*curve, strict=True))
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.grid(alpha=0.3)
    figure.savefig(args.out / f"{name}.png", dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path("results"), help="where the curve goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # small networks; the cores are the workers'
    start = time.perf_counter()
    curve = train(args.seed, args.frames)
    report(args, curve, time.perf_counter() - start)


if __name__ == "__main__":
    main()
