"""Returns and lengths of episodes, worked out from whole rollouts after they are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Episodes"]

_LAST = 100


class Episodes:
    """Follows the episodes of N envs across rollouts."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self.count = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_LAST)
        self._sums = [0.0, 0.0]
        self._lows: list[float] = [np.inf, np.inf]
        self._highs: list[float] = [-np.inf, -np.inf]

    @property
    def lengths(self) -> np.ndarray:
        """Frames so far of each env's open episode, `[N]`."""
        return self._lengths

    def forget(self, which: Sequence[int] | slice = slice(None)) -> None:
        """Drop the open episodes of these envs: they were cut off and do not count."""
        self._returns[which] = 0.0
        self._lengths[which] = 0

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
        total = np.cumsum(reward if mask is None else np.where(mask, reward, 0), 0, np.float64)
        steps = None if mask is None else np.cumsum(mask, 0)
        from_return, from_length = -self._returns, -self._lengths
        for t, i in ends:
            frames = t + 1 if steps is None else int(steps[t, i])
            finished.append((float(total[t, i] - from_return[i]), int(frames - from_length[i])))
            from_return[i], from_length[i] = total[t, i], frames
        self._returns = total[-1] - from_return
        self._lengths = (len(reward) if steps is None else steps[-1]) - from_length
        self.record(finished)
        return finished

    def record(self, finished: Sequence[tuple[float, int]]) -> None:
        """Count episodes that have ended, by return and length."""
        self.count += len(finished)
        self._recent.extend(finished)
        for pair in finished:
            for n, x in enumerate(pair):
                self._sums[n] += x
                self._lows[n] = min(self._lows[n], x)
                self._highs[n] = max(self._highs[n], x)

    def as_dict(self) -> dict[str, Any]:
        """Return count, and mean, min, max and mean of the last 100 of return and length."""
        out: dict[str, Any] = {"episodes": self.count}
        for n, name in enumerate(("return", "length")):
            recent = [pair[n] for pair in self._recent]
            out[name] = (
                {
                    "mean": self._sums[n] / self.count,
                    "min": self._lows[n],
                    "max": self._highs[n],
                    "last_100": sum(recent) / len(recent),
                }
                if self.count
                else None
            )
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all there is."""
        return {
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "count": self.count,
            "recent": list(self._recent),
            "sums": list(self._sums),
            "lows": list(self._lows),
            "highs": list(self._highs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
        self.count, self._recent = state["count"], deque(state["recent"], maxlen=_LAST)
        self._sums = list(state["sums"])
        self._lows, self._highs = list(state["lows"]), list(state["highs"])
