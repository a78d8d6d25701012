"""Envs by themselves: TensorDict in, TensorDict out, over any group of envs.

A collector does not come through here: it drives the group underneath directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.group import called
from swath.errors import ClosedError, UsageError
from swath.memory import Layout, Slab
from swath.owner import Owner
from swath.policies import ActionSampler, as_policy, check_range, to_array
from swath.rollout import BoundEnvs, EnvGroup, Plan, Runner, columns, interface_of, keys, slab_for
from swath.seeding import env_seed
from swath.tree import Leaf, key_name, nest

__all__ = ["Env"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _alone(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that refuses to be called while another thread is in such a method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._owner.enter(f"{method.__name__}()")
        try:
            return method(self, *args, **kwargs)
        finally:
            self._owner.leave()

    return call


class Env:
    """N environments with a TensorDict interface; the base class of `GymEnv` and the others.

    A single env has batch size `[]`.

    Args:
        group: The envs underneath.

    Examples:
        >>> from swath.envs import TorchCartPole, as_group
        >>> env = Env(as_group(TorchCartPole(8)))
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([8, 5])
        >>> env.close()
    """

    def __init__(self, group: EnvGroup) -> None:
        self.group = group
        self.observation_space = group.observation_space
        self.action_space = group.action_space
        self.num_envs = group.num_envs
        self._interface = interface_of(group)
        self.batch_size = torch.Size(self._interface.batch_shape)
        self._sampler = ActionSampler(
            self._interface.actions, range(group.num_envs), group.action_masks
        )
        self._state: tuple[Slab, BoundEnvs, int] | None = None
        self._closed, self._owner = False, Owner(type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process is made of; it is to be reset first."""
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} was closed; make a new one.")
        return {**vars(self), "_state": None, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _owner=Owner(type(self).__name__))  # of this process

    # -- one step at a time ---------------------------------------------------------------------

    @_alone
    def reset(self, mask: torch.Tensor | None = None, seed: int | None = None) -> TensorDict:
        """Start new episodes and return the observations of all envs.

        Args:
            mask: Bool `[N]`: reset these envs only; all by default.
            seed: Seeds the envs first, as `set_seed` does.
        """
        if mask is not None and not self.group.resets_singly:
            raise UsageError("this vector env cannot reset single envs; leave mask out.")
        if seed is not None:
            self.set_seed(seed)
        slab, bound = self._opened()
        which = None if mask is None else mask.reshape(-1).nonzero()[:, 0].tolist()
        if which != []:
            called(bound.reset, 0, which)
            for key in columns.ROOT_FLAGS:
                slab.arrays[key][0, slice(None) if which is None else which] = False
        return self._row(slab, root=True)

    @_alone
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step with the `"action"` of the TensorDict and store the result under `"next"`."""
        slab, bound = self._opened()
        for leaf in self._interface.actions:
            action = tensordict.get(leaf.key, None)
            if action is None:
                raise UsageError(
                    f"step() needs {key_name(leaf.key)} in its TensorDict; it has "
                    f"{sorted(map(str, tensordict.keys(True, True)))}. Set it, or use rand_step()."
                )
            checked = self._checked(leaf, to_array(action))
            slab.arrays[leaf.key][0] = checked.reshape(self.num_envs, *leaf.shape)
        columns.clear(slab)
        ended = called(bound.step, 0)
        slab.arrays[keys.NEXT_DONE][0, ended] = True
        observed = [leaf.key for leaf in self._interface.observations]
        for key in (*observed, *self.group.outcome.carried):  # where the next step starts
            column = slab.arrays[key]
            slab.arrays[keys.following(key)][0] = column[0] = column[1]
        for key in columns.ROOT_FLAGS:
            slab.arrays[key][0] = slab.arrays[keys.following(key)][0]
        return tensordict.set("next", self._row(slab, root=False))

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with a random action, which is written to the TensorDict."""
        td = TensorDict({}, self.batch_size) if tensordict is None else tensordict
        for leaf, draw in zip(self._interface.actions, self._sampler.draw(1), strict=True):
            action = torch.from_numpy(draw[0])
            td.set(leaf.key, action.reshape((*self.batch_size, *leaf.shape)))
        return self.step(td)

    def _checked(self, leaf: Leaf, action: np.ndarray) -> np.ndarray:
        shape = (*self._interface.batch_shape, *leaf.shape)
        if action.shape != shape or not np.can_cast(action.dtype, leaf.dtype, "same_kind"):
            raise UsageError(
                f"{key_name(leaf.key)} has shape {action.shape} and dtype {action.dtype}; the "
                f"action space {leaf.space} needs {shape} and {leaf.dtype}."
            )
        check_range(leaf, action)
        return action

    def _row(self, slab: Slab, *, root: bool) -> TensorDict:
        """Return a copy of what the envs show: their state, or the outcome of a step."""
        rows = {}
        for key, place in slab.layout.places.items():
            if place.field.carried if root else key[0] == "next":
                row = slab.rows(key, tuple(self.batch_size))[0]
                rows[key if root else key[1:]] = row.clone()
        return TensorDict(nest(rows), self.batch_size)

    # -- whole rollouts -------------------------------------------------------------------------

    @_alone
    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        *,
        break_when_any_done: bool = True,
        seed: int | None = None,
    ) -> TensorDict:
        """Start new episodes, step at most `max_steps` times and return `[*batch_size, T]`.

        Args:
            max_steps: Largest number of steps.
            policy: Anything that a collector takes; random by default.
            break_when_any_done: Stop when the first episode ends; otherwise envs that end start
                new episodes.
            seed: Seeds envs and policy.
        """
        if max_steps < 1:
            raise UsageError(f"max_steps must be at least 1; got {max_steps!r}.")
        self._opened()
        self._state = None  # the episodes move on: a step() must follow a reset()
        plan = Plan(steps=max_steps, stop_at_first_end=break_when_any_done, seed=seed)
        runner = Runner(self.group, policy, plan, self._sampler)
        return runner.lend(runner.collect())

    # -- the rest -------------------------------------------------------------------------------

    @_alone
    def set_seed(self, seed: int) -> None:
        """Seed the envs and the random actions, with effect from the next reset."""
        self._opened()
        self.group.seed([env_seed(seed, index) for index in range(self.num_envs)])
        self._sampler.seed(seed)

    def close(self) -> None:
        """Close the envs; calling it again has no effect."""
        if not self._closed:
            self._closed = True
            self.group.close()

    def _opened(self) -> tuple[Slab, BoundEnvs]:
        """Return a slab of one step, and the envs that write into it."""
        if self._closed:
            raise ClosedError("this env is closed; make a new one.")
        if self.group.needs_shared_memory:  # other processes step the envs, for one process
            self._owner.check_process()
        if self._state is None or self._state[2] != self.group.restores:
            policy = as_policy(None, self._interface, self._sampler)
            info, masked = self.group.info_fields, self.group.skips_rows
            outcome = self.group.outcome
            fields = columns.env_fields(
                self._interface, info, policy, outcome, masked=masked, compact=False
            )
            layout = Layout(fields, 1, self.num_envs)
            slab = slab_for(self.group, layout)
            columns.clear(slab)
            self._state = slab, called(self.group.bind, slab), self.group.restores
        return self._state[:2]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, "
            f"observation_space={self.observation_space}, action_space={self.action_space})"
        )
