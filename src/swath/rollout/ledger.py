"""Which trajectory each frame belongs to, and how episodes end, worked out on the device.

All of it comes from two columns of a finished rollout, rewards and ends, in whole-column operations
that the host never waits for. Numbers are the same as those that the host's loop gives.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Ledger"]


class Ledger:
    """Follows the trajectories of N envs across rollouts, in tensors.

    Args:
        num_envs: How many.
        device: Where all of it lives.
        first_id: The first trajectory id that is free.
    """

    def __init__(self, num_envs: int, device: torch.device, first_id: int) -> None:
        self._ids = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._next_id = torch.full((), first_id, device=device)
        self.lengths = torch.zeros_like(self._ids)
        """Frames so far of each env's open episode."""
        self._returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self._count = torch.zeros_like(self._next_id)
        # Of return and length: sum, least, greatest, mean of the last rollout that had any end.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._lows, self._highs = self._sums + torch.inf, self._sums - torch.inf
        self._recent = self._sums.clone()

    def restart(self) -> None:
        """Begin a trajectory in every env; open ones were cut off and do not count."""
        n = len(self._ids)
        self._ids.copy_(self._next_id + torch.arange(n, device=self._ids.device))
        self._next_id += n
        self._returns.zero_()
        self.lengths.zero_()

    def add(
        self, reward: torch.Tensor, done: torch.Tensor, ends: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Account for one rollout, write its trajectory ids, and return returns and lengths.

        Args:
            reward: `[T, N]`.
            done: `[T, N]`, where a trajectory ended and another began.
            ends: `[T, N]`, where an episode ended: there, and where it was cut off.
            ids: `[T, N]`, written.

        Returns:
            `[2, T, N]`: what return and length were after each step.
        """
        steps = torch.arange(len(done), device=done.device)[:, None]
        last = torch.where(done, steps, -1).cummax(0).values
        before = torch.cat([torch.full_like(last[:1], -1), last[:-1]])
        begun = self._next_id - 1 + done.flatten().cumsum(0).view_as(last)
        total = reward.cumsum(0, dtype=torch.float64)
        torch.where(before < 0, self._ids, begun.gather(0, before.clamp(0)), out=ids)
        gained = total - self._since(total, before)
        length = torch.where(before < 0, steps + 1 + self.lengths, steps - before)
        values = torch.stack([gained, length.to(torch.float64)])
        self._record(values, ends)
        end = last[-1:]
        self._returns.copy_((total[-1:] - self._since(total, end))[0])
        self.lengths.copy_(torch.where(end < 0, len(done) + self.lengths, len(done) - 1 - end)[0])
        self._ids.copy_(torch.where(end < 0, self._ids, begun.gather(0, end.clamp(0)))[0])
        self._next_id.add_(done.sum())
        return values

    def _since(self, total: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the sum of rewards at which the episode began that follows these ends."""
        return torch.where(at < 0, -self._returns, total.gather(0, at.clamp(0)))

    def _record(self, values: torch.Tensor, done: torch.Tensor) -> None:
        count, sums = done.sum(), torch.where(done, values, 0).sum((1, 2))
        self._count += count
        self._sums += sums
        self._recent.copy_(torch.where(count > 0, sums / count, self._recent))
        lows = torch.where(done, values, torch.inf).amin((1, 2))
        highs = torch.where(done, values, -torch.inf).amax((1, 2))
        self._lows, self._highs = self._lows.minimum(lows), self._highs.maximum(highs)

    def open_ids(self) -> list[int]:
        """Return the id of each env's open trajectory; this waits for the device."""
        return self._ids.tolist()

    def as_dict(self) -> dict[str, Any]:
        """Return what `Episodes.as_dict` does; `last_100` is of the last rollout with any end."""
        count = int(self._count)
        out: dict[str, Any] = {"episodes": count, "return": None, "length": None}
        rows = torch.stack([self._sums / max(count, 1), self._lows, self._highs, self._recent]).T
        for name, row in zip(("return", "length"), rows.tolist() if count else (), strict=False):
            out[name] = dict(zip(("mean", "min", "max", "last_100"), row, strict=True))
        return out

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of all there is, on the host."""
        return {name: value.cpu().clone() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        for name, value in state.items():
            getattr(self, name).copy_(value)
