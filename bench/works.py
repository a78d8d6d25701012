"""The works: which env, how many, which policy, how large a batch. A further one is one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """Where envs run; a contestant says which placements it knows.

    inline: in this process. parallel: envs in workers, policy here. sync, async: envs and policy
    in workers, a batch from all of them, or from one of them, first come first served.
    """
    workers: int = 0
    """Processes that collect; 0 where the contestant decides."""

    @property
    def group(self) -> str:
        """What `--only` calls a work beside its name."""
        return "inline" if self.placement == "inline" else "processes"

    @property
    def batch_envs(self) -> int:
        """Envs whose frames are in one batch."""
        return self.num_envs // self.workers if self.placement == "async" else self.num_envs

    @property
    def frames_per_batch(self) -> int:
        return self.batch_envs * self.steps

    @property
    def frames_per_round(self) -> int:
        """Frames that every env contributed to equally."""
        return self.num_envs * self.steps

    def part(self) -> Work:
        """What one worker does, as a work in one process."""
        envs = self.num_envs // self.workers
        return replace(self, num_envs=envs, placement="inline", workers=0)

    def placed(self, placement: str, workers: int = 0) -> Work:
        """The same work, elsewhere: with so many workers, each doing what this one does."""
        kind, _, envs = self.name.rpartition("-")
        name = f"{workers}x{envs}" if workers else envs
        title = self.title.rpartition(" x ")[0]
        where = f"{workers} {placement} workers x" if workers else placement
        return replace(
            self,
            name=f"{kind}-{placement}-{name}",
            title=f"{title}, {where} {envs}",
            num_envs=self.num_envs * max(workers, 1),
            placement=placement,
            workers=workers,
        )

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


def pixels(num_envs: int) -> Work:
    shape = (4, 84, 84)
    return framed(
        f"pixels-{num_envs}", f"4x84x84 uint8 x {num_envs}", num_envs, 125, shape, "uint8"
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
    pixels(8),
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
    cartpole(8, 125).placed("parallel"),
    cartpole(1, 1000).placed("sync", 2),
    cartpole(8, 125).placed("sync", 2),
    cartpole(1, 1000).placed("async", 2),
    cartpole(8, 125).placed("async", 2),
    pixels(8).placed("parallel"),
    pixels(4).placed("sync", 2),
)
QUICK = ("cartpole-parallel-8", "cartpole-sync-2x8", "cartpole-async-2x8")
"""The works on processes that a smoke test looks at; starting the peers takes most of the time."""
