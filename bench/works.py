"""The works: which env, how many, which policy, how large a batch. A further one is one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
from torch import nn

from bench import rules
from bench.envs import FramesEnv, RoverEnv
from bench.policies import Glance, Greedy, Torque

CARTPOLE_SEED = 1  # untrained weights whose episodes last about 40 steps; most seeds give 9
ROVER_SEED = 9  # some episodes terminate, some reach the time limit


@dataclass(frozen=True)
class Work:
    """One thing to collect, the same for every contestant."""

    name: str
    title: str
    num_envs: int
    steps: int
    """Steps of each env in one batch."""
    make: Callable[[], gym.Env]
    policy: Callable[[], nn.Module]
    rules: rules.Rules
    policy_key: str = "observation"
    """The part of the observation that the policy reads."""
    keys: tuple[str, ...] = ("observation",)
    """Observation keys; more than one means a Dict observation."""
    placement: str = "inline"
    """Where envs run; a contestant says which placements it knows."""

    @property
    def frames_per_batch(self) -> int:
        return self.num_envs * self.steps

    @property
    def is_dict(self) -> bool:
        return self.keys != ("observation",)


def registered(env_id: str) -> Callable[[], gym.Env]:
    """How every contestant makes a registered env."""
    return partial(gym.make, env_id, disable_env_checker=True)


def cartpole(num_envs: int, steps: int) -> Work:
    return Work(
        name=f"cartpole-{num_envs}",
        title=f"CartPole-v1 x {num_envs}",
        num_envs=num_envs,
        steps=steps,
        make=registered("CartPole-v1"),
        policy=partial(Greedy, 4, 2, seed=CARTPOLE_SEED),
        rules=rules.CartPole(),
    )


def framed(name: str, title: str, num_envs: int, steps: int, shape: tuple, dtype: str) -> Work:
    """A work on the env that shows fixed frames."""
    return Work(
        name=name,
        title=title,
        num_envs=num_envs,
        steps=steps,
        make=partial(FramesEnv, shape, dtype),
        policy=partial(Glance, len(shape)),
        rules=rules.Frames(shape, dtype),
    )


WORKS = (
    cartpole(1, 1000),
    cartpole(8, 125),
    cartpole(64, 25),
    Work(
        name="pendulum-8",
        title="Pendulum-v1 x 8",
        num_envs=8,
        steps=125,
        make=registered("Pendulum-v1"),
        policy=partial(Torque, 3, seed=0),
        rules=rules.Pendulum(),
    ),
    framed("pixels-8", "4x84x84 uint8 x 8", 8, 125, (4, 84, 84), "uint8"),
    Work(
        name="dict-8",
        title="Dict observation x 8",
        num_envs=8,
        steps=125,
        make=RoverEnv,
        policy=partial(Greedy, 3, 4, seed=ROVER_SEED),
        rules=rules.Rover(),
        policy_key="position",
        keys=("position", "camera", "mode"),
    ),
)
