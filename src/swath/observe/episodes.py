"""Returns and lengths of episodes, worked out from whole rollouts after they are written."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Episodes"]

_KEPT = 10_000
"""Episodes for `take`; whoever does not ask for them has no use for more."""


class _Ended(NamedTuple):
    """The episodes that have ended; pairs are of return and length."""

    number: int = 0
    recent: tuple[tuple[float, int], ...] = ()
    sums: Sequence[float] = (0.0, 0.0)
    lows: Sequence[float] = (np.inf, np.inf)
    highs: Sequence[float] = (-np.inf, -np.inf)


class Episodes:
    """Follows the episodes of N envs across rollouts."""

    def __init__(self, num_envs: int) -> None:
        self.lengths = np.zeros(num_envs, np.int64)
        """Frames so far of each env's open episode, `[N]`."""
        self._returns = np.zeros(num_envs)
        self._ended = _Ended()  # replaced as a whole: another thread may ask for `as_dict`
        self._untold: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def forget(self, which: Sequence[int] | slice = slice(None)) -> None:
        """Drop the open episodes of all envs, or some: they were cut off and do not count."""
        self._returns[which] = 0.0
        self.lengths[which] = 0

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
        if finished:
            self._untold.extend(finished)
            old, new = self._ended, list(zip(*finished, strict=True))
            self._ended = _Ended(
                old.number + len(finished),
                (*old.recent, *finished)[-100:],
                [one + sum(more) for one, more in zip(old.sums, new, strict=True)],
                [min(one, *more) for one, more in zip(old.lows, new, strict=True)],
                [max(one, *more) for one, more in zip(old.highs, new, strict=True)],
            )

    def take(self) -> dict[str, list[Any]]:
        """Return returns and lengths of the episodes that were recorded since the last call."""
        taken = [self._untold.popleft() for _ in range(len(self._untold))]
        return {name: [pair[n] for pair in taken] for n, name in enumerate(("return", "length"))}

    def as_dict(self) -> dict[str, Any]:
        """Return count, and mean, min, max and mean of the last 100 of return and length."""
        ended = self._ended
        out: dict[str, Any] = {"episodes": ended.number, "return": None, "length": None}
        if ended.number:
            for n, name in enumerate(("return", "length")):
                out[name] = {
                    "mean": ended.sums[n] / ended.number,
                    "min": ended.lows[n],
                    "max": ended.highs[n],
                    "last_100": sum(pair[n] for pair in ended.recent) / len(ended.recent),
                }
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all there is."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))
