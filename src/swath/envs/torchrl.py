"""TorchRL envs, single or batched, with their transforms. TorchRL itself is never imported."""

from __future__ import annotations

import atexit
import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.batch import NativeGroup
from swath.envs.group import comes_from
from swath.envs.torchrl_specs import action_form, observation_form, outcome_of
from swath.memory import Slab
from swath.owner import only_here
from swath.policies.choices import OneHot
from swath.rollout import BoundEnvs, CallFailed, keys
from swath.rollout.keys import following
from swath.tree import Key, key_name

__all__ = ["OneHot", "TorchRLGroup", "is_torchrl_env"]

_CHOICES = ("Categorical", "OneHot", "MultiCategorical", "MultiOneHot")
"""The specs of actions that may have a mask."""
_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Envs that are closed when the interpreter ends, if nobody has done so before."""


def is_torchrl_env(env: Any) -> bool:
    """Tell a TorchRL env without importing TorchRL."""
    return comes_from(env, "torchrl", "EnvBase")


@only_here
def _close_open() -> None:
    for env in list(_open):
        with contextlib.suppress(Exception):
            if not env.is_closed:
                env.close()


class TorchRLGroup(NativeGroup):
    """A TorchRL `EnvBase` of any batch size, transforms included; see `EnvGroup`."""

    kept = ("env", "live", "state")
    native = False

    def __init__(self, env: Any) -> None:
        lead: tuple[int, ...] = tuple(env.batch_size)
        observed, observations = observation_form(env)
        acted, actions = action_form(env)
        super().__init__(env, math.prod(lead), observed, acted)
        self.observations, self.actions = observations, actions
        self.outcome = outcome_of(env)
        self.batched, self.lead = bool(lead), lead
        self._lead = lead
        specs = [env.full_action_spec[leaf.key] for leaf in actions]
        if any(type(spec).__name__ in _CHOICES for spec in specs):
            self.action_masks = self._action_masks
        self.state: Any = None
        """What the env must be given at its next step."""
        # The processes of TorchRL's ParallelEnv wait for it for ever, and the interpreter for them.
        _open.add(env)
        atexit.unregister(_close_open)
        atexit.register(_close_open)

    def bind(self, slab: Slab, *, bare: bool = False, eager: bool = False) -> BoundEnvs:
        return _BoundTorchRL(self, slab)

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the env with the first seed: TorchRL derives those of the others itself."""
        with torch.random.fork_rng(devices=[]):  # some TorchRL envs seed torch itself
            alike = len(seeds) > 1 and len(set(seeds)) == 1
            self.env.set_seed(int(seeds[0]) % 2**31, static_seed=alike)

    def restart(self, masks: dict[Key, torch.Tensor] | None) -> Any:
        """Start new episodes and return the state that the env is in.

        Args:
            masks: What is reset, by the key of each `done`; None for all.
        """
        if masks is None:
            self.state = self.env.reset()
            return self.state
        request = self.state.copy()
        for key, mask in masks.items():
            request.set((*key[:-1], "_reset"), mask.reshape((*self._lead, *mask.shape[1:])))
        # Only what is to be reset: an env that finds its state would go on from there.
        self.state = self.env.reset(request, select_reset_only=True)
        return self.state

    def advance(self, actions: Sequence[torch.Tensor]) -> Any:
        """Step the env and return what followed.

        Args:
            actions: A row `[N, *shape]` of each leaf of the action, which the env may keep.
        """
        request = self.state.copy()
        for leaf, action in zip(self.actions, actions, strict=True):
            request.set(leaf.key, action.reshape((*self._lead, *leaf.shape)).to(self.device))
        if self.batched and len(self.live) < self.num_envs:
            request.set("_step", self.mask(self.live).reshape(self._lead))
        next_state = self.env.step(request)["next"]
        self.state = self.env.step_mdp(request)
        return next_state

    def _action_masks(self) -> list[np.ndarray | None]:
        """Return what the action specs allow just now."""
        specs = self.env.full_action_spec
        return [_mask_of(specs[leaf.key], self.num_envs) for leaf in self.actions]


def _mask_of(spec: Any, envs: int) -> np.ndarray | None:
    """Return the mask of a spec as `[N, all choices]`."""
    mask = getattr(spec, "mask", None)
    if mask is None:
        return None
    choices = mask.shape[-1]  # of each number, or of all together where they differ
    one_number = type(spec).__name__ == "Categorical"
    shape = (*spec.shape, choices) if one_number else (*spec.shape[:-1], choices)
    return mask.expand(shape).reshape(envs, -1).cpu().numpy().astype(bool)


class _BoundTorchRL:
    """A TorchRL env that writes into one slab."""

    eager = False

    def __init__(self, group: TorchRLGroup, slab: Slab) -> None:
        self._group, self._slab = group, slab
        lead = (group.num_envs,)
        self._actions = [slab.rows(leaf.key, lead) for leaf in group.actions]
        self._seen = [(leaf.key, slab.rows(leaf.key, lead)) for leaf in group.observations]
        outcome = group.outcome
        given = (*outcome.rewards, *outcome.others)
        self._given = [(f.key[1:], slab.rows(f.key, lead)) for f in given]
        self._flags = [(key, slab.rows(key, lead)) for key in outcome.carried]
        self._at_root = outcome.at_root
        self._terminated = slab.arrays[keys.NEXT_TERMINATED][:, :, 0]
        self._truncated = slab.arrays[keys.NEXT_TRUNCATED][:, :, 0]

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        group = self._group
        whole = which is None or not (group.batched or self._is_partial(t))
        try:
            state = group.restart(None if whole else self._masks(t, which or ()))
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        group.thaw(which)
        self._write(t, state, None if whole else which)

    def _is_partial(self, t: int) -> bool:
        """Tell whether only parts of a lone env have ended, whose reset is its own business."""
        if self._at_root or not t:
            return False
        flags = self._group.outcome.flags
        return not all(bool(self._slab.arrays[following(f.done)][t - 1].all()) for f in flags)

    def _masks(self, t: int, which: Sequence[int]) -> dict[Key, torch.Tensor]:
        """Return what is to be reset of these envs: the parts that ended; all, if they did."""
        group = self._group
        some = group.mask(which)
        masks = {keys.DONE: some[:, None]} if self._at_root else {}
        for flags in group.outcome.flags:
            mask = some.reshape(-1, *[1] * len(flags.shape)).expand(-1, *flags.shape)
            if t and not self._at_root:
                ended = self._slab.tensors[following(flags.done)][t - 1]
                mask = mask & ended.to(mask.device)
            masks[flags.done] = mask
        return masks

    def step(self, t: int) -> Sequence[int]:
        group = self._group
        if not len(group.live):  # all have ended, and envs in other groups go on
            return ()
        try:
            after = group.advance([rows[t].clone() for rows in self._actions])
            live = group.live if len(group.live) < group.num_envs else None
            self._write(t + 1, after, live)
            for key, rows in self._given:
                _copy(rows[t], after.get(key, None), key, live, group.num_envs)
            return self._end(t, after, live)
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(None, "step()") from error

    def _end(self, t: int, after: Any, live: np.ndarray | None) -> Sequence[int]:
        """Write the flags at the root and return the envs that ended."""
        done, terminated, truncated = self._ends(after)
        ended = done | terminated | truncated
        if live is not None:
            ended &= self._group.mask(live).cpu()
        if not bool(ended.any()):
            return ()
        self._terminated[t], self._truncated[t] = (terminated & ended), (truncated & ended)
        found: list[int] = ended.nonzero()[:, 0].tolist()
        return found

    def _ends(self, after: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return done, terminated and truncated of each env.

        They are those at the root; where there are none, an env ends with any of its parts.
        """
        if self._at_root:
            done = self._flag(after, keys.DONE, None)
            terminated = self._flag(after, keys.TERMINATED, done)
            return done, terminated, self._flag(after, keys.TRUNCATED, done & ~terminated)
        flags = torch.zeros(3, self._group.num_envs, dtype=torch.bool)
        for group in self._group.outcome.flags:
            for row, key in zip(flags, group.keys, strict=True):
                row |= self._flag(after, key, flags[0] & False)
        done, terminated, truncated = flags
        return done, terminated, truncated | (done & ~terminated)

    def _flag(self, after: Any, key: Key, default: torch.Tensor | None) -> torch.Tensor:
        """Return whether a flag is set in each env, in any of its parts."""
        value = after.get(key, None)
        if value is None and default is not None:
            return default
        return (value != 0).reshape(self._group.num_envs, -1).any(1).cpu()

    def _write(self, t: int, state: Any, which: Sequence[int] | np.ndarray | None) -> None:
        """Write row t of these envs (None: of all)."""
        for key, rows in self._seen:
            _copy(rows[t], state.get(key, None), key, which, self._group.num_envs)
        for key, rows in self._flags:
            value = state.get(key, None)
            value = torch.zeros_like(rows[t]) if value is None else value != 0
            _copy(rows[t], value, key, which, self._group.num_envs)


def _copy(
    row: torch.Tensor, value: Any, key: Key, which: Sequence[int] | np.ndarray | None, envs: int
) -> None:
    """Copy what an env gave into a row `[N, *shape]`, of these envs; say where it is amiss."""
    if not isinstance(value, torch.Tensor):
        text = f"the env returned no tensor for {key_name(key)}, which is in its specs"
        raise CallFailed(None, "step()", text)
    given = value.detach()
    if given.numel() == row.numel() and given.shape[given.ndim - row.ndim + 1 :] == row.shape[1:]:
        given = given.reshape(row.shape)
    if given.shape != row.shape or not torch.can_cast(given.dtype, row.dtype):
        raise CallFailed(
            None,
            "step()",
            f"{key_name(key)} has shape {tuple(given.shape)} and dtype {given.dtype}, but the "
            f"env's spec declares {tuple(row.shape)} and {row.dtype}. Fix the env or its spec",
        )
    if which is None:
        row.copy_(given)
    else:
        row[which] = given[which].to(row.device, row.dtype)
