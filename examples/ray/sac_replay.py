"""SAC on Pendulum-v1: actors fill a replay buffer that is an actor itself; this process learns.

    python examples/ray/sac_replay.py                          # starts a small cluster here
    python examples/ray/sac_replay.py --address 10.0.0.1:6379  # uses one that runs

No frame passes through this process but those that it samples.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer

ENV, OBSERVATIONS, ACTIONS, HIGHEST_ACTION = "Pendulum-v1", 3, 1, 2.0
ENVS_PER_ACTOR, STEPS = 2, 25
CAPACITY, RANDOM_FRAMES, SAMPLE = 100_000, 1_000, 128
UPDATES_PER_FRAME, PUBLISH_EVERY = 0.5, 25  # updates
LEARNING_RATE, GAMMA, TARGET_RATE = 1e-3, 0.98, 0.01


def mlp(inputs: int, outputs: int, hidden: int = 128) -> nn.Sequential:
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


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
        slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # of tanh, its logarithm
        return HIGHEST_ACTION * raw.tanh(), (normal.log_prob(raw) - slope).sum(-1)


class Learner:
    """The actor, two critics with their slow copies, and the weight of the entropy."""

    def __init__(self) -> None:
        self.actor = Actor()
        self.critics = nn.ModuleList(mlp(OBSERVATIONS + ACTIONS, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        learned = (self.actor.parameters(), self.critics.parameters(), [self.log_alpha])
        self.optimizers = [torch.optim.Adam(some, LEARNING_RATE) for some in learned]

    def learn(self, frames: TensorDict) -> None:
        """Make one step with each network."""
        actor, critics, alpha = self.optimizers
        observation, following = frames["observation"], frames["next", "observation"]
        reward, terminated = (frames["next", key].squeeze(-1) for key in ("reward", "terminated"))
        with torch.no_grad():
            action, log_prob = self.actor.draw(following)
            value = lowest(self.targets, following, action) - self.log_alpha.exp() * log_prob
            goal = reward + GAMMA * ~terminated * value
        estimates = values(self.critics, observation, frames["action"])
        step(critics, (estimates - goal).square().mean(-1).sum())
        action, log_prob = self.actor.draw(observation)
        cost = self.log_alpha.exp().detach() * log_prob
        step(actor, (cost - lowest(self.critics, observation, action)).mean())
        step(alpha, self.log_alpha * (ACTIONS - log_prob.detach().mean()))
        with torch.no_grad():
            for slow, new in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(new, TARGET_RATE)


def values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    both = torch.cat([observation, action], -1)
    return torch.stack([critic(both).squeeze(-1) for critic in critics])


def lowest(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    return values(critics, observation, action).amin(0)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the mean return now and then."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a Ray cluster; one is started here by default")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--frames", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small networks; the cores are the actors'
    learner = Learner()
    with (
        RayReplayBuffer(
            CAPACITY,
            batch_size=SAMPLE,
            min_size=RANDOM_FRAMES,
            samples_per_insert=UPDATES_PER_FRAME * SAMPLE,  # who is ahead, waits
            seed=args.seed,
            address=args.address,
            remote_config={"num_cpus": 0},
        ) as buffer,
        RayCollector(
            [[ENV] * ENVS_PER_ACTOR] * args.actors,
            learner.actor,
            frames_per_batch=ENVS_PER_ACTOR * STEPS,
            total_frames=args.frames,
            init_random_frames=RANDOM_FRAMES,
            replay_buffer=buffer,
            seed=args.seed,
            remote_configs={"num_cpus": 0.5},
        ) as collector,
    ):
        collector.start()
        updates = int(UPDATES_PER_FRAME * (args.frames - RANDOM_FRAMES))
        for update in range(1, updates + 1):
            learner.learn(buffer.sample())
            if update % PUBLISH_EVERY == 0:
                collector.update_policy_weights_()
            if (update % 1000 == 0 or update == updates) and (r := collector.stats()["return"]):
                print(f"{update:>7,} updates: return {r['last_100']:.1f}", flush=True)


if __name__ == "__main__":
    main()
