"""What is true of every transition of each env: its dynamics, replayed from the stored state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium as gym
import numpy as np

from bench.batch import Rows
from bench.envs import STARTS, FramesEnv, RoverEnv, frames


@dataclass
class Outcome:
    """What a step must have given, for M states and actions."""

    obs: Rows
    reward: np.ndarray
    terminated: np.ndarray
    unsure: np.ndarray | None = None
    """States so close to a limit that single precision cannot tell the side."""


class Rules:
    """Replays stored states and actions (arrays of M rows)."""

    time_limit: int
    only_time_ends: bool = False
    """No episode ends before the time limit: the check then looks at more batches."""
    tolerance = 1e-4

    def step(self, obs: Rows, action: np.ndarray) -> Outcome:
        raise NotImplementedError

    def is_start(self, obs: Rows) -> np.ndarray:
        """Whether each observation can be the first of an episode."""
        raise NotImplementedError


def replay(env: gym.Env, states: np.ndarray, actions: np.ndarray, enter: Callable) -> Outcome:
    """Steps the env itself, once from each state."""
    env.reset(seed=0)
    results = []
    for state, action in zip(states.astype(np.float64), actions, strict=True):
        enter(state)
        results.append(env.step(action)[:3])
    obs, reward, terminated = zip(*results, strict=True)
    return Outcome({"observation": np.stack(obs)}, np.array(reward), np.array(terminated))


class CartPole(Rules):
    time_limit = 500

    def step(self, obs: Rows, action: np.ndarray) -> Outcome:
        env = gym.make("CartPole-v1", disable_env_checker=True).unwrapped

        def enter(state):
            env.state = state
            env.steps_beyond_terminated = None

        outcome = replay(env, obs["observation"], action, enter)
        found = np.abs(outcome.obs["observation"])
        near_x = np.abs(found[:, 0] - env.x_threshold) < self.tolerance
        near_angle = np.abs(found[:, 2] - env.theta_threshold_radians) < self.tolerance
        outcome.unsure = near_x | near_angle
        return outcome

    def is_start(self, obs: Rows) -> np.ndarray:
        return (np.abs(obs["observation"]) <= 0.0501).all(-1)


class Pendulum(Rules):
    time_limit = 200
    only_time_ends = True

    def step(self, obs: Rows, action: np.ndarray) -> Outcome:
        env = gym.make("Pendulum-v1", disable_env_checker=True).unwrapped
        cos, sin, speed = obs["observation"].T
        states = np.stack([np.arctan2(sin, cos), speed], -1)
        return replay(env, states, action, lambda state: setattr(env, "state", state))

    def is_start(self, obs: Rows) -> np.ndarray:
        return np.abs(obs["observation"][..., 2]) <= 1.0


class Frames(Rules):
    time_limit = FramesEnv.EPISODE
    only_time_ends = True

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype

    def _number(self, obs: Rows) -> np.ndarray:
        image = obs["observation"]
        return image[(..., *[0] * len(self._shape))].astype(np.int64)

    def step(self, obs: Rows, action: np.ndarray) -> Outcome:
        after = STARTS + (self._number(obs) + 1) % STARTS
        shown = np.stack(frames(self._shape, self._dtype))[after]
        return Outcome({"observation": shown}, after + action, np.zeros(len(after), bool))

    def is_start(self, obs: Rows) -> np.ndarray:
        return self._number(obs) < STARTS


class Rover(Rules):
    time_limit = RoverEnv.EPISODE

    def step(self, obs: Rows, action: np.ndarray) -> Outcome:
        position, mode = RoverEnv.advance(obs["position"], obs["mode"], action)
        camera = np.stack(RoverEnv.CAMERA)[mode]
        x = position[:, 0]
        after = {"position": position, "camera": camera, "mode": mode}
        return Outcome(after, x, np.abs(x) > RoverEnv.EDGE)

    def is_start(self, obs: Rows) -> np.ndarray:
        return (np.abs(obs["position"]) <= 0.1).all(-1) & (obs["mode"] == 0)
