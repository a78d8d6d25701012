"""Gymnasium vector envs, in every auto-reset mode; EnvPool's and ale_py's are such.

| mode | what we do |
|---|---|
| same step | the last observation is taken from the infos, the new one is kept for `reset` |
| disabled | `reset` resets the ended envs through `options={"reset_mask": ...}` |
| next step | the same where the env takes a reset_mask (Gymnasium's own, EnvPool, ale_py); \
elsewhere the row in which an env resets is no transition, and is masked |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation

from swath.envs.batch import BatchGroup
from swath.envs.group import as_array, comes_from, not_a
from swath.envs.info import InfoNames, first_present, info_fields, with_nested
from swath.errors import UsageError
from swath.rollout import CallFailed

__all__ = ["VectorGroup"]


def _spaces_of_one(env: Any) -> tuple[Any, Any]:
    """Return the spaces of one of the envs; refuse vector envs of another kind by name."""
    try:
        return env.single_observation_space, env.single_action_space
    except AttributeError as error:
        raise UsageError(
            f"{type(env).__name__} is a VectorEnv without single_observation_space and "
            "single_action_space, which Gymnasium's vector envs have; SuperSuit's are made for "
            "Stable-Baselines3. Pass a list of envs, or of functions that make them; PettingZoo "
            "envs are taken as torchrl.envs.PettingZooWrapper(env)."
        ) from error


class VectorGroup(BatchGroup):
    """The envs of one vector env; see `swath.rollout.env.EnvGroup`."""

    freezes = False
    kept = ("env", "resetting", "_seeds", "_first")

    def __init__(self, env: Any, info_keys: InfoNames = ()) -> None:
        spaces = _spaces_of_one(env)
        super().__init__(env, int(env.num_envs), *spaces)
        self.mode = _autoreset_mode(env)
        self._dtypes: tuple[Any, ...] = ()
        """Of the last outcome that was looked at; see `_check`."""
        self.gives_some = comes_from(env.unwrapped, "envpool")
        self.resets_singly = _takes_reset_mask(env, self.mode)
        self.skips_rows = self.mode is AutoresetMode.NEXT_STEP and not self.resets_singly
        self._seeds: list[int] | None = None
        self._first: tuple[Any, dict[str, Any]] | None = None
        _refuse_parts(env.unwrapped, self.num_envs)
        self.info_fields = info_fields(
            info_keys, lambda: first_present(self._first_infos(), info_keys)
        )
        first = with_nested(self._first[1], info_keys) if self._first else ()
        self.unseen = set(info_keys) - set(first)

    def _first_infos(self) -> Mapping[str, Any]:
        """Return what only infos can tell, from a reset that counts as the first one."""
        try:
            self._first = self._reset_all()
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        return self._first[1]

    def seed(self, seeds: Sequence[int]) -> None:
        """See `EnvGroup`; EnvPool takes its seed only where it is made."""
        if comes_from(self.env.unwrapped, "envpool"):
            warnings.warn(
                "EnvPool's envs are seeded when they are made, so this seed only applies to "
                "the policy and to random actions. Pass it to envpool.make(..., seed=...) as "
                "well.",
                stacklevel=2,
            )
        else:
            self._seeds, self._first = [int(seed) for seed in seeds], None

    def step_envs(self, actions: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, terminated, truncated, infos = self.env.step(
            self.build_action(actions)
        )
        outcome = reward, terminated, truncated
        try:  # what has a dtype of numbers has no None in it
            known = (reward.dtype, terminated.dtype, truncated.dtype) == self._dtypes
        except AttributeError:
            known = False
        if not known:
            self._check(outcome)
        return observation, reward, terminated, truncated, infos

    def _check(self, outcome: tuple[Any, Any, Any]) -> None:
        """Look at what a step gave, and take note of its dtypes."""
        for name, value in zip(_OUTCOME, outcome, strict=True):
            _check_outcome(name, value)
        self._dtypes = tuple(getattr(value, "dtype", None) for value in outcome)

    def reset_envs(self, which: Sequence[int] | None) -> Any:
        if which is None:
            made, self._first = self._first, None
            self.resetting[:] = False
            return (made or self._reset_all())[0]
        mask = np.zeros(self.num_envs, bool)
        mask[which] = True
        return self.env.reset(options=_ResetMask(reset_mask=mask))[0]

    def _reset_all(self) -> tuple[Any, dict[str, Any]]:
        answer = self._reset_with(self._seeds)
        self._seeds = None  # only now: a reset that is broken off has not used them
        return answer

    def _reset_with(self, seeds: list[int] | None) -> tuple[Any, dict[str, Any]]:
        if seeds is None:
            return self.env.reset()
        inner = self.env.unwrapped
        if comes_from(inner, "ale_py"):
            return self.env.reset(seed=np.array(seeds) % 2**31)  # an array of what int32 can hold
        try:
            return self.env.reset(seed=seeds)
        except (TypeError, ValueError, gym.error.Error):
            if isinstance(inner, (SyncVectorEnv, AsyncVectorEnv)):
                raise
        return self.env.reset(seed=seeds[0])  # all that gymnasium asks a vector env to take

    def close(self, timeout: float | None = None) -> None:
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


_OUTCOME = ("reward", "terminated", "truncated")


def _check_outcome(name: str, value: Any) -> None:
    """Refuse what numpy would make NaN or False of: None and objects."""
    if as_array(value).dtype.kind not in "fbiu":
        raise not_a("number" if name == "reward" else "bool", name, value, None)


def _autoreset_mode(env: Any) -> AutoresetMode:
    inner, mode = getattr(env, "unwrapped", env), env.metadata.get("autoreset_mode")
    # Up to Gymnasium 1.3 vector envs share their metadata, which have the mode of the one that was
    # made last. A wrapper that resets in its own way has metadata of its own.
    if env.metadata is inner.metadata:
        mode = getattr(inner, "autoreset_mode", mode)
    if mode is None:
        raise UsageError(
            f"{type(env).__name__}.metadata has no 'autoreset_mode', so swath cannot know when "
            "it resets. Set it to a gymnasium.vector.AutoresetMode."
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
        or comes_from(inner, "envpool")
        or comes_from(inner, "ale_py")
    )


def _refuse_parts(env: Any, num_envs: int) -> None:
    """Refuse envs of EnvPool or ale_py that give only some of the envs at each step."""
    size = num_envs
    if comes_from(env, "envpool"):
        size = env.config["batch_size"] or num_envs
    elif comes_from(env, "ale_py"):
        size = env.batch_size
    if size != num_envs:
        raise UsageError(
            f"the vector env steps {size} of its {num_envs} envs at a time; all at once are "
            "expected. Leave its batch_size out, or make it equal to num_envs."
        )
