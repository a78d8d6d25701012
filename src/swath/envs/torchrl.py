"""TorchRL envs, single or batched, with their transforms. TorchRL itself is never imported."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tensordict import TensorDict

from swath.envs.gymnasium import pickled
from swath.envs.tensors import BoundTensors, TensorGroup
from swath.errors import UsageError
from swath.memory import Slab
from swath.rollout import CallFailed
from swath.tree import Key, action_leaves, nest, observation_leaves

__all__ = ["OneHot", "TorchRLGroup", "is_torchrl_env"]


def is_torchrl_env(env: Any) -> bool:
    """Tell a TorchRL env without importing TorchRL."""
    return any(
        t.__name__ == "EnvBase" and t.__module__.startswith("torchrl.") for t in type(env).__mro__
    )


class OneHot(gym.Space[Any]):
    """A one-hot vector, as TorchRL encodes discrete actions by default."""

    def __init__(self, n: int, dtype: Any) -> None:
        super().__init__((n,), dtype)

    def sample(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return a random one-hot vector."""
        vector = np.zeros(self.shape or (), self.dtype)
        vector[self.np_random.integers(len(vector))] = 1
        return vector

    def contains(self, x: Any) -> bool:
        """Tell whether x is one-hot."""
        return np.shape(x) == self.shape and np.sum(x) == 1

    @property
    def is_np_flattenable(self) -> bool:
        """It is an array."""
        return True


def _space_of(spec: Any, batch_dims: int) -> gym.Space[Any]:
    """Return the gymnasium space of one env with the form of a TorchRL spec."""
    shape, dtype = tuple(spec.shape[batch_dims:]), np.dtype(str(spec.dtype).removeprefix("torch."))
    kind = type(spec).__name__
    if kind == "Categorical" and shape == ():
        return spaces.Discrete(int(spec.space.n))
    if kind == "OneHot":
        return OneHot(shape[-1], dtype)
    if kind in ("Binary", "MultiOneHot") or dtype.kind == "b":
        return _box(0, 1, shape, dtype)
    inner = getattr(spec, "space", None)
    low, high = getattr(inner, "low", None), getattr(inner, "high", None)
    if dtype.kind != "f":
        return _box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
    if low is None or high is None:
        return _box(-np.inf, np.inf, shape, dtype)
    one = (0,) * batch_dims
    return _box(low[one].numpy(), high[one].numpy(), shape, dtype)


def _box(low: Any, high: Any, shape: tuple[int, ...], dtype: Any) -> gym.Space[Any]:
    return spaces.Box(low, high, shape, dtype.type)


def _composite(spec: Any, batch_dims: int) -> spaces.Dict:
    """Return a Dict space of the leaves of a TorchRL composite spec."""
    flat: dict[Key, Any] = {}
    for key in spec.keys(True, True):
        name = (key,) if isinstance(key, str) else tuple(key)
        flat[name] = _space_of(spec[key], batch_dims)
    return _as_dict_space(nest(flat))


def _as_dict_space(tree: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict(
        {k: _as_dict_space(v) if isinstance(v, dict) else v for k, v in tree.items()}
    )


class TorchRLGroup(TensorGroup):
    """A TorchRL `EnvBase`, single or batched, transforms included; see `EnvGroup`."""

    def __init__(self, env: Any) -> None:
        self.env = env
        dims = len(env.batch_size)
        if dims > 1:
            raise UsageError(
                f"the TorchRL env has batch size {tuple(env.batch_size)}; at most one dimension "
                "is supported."
            )
        self.batched = dims == 1
        self.num_envs = int(env.batch_size[0]) if self.batched else 1
        self.observation_space: gym.Space[Any] = _composite(env.observation_spec, dims)
        action_keys = [(k,) if isinstance(k, str) else tuple(k) for k in env.action_keys]
        if action_keys == [("action",)]:
            self.action_space: gym.Space[Any] = _space_of(env.action_spec, dims)
        elif all(key[0] == "action" for key in action_keys):
            self.action_space = _composite(env.full_action_spec["action"], dims)
        else:
            raise UsageError(
                f"the TorchRL env has the action keys {env.action_keys}; all must be at or below "
                "'action'. Rename them with a RenameTransform."
            )
        self.observations = observation_leaves(self.observation_space)
        self.actions = action_leaves(self.action_space)
        self.state: Any = None
        super().__init__()

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the env with the first seed: TorchRL derives those of the others itself."""
        self.env.set_seed(int(seeds[0]) % 2**31)

    def bind(self, slab: Slab) -> _BoundTorchRL:
        """See `EnvGroup`."""
        return _BoundTorchRL(self, slab)

    def snapshot(self) -> bytes | None:
        """See `EnvGroup`."""
        return pickled((self.env, self.frozen, self.state))

    def restore(self, snapshot: bytes) -> None:
        """See `EnvGroup`."""
        self.env, self.frozen, self.state = pickle.loads(snapshot)

    def close(self) -> None:
        """See `EnvGroup`."""
        if not self.env.is_closed:
            self.env.close()


class _BoundTorchRL(BoundTensors):
    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        group = self._group
        mask = group.mask(which)
        group.frozen &= ~mask
        try:
            if which is None:
                group.state = group.env.reset()
            else:
                request = group.state.copy() if group.batched else TensorDict({}, [])
                request.set("_reset", mask[:, None] if group.batched else mask)
                group.state = group.env.reset(request)
        except Exception as error:
            raise CallFailed(None, "reset()") from error
        self._write(t, self._batch(group.state), None if which is None else mask)

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        group = self._group
        try:
            request = group.state.copy()
            for leaf, tensor in zip(group.actions, self._actions, strict=True):
                action = tensor[t].clone()
                request.set(leaf.key, action if group.batched else action[0])
            following = group.env.step(request)["next"]
            group.state = group.env.step_mdp(request)
        except Exception as error:
            raise CallFailed(None, "step()") from error
        outcome = self._batch(following)
        frozen = group.frozen
        self._write(t + 1, outcome, ~frozen if frozen.any() else None)
        done = outcome["done"]
        terminated = outcome.get("terminated", done)
        truncated = outcome.get("truncated", done & ~terminated)
        return self._outcome(t, outcome["reward"], terminated, truncated)

    def _batch(self, tensordict: Any) -> Any:
        return tensordict if self._group.batched else tensordict.unsqueeze(0)
