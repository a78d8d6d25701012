"""Envs whose every step can be predicted, that are slow, or that fail where you want them to."""

from __future__ import annotations

import copy
import os
import time
import zlib
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from swath.errors import UsageError
from swath.tree import Key, action_leaves, fetch

__all__ = ["CountingEnv", "CrashingEnv", "SlowEnv", "episode_plan", "reward_of"]


def episode_plan(stamp: int, episode: int, longest: int) -> tuple[int, bool, bool]:
    """Return length, terminated and truncated of an episode: all that can be known beforehand.

    Examples:
        >>> episode_plan(stamp=3, episode=0, longest=9)
        (3, True, False)
    """
    mix = zlib.crc32(f"{stamp} {episode}".encode())
    ending = mix // longest % 3
    return 1 + mix % longest, ending != 1, ending != 0


def reward_of(stamp: int, episode: int, step: int, action: Mapping[Key, np.ndarray]) -> float:
    """Return the reward of a step: it changes with where the step is and any bit of the action.

    Args:
        stamp: The env.
        episode: The number of the episode.
        step: The number of the step in it.
        action: The leaves of the action by their key.
    """
    mix = zlib.crc32(f"{stamp} {episode} {step}".encode())
    for key, value in action.items():
        mix += zlib.crc32(value.tobytes(), zlib.crc32("/".join(key).encode()))
    return float(mix % 1021)  # small integers: exact in float32


class CountingEnv(gym.Env[Any, Any]):
    """An env that shows (stamp, episode, step), which determine rewards and ends of episodes.

    The stamp is the seed after `reset(seed=...)`, and until then a number that no other env has.
    Episodes count from 0 and start again at 0 with a seed; their lengths vary, some terminate, some
    are truncated, some both. An action that is not in the action space and a step of an episode
    that has ended are errors.

    Args:
        action_space: `Discrete(2)` by default.
        observation_space: Shows samples of this space instead, drawn anew from the three numbers
            at each step; check these with `check_replay`.
        longest: Largest length of an episode.

    Examples:
        >>> env = CountingEnv(longest=9)
        >>> env.reset(seed=3)
        (array([3, 0, 0]), {'step': 0})
        >>> env.step(1)
        (array([3, 0, 1]), 880.0, False, False, {'step': 1})
    """

    def __init__(
        self,
        action_space: gym.Space[Any] | None = None,
        observation_space: gym.Space[Any] | None = None,
        longest: int = 9,
    ) -> None:
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        # A copy: a space has a generator, and this one is seeded at every step.
        self._samples = copy.deepcopy(observation_space)
        numbers = spaces.Box(0, np.iinfo(np.int64).max, (3,), np.int64)
        self.observation_space = numbers if self._samples is None else self._samples
        self._leaves = action_leaves(self.action_space)
        self.longest = longest
        self.stamp, self.episode, self.count = int.from_bytes(os.urandom(6), "big"), -1, -1
        self.length, self._ends = 0, (False, False)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or the first one of a seed."""
        self._before("reset")
        super().reset(seed=seed)
        if seed is not None:
            self.stamp, self.episode = seed, -1
        self.episode, self.count = self.episode + 1, 0
        self.length, terminated, truncated = episode_plan(self.stamp, self.episode, self.longest)
        self._ends = (terminated, truncated)
        return self._observe(), {"step": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count on."""
        self._before("step")
        if not 0 <= self.count < self.length:
            raise UsageError(f"step() at {self.count} of {self.length}: reset() was not called.")
        if not self.action_space.contains(action):
            raise UsageError(f"the action {action!r} is not in {self.action_space}.")
        leaves = {n.key: np.asarray(fetch(action, n.path), n.dtype) for n in self._leaves}
        reward = reward_of(self.stamp, self.episode, self.count, leaves)
        self.count += 1
        ends = self._ends if self.count == self.length else (False, False)
        return self._observe(), reward, *ends, {"step": self.count}

    def _before(self, call: str) -> None:
        """Do what a subclass wants done before each `"reset"` and `"step"`."""

    def _observe(self) -> Any:
        if self._samples is None:
            return np.array([self.stamp, self.episode, self.count])
        self._samples.seed(zlib.crc32(f"{self.stamp} {self.episode} {self.count}".encode()))
        return self._samples.sample()


class SlowEnv(CountingEnv):
    """A `CountingEnv` that is slow.

    Args:
        seconds: How long each step and each reset sleeps.
        **kwargs: See `CountingEnv`.

    Examples:
        >>> SlowEnv(0.001).reset(seed=3)[0]
        array([3, 0, 0])
    """

    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def _before(self, call: str) -> None:
        time.sleep(self.seconds)


class CrashingEnv(CountingEnv):
    """A `CountingEnv` that raises an exception once, and then continues normally.

    Args:
        at_reset: The number of the reset that fails, counted from 0 over the life of the env.
        at_step: The number of the step that fails, counted likewise.
        exception: The exception to raise.
        **kwargs: See `CountingEnv`.

    Examples:
        >>> env = CrashingEnv(at_step=0, exception=KeyError("mass"))
        >>> observation, info = env.reset()
        >>> env.step(0)
        Traceback (most recent call last):
        KeyError: 'mass'
    """

    def __init__(
        self,
        at_reset: int | None = None,
        at_step: int | None = None,
        exception: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._crash_at = {"reset": at_reset, "step": at_step}
        self._calls = {"reset": 0, "step": 0}
        self.exception = exception or RuntimeError("crashed as asked")

    def _before(self, call: str) -> None:
        number, self._calls[call] = self._calls[call], self._calls[call] + 1
        if number == self._crash_at[call]:
            raise self.exception
