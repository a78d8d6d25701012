"""Returns and lengths of episodes, worked out from whole rollouts after they are written."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Episodes"]


class Episodes:
    """Follows the episodes of N envs across rollouts."""

    def __init__(self, num_envs: int) -> None:
        self.lengths = np.zeros(num_envs, np.int64)
        """Frames so far of each env's open episode, `[N]`."""
        self._returns = np.zeros(num_envs)
        self.count = 0
        # Return and length of the episodes that have ended.
        self._recent: deque[tuple[float, int]] = deque(maxlen=100)
        self._sums = [0.0, 0.0]
        self._lows: list[float] = [np.inf, np.inf]
        self._highs: list[float] = [-np.inf, -np.inf]

    def forget(self) -> None:
        """Drop the open episodes: they were cut off and do not count."""
        self._returns[:] = 0.0
        self.lengths[:] = 0

    def add(
        self, reward: np.ndarray, ends: Sequence[tuple[int, int]], mask: np.ndarray | None
    ) -> list[tuple[float, int]]:
        """Account for one rollout and return the return and length of each that ended.

        Args:
            reward: `[T, N]`.
            ends: The (step, env) at which an episode ended, in order of time.
            mask: `[T, N]`, False where a row is no transition.
        """
        if not len(reward):
            return []
        finished = []
        if mask is None:
            frames = np.broadcast_to(np.arange(1, len(reward) + 1)[:, None], reward.shape)
        else:
            reward, frames = np.where(mask, reward, 0), np.cumsum(mask, 0)
        total = np.cumsum(reward, 0, np.float64)
        from_return, from_length = -self._returns, -self.lengths
        for t, i in ends:
            value, length = total[t, i] - from_return[i], frames[t, i] - from_length[i]
            finished.append((float(value), int(length)))
            from_return[i], from_length[i] = total[t, i], frames[t, i]
        self._returns, self.lengths = total[-1] - from_return, frames[-1] - from_length
        self.record(finished)
        return finished

    def record(self, finished: Sequence[tuple[float, int]]) -> None:
        """Count episodes that have ended, by return and length."""
        self.count += len(finished)
        self._recent.extend(finished)
        for n, values in enumerate(zip(*finished, strict=True)):
            self._sums[n] += sum(values)
            self._lows[n] = min(self._lows[n], *values)
            self._highs[n] = max(self._highs[n], *values)

    def as_dict(self) -> dict[str, Any]:
        """Return count, and mean, min, max and mean of the last 100 of return and length."""
        out: dict[str, Any] = {"episodes": self.count, "return": None, "length": None}
        if self.count:
            for n, name in enumerate(("return", "length")):
                out[name] = {
                    "mean": self._sums[n] / self.count,
                    "min": self._lows[n],
                    "max": self._highs[n],
                    "last_100": sum(pair[n] for pair in self._recent) / len(self._recent),
                }
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all there is."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))
