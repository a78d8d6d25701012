"""TorchRL envs, single or batched, with their transforms. TorchRL itself is never imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.envs.batch import NativeGroup
from swath.envs.group import comes_from
from swath.errors import UsageError
from swath.memory import numpy_dtype
from swath.tree import Key, key_name

__all__ = ["OneHot", "TorchRLGroup", "is_torchrl_env"]


def is_torchrl_env(env: Any) -> bool:
    """Tell a TorchRL env without importing TorchRL."""
    return comes_from(env, "torchrl", "EnvBase")


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
    kind, inner = type(spec).__name__, getattr(spec, "space", None)
    if comes_from(spec, "torchrl", "Composite"):
        parts = {name: _space_of(part, (*key, name), batch_dims) for name, part in spec.items()}
        return spaces.Dict(parts)
    if spec.dtype is None or spec.shape is None:
        raise UsageError(
            f"the TorchRL env has a {type(spec).__name__} at {key_name(key)}, which is no tensor. "
            "Leave it out with an ExcludeTransform."
        )
    shape, dtype = tuple(spec.shape[batch_dims:]), numpy_dtype(spec.dtype)
    scalar: Any = dtype.type
    if kind == "Categorical":
        n = int(inner.n)  # type: ignore[union-attr]
        return spaces.Discrete(n) if shape == () else spaces.MultiDiscrete(np.full(shape, n))
    if kind == "MultiCategorical":
        nvec = spec.nvec.reshape(-1, *shape)[0] if batch_dims else spec.nvec
        return spaces.MultiDiscrete(nvec.cpu().numpy())
    if kind == "OneHot":
        return OneHot([shape[-1]], dtype)
    if kind == "MultiOneHot":
        return OneHot([int(box.n) for box in inner], dtype)  # type: ignore[union-attr]
    if kind == "Binary" or dtype.kind == "b":
        return spaces.Box(0, 1, shape, scalar)
    low, high = getattr(inner, "low", None), getattr(inner, "high", None)
    if low is not None and high is not None:
        one = (0,) * batch_dims
        return spaces.Box(low[one].cpu().numpy(), high[one].cpu().numpy(), shape, scalar)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, scalar)
    return spaces.Box(np.iinfo(scalar).min, np.iinfo(scalar).max, shape, scalar)


class TorchRLGroup(NativeGroup):
    """A TorchRL `EnvBase`, single or batched, transforms included; see `EnvGroup`."""

    kept = ("env", "live", "state")
    native = False

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
        if any((key if isinstance(key, str) else key[0]) != "action" for key in env.action_keys):
            raise UsageError(
                f"the TorchRL env has the action keys {env.action_keys}; all must be at or below "
                "'action'. Rename them with a RenameTransform."
            )
        observations: Any = _space_of(env.observation_spec, (), dims)
        self._alone = list(observations) == ["observation"]
        if self._alone:  # policies see the tensor, as of gymnasium's envs
            observations = observations["observation"]
        actions = _space_of(env.full_action_spec["action"], ("action",), dims)
        super().__init__(env, env.batch_size[0] if dims else 1, observations, actions)
        self.batched = dims == 1
        self.state: Any = None
        """What the env must be given at its next step."""

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the env with the first seed: TorchRL derives those of the others itself."""
        with torch.random.fork_rng(devices=[]):  # some TorchRL envs seed torch itself
            self.env.set_seed(int(seeds[0]) % 2**31)

    def _reset(self, mask: torch.Tensor | None) -> Any:
        if mask is None or not self.batched:
            self.state = self.env.reset()
        else:
            self.state = self.env.reset(self.state.copy().set("_reset", mask[:, None]))
        return self._seen(self.state)

    def _step(self, actions: Sequence[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        request = self.state.copy()
        for leaf, action in zip(self.actions, actions, strict=True):
            request.set(leaf.key, action if self.batched else action[0])
        if self.batched and len(self.live) < self.num_envs:
            request.set("_step", self.mask(self.live))
        following = self.env.step(request)["next"]
        self.state = self.env.step_mdp(request)
        done = following["done"]
        terminated = following.get("terminated", done)
        truncated = following.get("truncated", done & ~terminated)
        return self._seen(following), following["reward"], terminated, truncated

    def _seen(self, tensordict: Any) -> Any:
        """Return the observations `[N, ...]` in the form of the observation space."""
        batch = tensordict if self.batched else tensordict.unsqueeze(0)
        return batch["observation"] if self._alone else batch
