"""JAX envs (gymnax style) as torch-native ones: arrays change hands by DLPack, without a copy.

JAX is imported when an env is made, and its functions are compiled for the batch. Such envs run on
any device that JAX and torch share; a rollout with them cannot be a CUDA graph, since JAX queues
its work on streams of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from swath.errors import UsageError

__all__ = ["JaxEnv"]


class JaxEnv:
    """N copies of a functional JAX env, as a `TorchEnv`.

    The env has `reset(key, params) -> (observation, state)` and `step(key, state, action, params)
    -> (observation, state, reward, done, info)`, both pure and for one env. Where it has the
    `reset_env` and `step_env` of gymnax, which do not reset by themselves, these are called: swath
    resets, so that the last observation of an episode is not lost. If there is an
    `info["truncation"]`, it distinguishes truncated episodes from terminated ones.

    Args:
        env: The env.
        num_envs: N.
        observation_space: Of one env.
        action_space: Of one env.
        params: Passed to the env's functions.
        device: Where JAX computes, as torch calls it.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        params: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        try:
            import jax
        except ImportError as error:
            raise UsageError("JaxEnv needs JAX; install it with: pip install jax") from error
        self.num_envs, self.device = num_envs, torch.device(device)
        self.observation_space, self.action_space = observation_space, action_space
        self._jax = jax
        reset = getattr(env, "reset_env", env.reset)
        step = getattr(env, "step_env", env.step)
        kind = "gpu" if self.device.type == "cuda" else "cpu"
        self._place = jax.devices(kind)[self.device.index or 0]
        self._reset = jax.jit(
            lambda keys, state, mask: _renewed(jax, reset, params, keys, state, mask)
        )
        self._step = jax.jit(
            lambda keys, state, action: _stepped(jax, step, params, keys, state, action)
        )
        self._first = jax.jit(jax.vmap(lambda key: reset(key, params)))
        self.seed(torch.randint(2**31, (num_envs,)))

    def seed(self, keys: Tensor) -> None:
        """Restart the random stream of every env at its key, int64 `[N]`."""
        numbers = keys.cpu().numpy() % 2**32
        with self._jax.default_device(self._place):
            make = self._jax.vmap(self._jax.random.key)
            self._keys = make(self._jax.numpy.asarray(numbers, self._jax.numpy.uint32))
            self._observation, self._state = self._first(self._keys)

    def reset(self, mask: Tensor | None = None) -> Any:
        """Start an episode in the envs of `mask`, bool `[N]` (None: all); observe all N."""
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        before = self._observation, self._state
        self._keys, self._observation, self._state = self._reset(
            self._keys, before, self._to_jax(mask)
        )
        return self._to_torch(self._observation)

    def step(self, action: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Return observation, reward float32 `[N]`, terminated and truncated bool `[N]`."""
        answer = self._step(self._keys, self._state, self._to_jax(action))
        self._keys, self._observation, self._state, reward, done, info = answer
        # Kept until JAX has been given its next step, as the observation is: that step waits for
        # all that torch was to do before it. Without them JAX would write new values where torch,
        # which reads in its own time, has not read the old ones yet.
        self._lent = reward, done, info
        done = self._to_torch(done).to(torch.bool)
        cut = info.get("truncation") if isinstance(info, dict) else None
        truncated = torch.zeros_like(done) if cut is None else self._to_torch(cut).to(torch.bool)
        reward = self._to_torch(reward).to(torch.float32)
        return self._to_torch(self._observation), reward, done & ~truncated, truncated

    def _to_jax(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: self._to_jax(part) for name, part in tree.items()}
        # A copy: a tensor may be memory that is written again before JAX has read it, or begin
        # where JAX cannot read.
        tensor = tree.detach().to(self.device).clone(memory_format=torch.contiguous_format)
        return self._jax.dlpack.from_dlpack(tensor)

    def _to_torch(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: self._to_torch(part) for name, part in tree.items()}
        return from_dlpack(tree)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("compiled functions of JAX cannot be pickled")

    def __deepcopy__(self, memo: Any) -> JaxEnv:
        return copy.copy(self)  # its arrays never change


def _split(jax: Any, keys: Any) -> Any:
    return jax.vmap(lambda key: tuple(jax.random.split(key)))(keys)


def _stepped(jax: Any, step: Any, params: Any, keys: Any, state: Any, action: Any) -> Any:
    """Return the next keys, and what the envs' steps return."""
    following, keys = _split(jax, keys)
    return following, *jax.vmap(lambda k, s, a: step(k, s, a, params))(keys, state, action)


def _renewed(jax: Any, reset: Any, params: Any, keys: Any, before: Any, mask: Any) -> Any:
    """Return the next keys, and observations and states in which the envs of `mask` are reset."""
    following, keys = _split(jax, keys)
    fresh = jax.vmap(lambda key: reset(key, params))(keys)

    def chosen(new: Any, old: Any) -> Any:
        return jax.numpy.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return following, *jax.tree.map(chosen, fresh, before)
