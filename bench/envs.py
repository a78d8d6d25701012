"""Cheap environments whose every transition can be recomputed from what a batch stores."""

from __future__ import annotations

from functools import lru_cache

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STARTS = 2  # frames 0 and 1 start an episode, frames 2 and 3 go on with it
FRAMES = 4  # also the number of actions


@lru_cache
def frames(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """The observations of a FramesEnv: noise, but the first four cells add up to its number."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(FRAMES):
        frame = rng.integers(0, 255, size=shape).astype(dtype)
        frame.reshape(-1)[:4] = (number, 0, 0, 0)
        made.append(frame)
    return tuple(made)


class FramesEnv(gym.Env):
    """Shows a few fixed frames in turn: no dynamics to compute, so what is left is collection.

    A random frame starts the episode, so that envs differ; no episode ends on such a frame.
    """

    EPISODE = 200

    def __init__(self, shape: tuple[int, ...] = (4, 84, 84), dtype: str = "uint8") -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.dtype(dtype))
        self.action_space = spaces.Discrete(FRAMES)
        self._frames = frames(shape, dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        self._number = int(self.np_random.integers(STARTS))
        return self._frames[self._number], {}

    def step(self, action):
        self._steps += 1
        self._number = number = STARTS + (self._number + 1) % STARTS
        truncated = self._steps >= self.EPISODE
        return self._frames[number], float(number + action), False, truncated, {}


class RoverEnv(gym.Env):
    """A Dict observation: a position that drifts with the action, a small camera and a mode."""

    EPISODE = 100
    EDGE = np.float32(0.8)
    MODES = 5
    PUSH = np.array(
        [[0.1, 0.05, 0.0], [-0.1, 0.0, 0.05], [0.0, 0.1, -0.05], [0.05, -0.1, 0.0]], np.float32
    )
    CAMERA = tuple(np.full((16, 16, 1), 10 * mode, np.uint8) for mode in range(MODES))

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            position=spaces.Box(-2.0, 2.0, (3,), np.float32),
            camera=spaces.Box(0, 255, (16, 16, 1), np.uint8),
            mode=spaces.Discrete(self.MODES),
        )
        self.action_space = spaces.Discrete(len(self.PUSH))

    @classmethod
    def advance(cls, position, mode, action):
        """The dynamics, for one env or for arrays of states: new position and mode."""
        return position * np.float32(0.9) + cls.PUSH[action], (mode + action + 1) % cls.MODES

    def _observation(self) -> dict:
        return {
            "position": self._position,
            "camera": self.CAMERA[self._mode],
            "mode": np.int64(self._mode),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-0.1, 0.1, 3).astype(np.float32)
        self._mode = 0
        self._steps = 0
        return self._observation(), {}

    def step(self, action):
        self._steps += 1
        self._position, self._mode = self.advance(self._position, self._mode, int(action))
        x = self._position[0]
        terminated = bool(abs(x) > self.EDGE)
        return self._observation(), float(x), terminated, self._steps >= self.EPISODE, {}
