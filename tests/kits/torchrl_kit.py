"""TorchRL envs of many forms, written for the tests; imports TorchRL."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

GROUPS = {"cars": 3, "walkers": 2}


class Teams(EnvBase):
    """Two groups of agents that count their steps, each agent up to a limit of its own.

    An agent sees how often it was reset and how many steps it made since; its reward is what it
    did plus its step. The env ends when its first car does; without flags at the root, only
    agents end, and are reset one by one.

    Args:
        batch_size: Of any number of dimensions.
        at_root: There is a `done` for the whole env.
        parts: There is a `done` for each agent.
    """

    def __init__(self, batch_size=(), at_root=True, parts=True):
        super().__init__(batch_size=torch.Size(batch_size))
        self.at_root, self.parts = at_root, parts
        observation, action, reward, done = ({}, {}, {}, {})
        for name, agents in GROUPS.items():
            lead = (*batch_size, agents)
            observation[name] = Composite(
                observation=Unbounded((*lead, 2)),
                age=Unbounded(lead, dtype=torch.int32),
                shape=lead,
            )
            action[name] = Composite(action=Bounded(-1, 1, (*lead, 1)), shape=lead)
            reward[name] = Composite(reward=Unbounded((*lead, 1)), shape=lead)
            if parts:
                flags = {k: Categorical(2, (*lead, 1), dtype=torch.bool) for k in FLAGS}
                done[name] = Composite(flags, shape=lead)
        if at_root:
            done.update({k: Categorical(2, (*batch_size, 1), dtype=torch.bool) for k in FLAGS})
        self.observation_spec = Composite(observation, shape=batch_size)
        self.action_spec = Composite(action, shape=batch_size)
        self.reward_spec = Composite(reward, shape=batch_size)
        self.done_spec = Composite(done, shape=batch_size)
        self.ages = {n: torch.zeros(*batch_size, k, dtype=torch.int32) for n, k in GROUPS.items()}
        self.lives = {n: torch.zeros_like(age) for n, age in self.ages.items()}

    def limits(self, name):
        """Return the longest life of each agent: no two envs are alike."""
        count = self.ages[name].numel()
        return 4 + torch.arange(count, dtype=torch.int32).reshape(self.ages[name].shape)

    def _seen(self):
        seen = {}
        for name in GROUPS:
            both = torch.stack([self.lives[name], self.ages[name]], -1).float()
            seen[name] = TensorDict(
                {"observation": both, "age": self.ages[name].clone()}, self.ages[name].shape
            )
        return TensorDict(seen, self.batch_size)

    def _flags(self, fresh):
        out = {}
        over = {name: (self.ages[name] >= self.limits(name))[..., None] for name in GROUPS}
        over = {name: flag & (not fresh) for name, flag in over.items()}
        late = {name: flag & (self.lives[name] % 2 == 1)[..., None] for name, flag in over.items()}
        for name in GROUPS:
            ends = {"done": over[name], "truncated": late[name]}
            ends["terminated"] = over[name] & ~late[name]
            if self.parts:
                out[name] = TensorDict(ends, self.ages[name].shape)
            if self.at_root and name == "cars":
                out.update({key: value[..., 0, :].clone() for key, value in ends.items()})
        return TensorDict(out, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        for name in GROUPS:
            key = "_reset" if self.at_root else (name, "_reset")
            given = None if tensordict is None else tensordict.get(key, None)
            mask = torch.ones_like(self.ages[name], dtype=torch.bool)
            if given is not None:
                mask = given.expand(mask.shape) if self.at_root else given[..., 0]
            self.ages[name] = torch.where(mask, 0, self.ages[name])
            self.lives[name] = self.lives[name] + mask.int()
        return self._seen().update(self._flags(fresh=True))

    def _step(self, tensordict):
        out = {}
        for name in GROUPS:
            self.ages[name] = self.ages[name] + 1
            did = tensordict[name, "action"] + self.ages[name][..., None]
            out[name] = TensorDict({"reward": did}, self.ages[name].shape)
        return (
            self._seen().update(self._flags(fresh=False)).update(TensorDict(out, self.batch_size))
        )

    def _set_seed(self, seed):
        pass


FLAGS = ("done", "terminated", "truncated")


def teams_policy():
    """A policy for `Teams`: every agent acts by what it sees."""
    return TensorDictSequential(
        *(
            TensorDictModule(
                lambda seen: torch.sin(seen[..., :1] + 3 * seen[..., 1:]),
                in_keys=[(name, "observation")],
                out_keys=[(name, "action")],
            )
            for name in GROUPS
        )
    )
