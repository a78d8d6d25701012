"""Double DQN on CartPole-v1: two workers fill a replay buffer while this process learns from it.

    python examples/dqn_cartpole.py --seed 0 --out results

With `tolerance=0` frames are written and drawn in a fixed order, and weights are published half-way
between two batches: the same seed gives the same run, unless a worker is held up for as long as
half of the updates of a batch take.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from swath.collectors import MultiSyncCollector
from swath.data import ReplayBuffer

ENV = "CartPole-v1"
WORKERS, ENVS_PER_WORKER, STEPS = 2, 4, 32
FRAMES_PER_BATCH = WORKERS * ENVS_PER_WORKER * STEPS
CAPACITY, MIN_SIZE, SAMPLE = 120_000, 1_000, 128  # a buffer that forgets learns less well
UPDATES_PER_FRAME = 0.25
PUBLISH_EVERY = int(UPDATES_PER_FRAME * FRAMES_PER_BATCH)  # updates
LEARNING_RATE, GAMMA, TARGET_RATE, MAX_GRAD_NORM = 5e-4, 0.98, 0.05, 10.0
EXPLORATION = 0.1  # share of the run in which the random actions become few
LEAST_EPSILON = 0.01


class EpsilonGreedy(nn.Module):
    """Takes the action of the highest value, or a random one with probability `epsilon`.

    A buffer is published with the weights, so the workers always know `epsilon`.
    """

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, observation: Tensor) -> Tensor:
        values = self.values(observation)
        best = values.argmax(-1)
        is_random = torch.rand(best.shape) < self.epsilon
        return torch.where(is_random, torch.randint_like(best, values.shape[-1]), best)


def make_values(observations: int = 4, actions: int = 2, hidden: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(observations, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, actions),
    )


def loss(values: nn.Module, target: nn.Module, frames: TensorDict) -> Tensor:
    """Return the loss of double DQN: one network chooses the next action, the other rates it."""
    following = frames["next", "observation"]
    reward, terminated = (frames["next", key].squeeze(-1) for key in ("reward", "terminated"))
    with torch.no_grad():
        best = values(following).argmax(-1, keepdim=True)
        goal = reward + GAMMA * ~terminated * target(following).gather(-1, best).squeeze(-1)
    chosen = values(frames["observation"]).gather(-1, frames["action"].unsqueeze(-1)).squeeze(-1)
    return F.smooth_l1_loss(chosen, goal)


class Learner:
    """The values, their slow copy, and one step of learning."""

    def __init__(self, updates: int) -> None:
        self.values = make_values()
        self.target = copy.deepcopy(self.values).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.values.parameters(), LEARNING_RATE, fused=True)
        self.decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, updates)

    def learn(self, frames: TensorDict) -> None:
        self.optimizer.zero_grad()
        loss(self.values, self.target, frames).backward()
        nn.utils.clip_grad_norm_(self.values.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.decay.step()
        with torch.no_grad():
            for slow, new in zip(self.target.parameters(), self.values.parameters(), strict=True):
                slow.lerp_(new, TARGET_RATE)


def train(seed: int, frames: int) -> list[tuple[int, float]]:
    """Return the curve: frames so far, and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    updates = int(UPDATES_PER_FRAME * (frames - MIN_SIZE))
    learner = Learner(updates)
    policy = EpsilonGreedy(learner.values)
    curve: list[tuple[int, float]] = []
    with (
        ReplayBuffer(
            CAPACITY,
            batch_size=SAMPLE,
            min_size=MIN_SIZE,
            samples_per_insert=UPDATES_PER_FRAME * SAMPLE,
            tolerance=0,
            seed=seed,
        ) as buffer,
        MultiSyncCollector(
            [[ENV] * ENVS_PER_WORKER] * WORKERS,
            policy,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=frames,
            replay_buffer=buffer,
            seed=seed,
            progress=True,
        ) as collector,
    ):
        collector.start()
        for update in range(updates):
            learner.learn(buffer.sample())  # waits for frames, as the workers wait for samples
            if update % PUBLISH_EVERY == PUBLISH_EVERY // 2:
                policy.epsilon.fill_(max(LEAST_EPSILON, 1 - update / updates / EXPLORATION))
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
    axes = figure.add_subplot(title=f"DQN, {ENV}, seed {args.seed}", xlabel="frames")
    axes.plot(*zip(*curve, strict=True))
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.grid(alpha=0.3)
    figure.savefig(args.out / f"{name}.png", dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=120_000)
    parser.add_argument("--out", type=Path, default=Path("results"), help="where the curve goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # small networks; the cores are the workers'
    start = time.perf_counter()
    curve = train(args.seed, args.frames)
    report(args, curve, time.perf_counter() - start)


if __name__ == "__main__":
    main()
