"""PPO on CartPole-v1 with TorchRL's actor, advantages and loss, on batches of swath.

    python examples/ppo_torchrl_loss.py --seed 0 --out results

Nothing is converted: swath's batches have the keys and shapes that TorchRL's losses expect. The
same seed gives the same run, to the last bit on one machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from swath.collectors import MultiSyncCollector

try:
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
except ImportError:
    raise SystemExit("this example needs TorchRL: pip install torchrl==0.14.1") from None

ENV, OBSERVATIONS, ACTIONS = "CartPole-v1", 4, 2
WORKERS, ENVS_PER_WORKER, STEPS = 2, 8, 64
FRAMES_PER_BATCH = WORKERS * ENVS_PER_WORKER * STEPS
EPOCHS, MINIBATCH = 4, 256
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 0.5


def mlp(inputs: int, outputs: int, gain: float, hidden: int = 64) -> nn.Sequential:
    """Two hidden layers with orthogonal weights; `gain` scales the last layer's."""
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_actor() -> ProbabilisticActor:
    """Return TorchRL's actor as it is; swath takes it, and stores what it puts out."""
    logits = TensorDictModule(mlp(OBSERVATIONS, ACTIONS, 0.01), ["observation"], ["logits"])
    return ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


def train(seed: int, frames: int) -> list[tuple[int, float]]:
    """Return the curve: frames so far, and the mean return of the last 100 episodes."""
    torch.manual_seed(seed)
    actor = make_actor()
    critic = ValueOperator(mlp(OBSERVATIONS, 1, gain=1.0), in_keys=["observation"])
    advantages = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_coeff=0.005,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), LEARNING_RATE, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, -(-frames // FRAMES_PER_BATCH))
    curve: list[tuple[int, float]] = []
    with MultiSyncCollector(
        [[ENV] * ENVS_PER_WORKER] * WORKERS,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=frames,
        seed=seed,
        progress=True,
    ) as collector:
        for batch in collector:  # [workers, envs, time]
            advantages(batch)
            rows = batch.reshape(-1)
            for _ in range(EPOCHS):
                for index in torch.randperm(len(rows)).split(MINIBATCH):
                    losses = loss(rows[index])
                    parts = (losses[f"loss_{key}"] for key in ("objective", "critic", "entropy"))
                    optimizer.zero_grad()
                    sum(parts).backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), MAX_GRAD_NORM)
                    optimizer.step()
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
    axes = figure.add_subplot(
        title=f"PPO with TorchRL's loss, {ENV}, seed {args.seed}", xlabel="frames"
    )
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
