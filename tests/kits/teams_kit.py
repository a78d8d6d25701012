"""A TorchRL env of any batch size whose observations tell its whole history; imports TorchRL.

It has the episodes of `telling_kit.HistoryEnv`, and what those do not have: several rewards, and
flags of its parts.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from telling_kit import FLAGS, burn, ending_of, first_hash, next_hash, reward_of
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

__all__ = ["HistoryTeams"]

_AGENTS = 2


class HistoryTeams(EnvBase):
    """Two agents in each env, which end together.

    Each agent sees (stamp, episode, step) and a half of the hash of all actions. The reward is the
    sum of a bonus and of what the agents get.

    Args:
        lead: The batch size.
        action: Kind of the actions.
        longest: Most steps of an episode.
        flags: Where the flags are: "root", "agents" or "both".
    """

    def __init__(
        self, lead: tuple[int, ...], action: str = "discrete", longest: int = 5, flags: str = "root"
    ) -> None:
        super().__init__(batch_size=torch.Size(lead))
        n = math.prod(lead)
        self.kind, self.longest, self.flags = action, longest, flags
        self.stamps = [int.from_bytes(os.urandom(5), "big") for _ in range(n)]
        self.episodes, self.counts, self.hashes, self.lengths = ([-1] * n for _ in range(4))
        self.ends: list[Any] = [(False, False)] * n
        team = (*lead, _AGENTS)
        seen = {
            "where": Unbounded((*team, 3), dtype=torch.int64),
            "hash": Unbounded((*team, 4), dtype=torch.uint8),
        }
        self.observation_spec = Composite(agents=Composite(seen, shape=team), shape=lead)
        acts = {
            "discrete": {"action": Categorical(10_007, shape=lead)},
            "box": {"action": Bounded(-1000, 1000, (*lead, 2))},
            "agents": {"agents": Composite(action=Categorical(103, shape=team), shape=team)},
        }
        self.action_spec = Composite(acts[action], shape=lead)
        gain = Composite(reward=Unbounded((*team, 1)), shape=team)
        self.reward_spec = Composite(bonus=Unbounded((*lead, 1)), agents=gain, shape=lead)
        done: dict[str, Any] = {}
        if flags != "agents":
            done = {name: Categorical(2, (*lead, 1), dtype=torch.bool) for name in FLAGS}
        if flags != "root":
            parts = {name: Categorical(2, (*team, 1), dtype=torch.bool) for name in FLAGS}
            done["agents"] = Composite(parts, shape=team)
        self.done_spec = Composite(done, shape=lead)

    def _set_seed(self, seed: int | None) -> None:
        self.stamps = [(seed or 0) + i * 2**31 for i in range(len(self.stamps))]
        self.episodes = [-1] * len(self.stamps)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        burn()
        mask = None
        if tensordict is not None:
            key: Any = ("agents", "_reset") if self.flags == "agents" else "_reset"
            mask = tensordict.get(key, None)
        which = np.ones(len(self.stamps), bool)
        if mask is not None:
            which = mask.reshape(len(self.stamps), -1).any(-1).numpy()
        for i in np.flatnonzero(which).tolist():
            self.episodes[i], self.counts[i] = self.episodes[i] + 1, 0
            self.hashes[i] = first_hash(self.stamps[i], self.episodes[i])
            self.lengths[i], *self.ends[i] = ending_of(
                self.stamps[i], self.episodes[i], self.longest
            )
        return self._seen().update(self._ended([(False, False)] * len(self.stamps)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        burn()
        n, key = len(self.stamps), ("agents", "action") if self.kind == "agents" else "action"
        acts = tensordict[key].reshape(n, -1).tolist()
        rewards, ends = [0.0] * n, [(False, False)] * n
        live = tensordict.get("_step", torch.ones(self.batch_size, dtype=torch.bool))
        for i in np.flatnonzero(live.reshape(-1).numpy()).tolist():
            if not 0 <= self.counts[i] < self.lengths[i]:
                raise RuntimeError(f"step() at {self.counts[i]} of {self.lengths[i]}: no reset().")
            self.hashes[i] = next_hash(self.hashes[i], tuple(acts[i]))
            self.counts[i] += 1
            rewards[i] = reward_of(self.hashes[i])
            if self.counts[i] == self.lengths[i]:
                ends[i] = self.ends[i]
        gained = torch.tensor(rewards).reshape(*self.batch_size, 1)
        parts = torch.stack([gained - 3, torch.ones_like(gained)], -2)
        out = self._seen().update(self._ended(ends)).set("bonus", torch.full_like(gained, 2.0))
        out["agents"].set("reward", parts)
        return out

    def _seen(self) -> TensorDictBase:
        lead, team = self.batch_size, (*self.batch_size, _AGENTS)
        where = torch.tensor([self.stamps, self.episodes, self.counts]).T.reshape(*lead, 1, 3)
        halves = torch.from_numpy(np.array(self.hashes, np.int64).view(np.uint8).copy())
        seen = {"where": where.expand(*team, 3).clone(), "hash": halves.reshape(*team, 4)}
        return TensorDict({"agents": TensorDict(seen, team)}, lead)

    def _ended(self, ends: list[tuple[bool, bool]]) -> TensorDictBase:
        lead, out = self.batch_size, TensorDict({}, self.batch_size)
        terminated, truncated = torch.tensor(ends).T.reshape(2, *lead, 1)
        for name, flag in zip(FLAGS, (terminated, truncated, terminated | truncated), strict=True):
            if self.flags != "agents":
                out[name] = flag
            if self.flags != "root":
                team = flag[..., None, :].expand(*lead, _AGENTS, 1).clone()
                out["agents", name] = team
        if self.flags != "root":
            out["agents"].batch_size = (*lead, _AGENTS)
        return out
