"""Which trajectory each frame belongs to, and how episodes end, worked out on the device.

All of it comes from two columns of a finished rollout, rewards and ends, in a few whole-column
operations that the host never waits for. Ids are those that the host's loop gives.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Ledger"]


class Ledger:
    """Follows the trajectories of N envs across rollouts, in tensors.

    Args:
        num_envs: Number of envs.
        device: Where all of it lives.
        first_id: The first trajectory id that is free.
    """

    def __init__(self, num_envs: int, device: torch.device, first_id: int) -> None:
        self._ids = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._next_id = torch.full((), first_id, device=device)
        self._open = torch.zeros(2, num_envs, dtype=torch.float64, device=device)
        # How many episodes ended, and the sums of their returns and lengths: in all, and in the
        # last rollout in which any did.
        self._ended = torch.zeros(3, dtype=torch.float64, device=device)
        self._recent = self._ended.clone()

    @property
    def lengths(self) -> torch.Tensor:
        """Frames so far of each env's open episode; beside them are their returns."""
        return self._open[1]

    def restart(self) -> None:
        """Begin a trajectory in every env; open ones were cut off and do not count."""
        n = len(self._ids)
        self._ids.copy_(self._next_id + torch.arange(n, device=self._ids.device))
        self._next_id += n
        self._open.zero_()

    def number(self, done: torch.Tensor, ids: torch.Tensor) -> None:
        """Write the trajectory ids of a rollout.

        Args:
            done: `[T, N]`, where a trajectory ended and another began.
            ids: `[T, N]`, written.
        """
        begun = done.flatten().long()
        begun[0] += self._next_id - 1
        begun = begun.cumsum(0).view(done.shape)
        table = begun.new_empty(len(done) + 1, done.shape[1])
        table[0].copy_(self._ids)
        torch.mul(begun, done, out=table[1:])
        table = table.cummax(0).values  # ids only grow
        ids.copy_(table[:-1])
        self._ids.copy_(table[-1])
        torch.add(begun[-1, -1], 1, out=self._next_id)

    def count(self, reward: torch.Tensor, ends: torch.Tensor) -> None:
        """Add up returns and lengths of a rollout: of each env, up to the last end of an episode.

        Args:
            reward: `[T, N]`.
            ends: `[T, N]`, where an episode ended: there, and where it was cut off.
        """
        numbers = torch.arange(1, len(ends) + 1, device=ends.device, dtype=torch.int32)[:, None]
        last = torch.where(ends, numbers, 0).amax(0)
        gained = torch.where(numbers <= last, reward, 0).sum(0, dtype=torch.float64)
        gained, some = torch.stack([gained, last]), last > 0
        sums = torch.where(some, self._open + gained, 0).sum(1)
        ended = torch.cat([ends.sum(dtype=torch.float64)[None], sums])
        self._ended += ended
        torch.where(ended[0] > 0, ended, self._recent, out=self._recent)
        self._open.masked_fill_(some, 0).sub_(gained)
        self._open[0] += reward.sum(0, dtype=torch.float64)
        self._open[1] += len(ends)

    def open_ids(self) -> list[int]:
        """Return the id of each env's open trajectory; this waits for the device."""
        return self._ids.tolist()

    def as_dict(self) -> dict[str, Any]:
        """Return the means of `Episodes`; `last_100` is of the last rollout with any end."""
        (count, *sums), (recently, *recent) = self._ended.tolist(), self._recent.tolist()
        out: dict[str, Any] = {"episodes": int(count), "return": None, "length": None}
        for name, total, late in zip(("return", "length"), sums, recent, strict=True):
            if count:
                out[name] = {"mean": total / count, "last_100": late / recently}
        return out

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of all there is, on the host."""
        return {name: value.cpu().clone() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        for name, value in state.items():
            getattr(self, name).copy_(value)
