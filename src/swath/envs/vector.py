"""Gymnasium vector envs, in every auto-reset mode, EnvPool among them.

A vector env resets an ended env by itself: in the same step, in the next step, or not at all. What
the loop sees is always the same: row t + 1 holds the true last observation until `reset` is called.

| mode | what we do |
|---|---|
| same step | the last observation is taken from the infos, the new one is kept for `reset` |
| disabled | `reset` resets the ended envs through `options={"reset_mask": ...}` |
| next step | the same, where the env supports it (Gymnasium's own, EnvPool); elsewhere the row in \
which an env resets is no transition, and is masked |
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from swath.envs.gymnasium import pickled
from swath.envs.info import InfoKeys
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import CallFailed, keys
from swath.tree import Leaf, action_leaves, builder, fetch, key_name, observation_leaves

__all__ = ["VectorGroup"]


def _is_envpool(env: Any) -> bool:
    return hasattr(env, "send") and any("envpool" in t.__module__ for t in type(env).__mro__)


def _autoreset_mode(env: Any) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise UsageError(
            f"{type(env).__name__}.metadata has no 'autoreset_mode', so it is not known when it "
            "resets. Set it to a gymnasium.vector.AutoresetMode."
        )
    return AutoresetMode(mode)


class VectorGroup:
    """The envs of one vector env; see `swath.rollout.env.EnvGroup`."""

    batched = True
    freezes = False

    def __init__(
        self, env: Any, info_keys: Sequence[str] | Mapping[str, gym.Space[Any]] = ()
    ) -> None:
        self.env = env
        self.num_envs = int(env.num_envs)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.observations = observation_leaves(self.observation_space)
        self.actions = action_leaves(self.action_space)
        self.mode = _autoreset_mode(env)
        self.envpool = _is_envpool(env)
        inner = env.unwrapped
        self.resets_singly = (
            self.envpool
            or isinstance(inner, (SyncVectorEnv, AsyncVectorEnv))
            or self.mode is AutoresetMode.DISABLED
        )
        self.skips_rows = self.mode is AutoresetMode.NEXT_STEP and not self.resets_singly
        self.resetting = np.zeros(self.num_envs, bool)
        """Envs whose next step is a reset."""
        self._seeds: list[int] | None = None
        self._first: tuple[Any, dict[str, Any]] | None = None
        self.info = InfoKeys(info_keys)
        if self.info:
            self._first = self._reset_all()
            self.info.settle({k: v[0] for k, v in self._first[1].items() if k[0] != "_"})

    @property
    def info_fields(self) -> list[Any]:
        """See `EnvGroup`."""
        return self.info.fields

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`."""
        self._seeds, self._first = [int(seed) for seed in seeds], None

    def freeze(self, which: Sequence[int]) -> None:
        """See `EnvGroup`; refused at construction, a vector env steps all its envs."""
        raise NotImplementedError

    def bind(self, slab: Slab) -> _BoundVector:
        """See `EnvGroup`."""
        return _BoundVector(self, slab)

    def first(self) -> Any:
        """Start new episodes everywhere and return the observations."""
        made, self._first = self._first, None
        self.resetting[:] = False
        return (made if made is not None else self._reset_all())[0]

    def _reset_all(self) -> tuple[Any, dict[str, Any]]:
        seeds, self._seeds = self._seeds, None
        try:
            return self.env.reset() if seeds is None else self.env.reset(seed=seeds)
        except Exception as error:
            raise CallFailed(None, "reset()") from error

    def reset_some(self, which: np.ndarray) -> Any:
        """Reset these envs and return the observations of all, or of them alone (EnvPool)."""
        try:
            if self.envpool:
                return self.env.reset(which.astype(np.int32))[0]
            mask = np.zeros(self.num_envs, bool)
            mask[which] = True
            return self.env.reset(options={"reset_mask": mask})[0]
        except Exception as error:
            raise CallFailed(None, "reset()") from error

    def snapshot(self) -> bytes | None:
        """See `EnvGroup`."""
        return pickled((self.env, self.resetting, self._seeds, self._first))

    def restore(self, snapshot: bytes) -> None:
        """See `EnvGroup`."""
        self.env, self.resetting, self._seeds, self._first = pickle.loads(snapshot)

    def close(self) -> None:
        """See `EnvGroup`."""
        self.env.close()


class _BoundVector:
    """A `VectorGroup` that writes into one slab."""

    def __init__(self, group: VectorGroup, slab: Slab) -> None:
        self._group = group
        self._obs = [(leaf, slab.arrays[leaf.key]) for leaf in group.observations]
        self._reward = slab.arrays[keys.REWARD][:, :, 0]
        self._terminated = slab.arrays[keys.NEXT_TERMINATED][:, :, 0]
        self._truncated = slab.arrays[keys.NEXT_TRUNCATED][:, :, 0]
        self._mask = slab.arrays.get(keys.MASK)
        self._action = _batched_action(group, slab)
        self._info = [(f.key[-1], slab.arrays[f.key]) for f in group.info.fields]
        self._after_reset: dict[int, list[np.ndarray]] = {}

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        group = self._group
        if which is None:
            self._write(t, group.first())
        elif group.mode is AutoresetMode.SAME_STEP:
            self._reset_same_step(t, which)
        elif not group.skips_rows:
            self._reset_some(t, np.asarray(which))

    def _reset_same_step(self, t: int, which: Sequence[int]) -> None:
        by_hand = []
        for i in which:
            rows = self._after_reset.pop(i, None)
            if rows is None:
                by_hand.append(i)
            else:
                for (_, array), row in zip(self._obs, rows, strict=True):
                    array[t, i] = row
        if by_hand:
            self._reset_some(t, np.asarray(by_hand))

    def _reset_some(self, t: int, which: np.ndarray) -> None:
        observation = self._group.reset_some(which)
        for leaf, array in self._obs:
            value = np.asarray(fetch(observation, leaf.path))
            array[t, which] = value if self._group.envpool else value[which]

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        group = self._group
        try:
            answer = group.env.step(self._action(t))
        except Exception as error:
            raise CallFailed(None, "step()") from error
        observation, reward, terminated, truncated, infos = answer
        self._write(t + 1, observation)
        self._reward[t] = reward
        self._terminated[t] = terminated
        self._truncated[t] = truncated
        self._write_info(t, infos)
        done = np.logical_or(terminated, truncated)
        if group.skips_rows:
            assert self._mask is not None
            self._mask[t] = ~group.resetting
            done = done & ~group.resetting
            group.resetting[...] = done
        ended = np.flatnonzero(done).tolist() if done.any() else []
        if ended and group.mode is AutoresetMode.SAME_STEP:
            self._take_final(t, ended, infos)
        return ended

    def _take_final(self, t: int, ended: Sequence[int], infos: Mapping[str, Any]) -> None:
        """Swap the last observations into row t + 1 and keep the new ones for `reset`."""
        finals = infos.get("final_obs", infos.get("final_observation"))
        if finals is None:
            raise CallFailed(
                None, "step()", "the vector env resets in the same step but gives no 'final_obs'"
            )
        for i in ended:
            self._after_reset[i] = [array[t + 1, i].copy() for _, array in self._obs]
            for leaf, array in self._obs:
                array[t + 1, i] = fetch(finals[i], leaf.path)

    def _write(self, t: int, observation: Any) -> None:
        for leaf, array in self._obs:
            value = np.asarray(fetch(observation, leaf.path))
            if value.shape != array[t].shape or not np.can_cast(
                value.dtype, leaf.dtype, "same_kind"
            ):
                raise CallFailed(None, "step()", _left_its_form(leaf, value, array[t].shape))
            array[t] = value

    def _write_info(self, t: int, infos: Mapping[str, Any]) -> None:
        for name, array in self._info:
            missing = np.nan if array.dtype.kind == "f" else 0
            if name not in infos:
                array[t] = missing
                continue
            array[t] = infos[name]
            there = infos.get(f"_{name}")
            if there is not None:
                array[t, ~np.asarray(there, bool)] = missing


def _left_its_form(leaf: Leaf, value: np.ndarray, shape: tuple[int, ...]) -> str:
    return (
        f"the observation {key_name(leaf.key)} has shape {value.shape} and dtype {value.dtype}, "
        f"but the observation space declares {shape} and {leaf.dtype}"
    )


def _batched_action(group: VectorGroup, slab: Slab) -> Callable[[int], Any]:
    """Return a function that gives the batched action of step t, a copy that envs may keep."""
    arrays = [slab.arrays[leaf.key] for leaf in group.actions]
    build = builder(group.action_space, group.actions)
    return lambda t: build([array[t].copy() for array in arrays])
