"""SAC on Pendulum-v1: two workers fill a prioritized replay buffer while this process learns.

    python examples/sac_pendulum.py --seed 0 --out results

With `tolerance=0` frames are written and drawn in a fixed order, and weights are published half-way
between two batches: the same seed gives the same run, unless a worker is held up for as long as
half of the updates of a batch take.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from swath.collectors import MultiSyncCollector
from swath.data import PrioritizedSampler, ReplayBuffer

ENV, OBSERVATIONS, ACTIONS, HIGHEST_ACTION = "Pendulum-v1", 3, 1, 2.0
WORKERS, ENVS_PER_WORKER, STEPS = 2, 2, 25
FRAMES_PER_BATCH = WORKERS * ENVS_PER_WORKER * STEPS
CAPACITY, RANDOM_FRAMES, SAMPLE = 50_000, 1_000, 128
UPDATES_PER_FRAME = 0.5
PUBLISH_EVERY = int(UPDATES_PER_FRAME * FRAMES_PER_BATCH)  # updates
LEARNING_RATE, GAMMA, TARGET_RATE = 1e-3, 0.98, 0.01


def mlp(inputs: int, outputs: int, hidden: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class Actor(nn.Module):
    """Draws an action from a normal distribution that is squashed into the env's range."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(OBSERVATIONS, 2 * ACTIONS)

    def forward(self, observation: Tensor) -> Tensor:
        return self.draw(observation)[0]

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action through which gradients flow, and its log-probability."""
        mean, log_std = self.net(observation).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        # The logarithm of the slope of tanh, in a form that does not overflow.
        slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return HIGHEST_ACTION * raw.tanh(), (normal.log_prob(raw) - slope).sum(-1)


class Critics(nn.Module):
    """Two estimates of the value of an action, `[2, *]`; the lower one is believed."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(OBSERVATIONS + ACTIONS, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([observation, action], -1)
        return torch.stack([net(both).squeeze(-1) for net in self.nets])


class Learner:
    """Actor, critics with their slow copy, the weight of the entropy, and a step of learning."""

    def __init__(self) -> None:
        self.actor, self.critics = Actor(), Critics()
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), LEARNING_RATE, fused=True)
        self.critic_optimizer = torch.optim.Adam(
            self.critics.parameters(), LEARNING_RATE, fused=True
        )
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], LEARNING_RATE)

    def learn(self, frames: TensorDict) -> Tensor:
        """Make one step with each network and return the frames' new priorities."""
        error = self._critic_step(frames)
        self._actor_step(frames["observation"])
        with torch.no_grad():
            for slow, new in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(new, TARGET_RATE)
        return error.abs().mean(0)

    def _critic_step(self, frames: TensorDict) -> Tensor:
        following = frames["next", "observation"]
        reward, terminated = (frames["next", key].squeeze(-1) for key in ("reward", "terminated"))
        with torch.no_grad():
            action, log_prob = self.actor.draw(following)
            value = self.targets(following, action).amin(0) - self.log_alpha.exp() * log_prob
            goal = reward + GAMMA * ~terminated * value
        error = self.critics(frames["observation"], frames["action"]) - goal
        step(self.critic_optimizer, (frames["priority_weight"] * error**2).mean(-1).sum())
        return error.detach()

    def _actor_step(self, observation: Tensor) -> None:
        action, log_prob = self.actor.draw(observation)
        value = self.critics(observation, action).amin(0)
        step(self.actor_optimizer, (self.log_alpha.exp().detach() * log_prob - value).mean())
        surplus = -log_prob.detach().mean() + ACTIONS  # of entropy, above the usual goal
        step(self.alpha_optimizer, self.log_alpha * surplus)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(seed: int, frames: int) -> list[tuple[int, float]]:
    """Return the curve: frames so far, and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    learner = Learner()
    curve: list[tuple[int, float]] = []
    with (
        ReplayBuffer(
            CAPACITY,
            sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
            batch_size=SAMPLE,
            min_size=RANDOM_FRAMES,
            samples_per_insert=UPDATES_PER_FRAME * SAMPLE,
            tolerance=0,
            seed=seed,
        ) as buffer,
        MultiSyncCollector(
            [[ENV] * ENVS_PER_WORKER] * WORKERS,
            learner.actor,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=frames,
            init_random_frames=RANDOM_FRAMES,
            replay_buffer=buffer,
            seed=seed,
            progress=True,
        ) as collector,
    ):
        collector.start()
        for update in range(int(UPDATES_PER_FRAME * (frames - RANDOM_FRAMES))):
            batch = buffer.sample()  # waits for frames, as the workers wait for samples
            buffer.update_priority(batch["index"], learner.learn(batch))
            if update % PUBLISH_EVERY == PUBLISH_EVERY // 2:
                collector.update_policy_weights_()
                curve += point(collector.stats())
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
    axes = figure.add_subplot(title=f"SAC, {ENV}, seed {args.seed}", xlabel="frames")
    axes.plot(*zip(*curve, strict=True))
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.grid(alpha=0.3)
    figure.savefig(args.out / f"{name}.png", dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=30_000)
    parser.add_argument("--out", type=Path, default=Path("results"), help="where the curve goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # small networks; the cores are the workers'
    start = time.perf_counter()
    curve = train(args.seed, args.frames)
    report(args, curve, time.perf_counter() - start)


if __name__ == "__main__":
    main()
