"""Gymnasium vector envs, in every auto-reset mode; EnvPool's and ale_py's are such.

A vector env resets an ended env by itself: in the same step, in the next step, or not at all. What
the loop sees is always the same: row t + 1 holds the true last observation until `reset` is called.

| mode | what we do |
|---|---|
| same step | the last observation is taken from the infos, the new one is kept for `reset` |
| disabled | `reset` resets the ended envs through `options={"reset_mask": ...}` |
| next step | the same where the env takes a reset_mask (Gymnasium's own, EnvPool, ale_py); \
elsewhere the row in which an env resets is no transition, and is masked |
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation

from swath.envs.gymnasium import as_declared
from swath.envs.info import InfoKeys, InfoNames
from swath.envs.pickling import pickled
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import CallFailed, keys
from swath.tree import action_leaves, builder, observation_leaves

__all__ = ["VectorGroup"]

_NONE = np.zeros(0, np.int64)


class VectorGroup:
    """The envs of one vector env; see `swath.rollout.env.EnvGroup`."""

    batched = True
    freezes = False
    time_limits = None

    def __init__(self, env: Any, info_keys: InfoNames = ()) -> None:
        self.env = env
        self.num_envs = int(env.num_envs)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.observations = observation_leaves(self.observation_space)
        self.actions = action_leaves(self.action_space)
        self.mode = _autoreset_mode(env)
        self.envpool = _comes_from(env.unwrapped, "envpool")
        self.resets_singly = _takes_reset_mask(env, self.mode)
        self.skips_rows = self.mode is AutoresetMode.NEXT_STEP and not self.resets_singly
        self.resetting = np.zeros(self.num_envs, bool)
        """Envs whose next step is a reset."""
        self._seeds: list[int] | None = None
        self._first: tuple[Any, dict[str, Any]] | None = None
        _refuse_parts(env.unwrapped, self.num_envs)
        self.info = InfoKeys(info_keys)
        if self.info:
            self._first = self._reset_all()
            self.info.settle_vector(self._first[1])

    @property
    def info_fields(self) -> list[Any]:
        """See `EnvGroup`."""
        return self.info.fields

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`; EnvPool takes its seed only where it is made."""
        if self.envpool:
            warnings.warn(
                "EnvPool's envs are seeded when they are made, so this seed does not reach them "
                "(only policy and random actions). Pass it to envpool.make(..., seed=...) as well.",
                stacklevel=2,
            )
        else:
            self._seeds, self._first = [int(seed) for seed in seeds], None

    def freeze(self, which: Sequence[int]) -> None:
        """See `EnvGroup`; collectors refuse what would need it, as a vector env steps all."""
        raise NotImplementedError

    def bind(self, slab: Slab, *, bare: bool = False) -> _BoundVector:
        """See `EnvGroup`."""
        return _BoundVector(self, slab)

    def first(self) -> Any:
        """Start new episodes everywhere and return the observations."""
        made, self._first = self._first, None
        self.resetting[:] = False
        return (made or self._reset_all())[0]

    def _reset_all(self) -> tuple[Any, dict[str, Any]]:
        seeds, self._seeds = self._seeds, None
        if seeds is None:
            return self._reset()
        inner = self.env.unwrapped
        if _comes_from(inner, "ale_py"):
            return self._reset(seed=np.array(seeds) % 2**31)  # an array of what int32 can hold
        try:
            return self._reset(seed=seeds)
        except CallFailed as failure:
            wrong = isinstance(failure.__cause__, (TypeError, ValueError, gym.error.Error))
            if isinstance(inner, (SyncVectorEnv, AsyncVectorEnv)) or not wrong:
                raise
        return self._reset(seed=seeds[0])  # all that gymnasium asks a vector env to take

    def reset_some(self, which: np.ndarray) -> Any:
        """Reset these envs and return the observations of all, or of them alone (EnvPool)."""
        mask = np.zeros(self.num_envs, bool)
        mask[which] = True
        return self._reset(options=_ResetMask(reset_mask=mask))[0]

    def _reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        try:
            observation, infos = self.env.reset(**kwargs)
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        return observation, infos

    def snapshot(self) -> bytes | None:
        """See `EnvGroup`."""
        return pickled((self.env, self.resetting, self._seeds, self._first))

    def restore(self, snapshot: bytes) -> None:
        """See `EnvGroup`."""
        state = pickle.loads(snapshot)
        self.close()
        self.env, self.resetting, self._seeds, self._first = state

    def close(self) -> None:
        """See `EnvGroup`; an `AsyncVectorEnv` that lost a worker is ended by force."""
        inner = self.env.unwrapped
        try:
            self.env.close()
        except (EOFError, OSError):
            for process in getattr(inner, "processes", ()):
                process.terminate()
                process.join()
            inner.closed = True  # or it would try again when it is collected


class _ResetMask(dict[str, Any]):
    """Reset options whose mask is still there after a `pop`.

    A gymnasium vector env pops the mask from the options before `RecordEpisodeStatistics` around it
    looks for it, which would then forget the statistics of all envs. Workers of an `AsyncVectorEnv`
    get plain empty options, so that they need not import this module.
    """

    def pop(self, key: str, *default: Any) -> Any:
        return self.get(key, *default)

    def __reduce__(self) -> Any:
        return dict, ()


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
        self._info = group.info.bind_vector(slab) if group.info else None
        self._after_reset: dict[int, list[np.ndarray]] = {}

    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        if which is None:
            self._after_reset.clear()
            self._write(t, self._group.first())
        elif not self._group.skips_rows:
            kept = [i for i in which if i in self._after_reset]
            for i in kept:
                for (_, array), row in zip(self._obs, self._after_reset.pop(i), strict=True):
                    array[t, i] = row
            others = [i for i in which if i not in kept]
            if others:
                self._reset_some(t, np.sort(others))

    def _reset_some(self, t: int, which: np.ndarray) -> None:
        observation = self._group.reset_some(which)
        for leaf, array in self._obs:
            if self._group.envpool:
                array[t, which] = as_declared(observation, leaf, (len(which), *leaf.shape))
            else:
                array[t, which] = as_declared(observation, leaf, array.shape[1:])[which]

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        group = self._group
        try:
            observation, reward, terminated, truncated, infos = group.env.step(self._action(t))
            self._reward[t] = reward
            self._terminated[t] = terminated
            self._truncated[t] = truncated
        except Exception as error:
            raise CallFailed(None, "step()") from error
        self._write(t + 1, observation)
        done = self._terminated[t] | self._truncated[t]
        if group.skips_rows:
            assert self._mask is not None
            self._mask[t] = ~group.resetting
            group.resetting[...] = done
        ended = np.flatnonzero(done) if done.any() else _NONE
        same_step = len(ended) and group.mode is AutoresetMode.SAME_STEP
        if same_step:
            self._take_final(t, ended, infos)
        if self._info is not None:
            self._info(infos, t, np.arange(group.num_envs))
            if same_step:  # the infos of these envs are those of the reset
                self._info(infos.get("final_info", {}), t, ended)
        return ended.tolist()

    def _take_final(self, t: int, ended: np.ndarray, infos: Mapping[str, Any]) -> None:
        """Swap the last observations into row t + 1 and keep the new ones for `reset`."""
        finals = infos.get("final_obs")
        if finals is None:
            raise CallFailed(
                None, "step()", "the vector env resets in the same step but gives no 'final_obs'"
            )
        for i in ended.tolist():
            self._after_reset[i] = [array[t + 1, i].copy() for _, array in self._obs]
            for leaf, array in self._obs:
                array[t + 1, i] = as_declared(finals[i], leaf, leaf.shape, i)

    def _write(self, t: int, observation: Any) -> None:
        for leaf, array in self._obs:
            array[t] = as_declared(observation, leaf, array.shape[1:])


def _batched_action(group: VectorGroup, slab: Slab) -> Callable[[int], Any]:
    """Return a function that gives the batched action of step t, a copy that envs may keep."""
    arrays = [slab.arrays[leaf.key] for leaf in group.actions]
    build = builder(group.action_space, group.actions)
    return lambda t: build([array[t].copy() for array in arrays])


def _autoreset_mode(env: Any) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise UsageError(
            f"{type(env).__name__}.metadata has no 'autoreset_mode', so it is not known when it "
            "resets. Set it to a gymnasium.vector.AutoresetMode."
        )
    return AutoresetMode(mode)


def _takes_reset_mask(env: Any, mode: AutoresetMode) -> bool:
    """Tell whether envs can be reset one by one, through all wrappers."""
    inner, wrapper = env.unwrapped, env
    while wrapper is not inner:
        if isinstance(wrapper, NormalizeObservation):  # alone of gymnasium's wrappers it refuses
            return False
        wrapper = wrapper.env
    return (
        mode is AutoresetMode.DISABLED
        or isinstance(inner, (SyncVectorEnv, AsyncVectorEnv))
        or _comes_from(inner, "envpool")
        or _comes_from(inner, "ale_py")
    )


def _comes_from(env: Any, package: str) -> bool:
    return any(t.__module__.split(".")[0] == package for t in type(env).__mro__)


def _refuse_parts(env: Any, num_envs: int) -> None:
    """Refuse envs of EnvPool or ale_py that give only some of the envs at each step."""
    size = num_envs
    if _comes_from(env, "envpool"):
        size = env.config["batch_size"] or num_envs
    elif _comes_from(env, "ale_py"):
        size = env.batch_size
    if size != num_envs:
        raise UsageError(
            f"the vector env steps {size} of its {num_envs} envs at a time; all at once are "
            "expected. Leave its batch_size out, or make it equal to num_envs."
        )
