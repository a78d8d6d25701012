"""TorchRL envs, single or batched, with their transforms. TorchRL itself is never imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.envs.tensors import BoundTensors, TensorGroup, calling
from swath.errors import UsageError
from swath.memory import Slab, numpy_dtype
from swath.tree import Key, key_name, nest

__all__ = ["OneHot", "TorchRLGroup", "is_torchrl_env"]


def is_torchrl_env(env: Any) -> bool:
    """Tell a TorchRL env without importing TorchRL."""
    return any(
        t.__name__ == "EnvBase" and t.__module__.startswith("torchrl.") for t in type(env).__mro__
    )


class OneHot(gym.Space[Any]):
    """One or several one-hot vectors end to end, as TorchRL encodes discrete actions.

    Examples:
        >>> OneHot([2, 3], np.dtype("int64")).contains(np.array([0, 1, 1, 0, 0]))
        True
    """

    def __init__(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        super().__init__((sum(sizes),), dtype.type)
        self.sizes = list(sizes)

    def sample(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return a random one."""
        return np.concatenate(
            [np.eye(n, dtype=self.dtype)[self.np_random.integers(n)] for n in self.sizes]
        )

    def contains(self, x: Any) -> bool:
        """Tell whether each part of x is one-hot."""
        if np.shape(x) != self.shape:
            return False
        parts = np.split(np.asarray(x), np.cumsum(self.sizes)[:-1])
        return all((part != 0).sum() == 1 and part.sum() == 1 for part in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneHot) and self.sizes == other.sizes

    def __repr__(self) -> str:
        return f"OneHot({self.sizes})"

    @property
    def is_np_flattenable(self) -> bool:
        """It is an array."""
        return True


def _space_of(spec: Any, key: Key, batch_dims: int) -> gym.Space[Any]:
    """Return the gymnasium space of one env with the form of a TorchRL spec."""
    if spec.dtype is None or spec.shape is None:
        raise UsageError(
            f"the TorchRL env has a {type(spec).__name__} at {key_name(key)}, which is no tensor. "
            "Leave it out with an ExcludeTransform."
        )
    shape, dtype = tuple(spec.shape[batch_dims:]), numpy_dtype(spec.dtype)
    scalar: Any = dtype.type
    kind, inner = type(spec).__name__, getattr(spec, "space", None)
    if kind == "Categorical":
        n = int(inner.n)  # type: ignore[union-attr]
        return spaces.Discrete(n) if shape == () else spaces.MultiDiscrete(np.full(shape, n))
    if kind == "MultiCategorical":
        nvec = spec.nvec.reshape(-1, *shape)[0] if batch_dims else spec.nvec
        return spaces.MultiDiscrete(nvec.numpy())
    if kind == "OneHot":
        return OneHot([shape[-1]], dtype)
    if kind == "MultiOneHot":
        return OneHot([int(box.n) for box in inner], dtype)  # type: ignore[union-attr]
    if kind == "Binary" or dtype.kind == "b":
        return spaces.Box(0, 1, shape, scalar)
    low, high = getattr(inner, "low", None), getattr(inner, "high", None)
    if low is not None and high is not None:
        one = (0,) * batch_dims
        return spaces.Box(low[one].numpy(), high[one].numpy(), shape, scalar)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, scalar)
    return spaces.Box(np.iinfo(scalar).min, np.iinfo(scalar).max, shape, scalar)


def _composite(spec: Any, batch_dims: int) -> spaces.Dict:
    """Return the Dict space of a TorchRL composite spec."""
    flat: dict[Key, Any] = {}
    for key in spec.keys(True, True):
        name = (key,) if isinstance(key, str) else tuple(key)
        flat[name] = _space_of(spec[key], name, batch_dims)
    return _as_dict_space(nest(flat))


def _as_dict_space(tree: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict(
        {k: _as_dict_space(v) if isinstance(v, dict) else v for k, v in tree.items()}
    )


def _action_space(env: Any, batch_dims: int) -> gym.Space[Any]:
    names = [(k,) if isinstance(k, str) else tuple(k) for k in env.action_keys]
    if names == [("action",)]:
        return _space_of(env.action_spec, ("action",), batch_dims)
    if all(name[0] == "action" for name in names):
        return _composite(env.full_action_spec["action"], batch_dims)
    raise UsageError(
        f"the TorchRL env has the action keys {env.action_keys}; all must be at or below 'action'. "
        "Rename them with a RenameTransform."
    )


class TorchRLGroup(TensorGroup):
    """A TorchRL `EnvBase`, single or batched, transforms included; see `EnvGroup`."""

    def __init__(self, env: Any) -> None:
        dims = len(env.batch_size)
        if dims > 1:
            raise UsageError(
                f"the TorchRL env has batch size {tuple(env.batch_size)}; at most one dimension "
                "is supported."
            )
        if list(env.reward_keys) != ["reward"]:
            raise UsageError(
                f"the TorchRL env has the reward keys {env.reward_keys}; 'reward' alone is "
                "supported. Rename it with a RenameTransform."
            )
        self.batched = dims == 1
        self.num_envs = int(env.batch_size[0]) if self.batched else 1
        observations: Any = _composite(env.observation_spec, dims)
        if list(observations) == ["observation"]:  # policies see the tensor, as of gymnasium's envs
            observations = observations["observation"]
        super().__init__(env, observations, _action_space(env, dims))

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the env with the first seed: TorchRL derives those of the others itself."""
        with torch.random.fork_rng(devices=[]):  # some TorchRL envs seed torch itself
            self.env.set_seed(int(seeds[0]) % 2**31)

    def bind(self, slab: Slab, *, bare: bool = False) -> _BoundTorchRL:
        """See `EnvGroup`."""
        return _BoundTorchRL(self, slab)


class _BoundTorchRL(BoundTensors):
    def reset(self, t: int, which: Sequence[int] | None) -> None:
        """See `BoundEnvs`."""
        group, mask = self._group, self._group.thaw(which)
        with calling("reset()"):
            if which is None or not group.batched:
                group.state = group.env.reset()
            else:
                group.state = group.env.reset(group.state.copy().set("_reset", mask[:, None]))
            self._write(t, self._seen(group.state), None if which is None else mask)

    def step(self, t: int) -> Sequence[int]:
        """See `BoundEnvs`."""
        group, frozen = self._group, self._group.frozen
        only = ~frozen if frozen.any() else None
        with calling("step()"):
            request = group.state.copy()
            for leaf, tensor in zip(group.actions, self._actions, strict=True):
                action = tensor[t].clone()
                request.set(leaf.key, action if group.batched else action[0])
            if only is not None and group.batched:
                request.set("_step", only)
            following = group.env.step(request)["next"]
            group.state = group.env.step_mdp(request)
            self._write(t + 1, self._seen(following), only)
            done = following["done"]
            terminated = following.get("terminated", done)
            truncated = following.get("truncated", done & ~terminated)
            return self._outcome(t, following["reward"], terminated, truncated)

    def _seen(self, tensordict: Any) -> Any:
        """Return the observations `[N, ...]` in the form of the observation space."""
        batch = tensordict if self._group.batched else tensordict.unsqueeze(0)
        alone = not isinstance(self._group.observation_space, spaces.Dict)
        return batch["observation"] if alone else batch
