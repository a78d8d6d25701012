"""`GymEnv` and `SerialEnv`: gymnasium envs by themselves, in this process."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from swath.envs.base import Env
from swath.envs.info import InfoNames
from swath.envs.make import as_group
from swath.errors import UsageError

__all__ = ["GymEnv", "SerialEnv"]


class GymEnv(Env):
    """One gymnasium env, by id or as an object; or a gymnasium vector env, with batch size `[N]`.

    Args:
        env: A registered id such as `"CartPole-v1"`, a `gymnasium.Env` or a `VectorEnv`.
        info_keys: Entries of the info dicts to store below `("next", "info")`: names (as float64,
            NaN where a step has none), or names with spaces (in that form, 0 where it has none).
            `("episode", "r")` is entry `"r"` of a dict `"episode"`.
        **kwargs: Passed on to `gymnasium.make` with an id.

    Examples:
        >>> env = GymEnv("CartPole-v1")
        >>> td = env.rand_step(env.reset())
        >>> td["next", "observation"].shape, td["next", "reward"].shape
        (torch.Size([4]), torch.Size([1]))
        >>> env.rollout(5).batch_size
        torch.Size([5])
        >>> env.close()
    """

    def __init__(
        self,
        env: str | gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any],
        *,
        info_keys: InfoNames = (),
        **kwargs: Any,
    ) -> None:
        if not isinstance(env, (str, gym.Env, gym.vector.VectorEnv)):
            raise UsageError(
                "expected a gymnasium id, a gymnasium.Env or a gymnasium VectorEnv; got "
                f"{type(env).__name__} {env!r}."
            )
        super().__init__(as_group(env, kwargs, info_keys))


class SerialEnv(Env):
    """N envs stepped one after the other in this process, with batch size `[N]`.

    Args:
        num_envs: Number of envs.
        create_env_fn: An id or a function that makes one env, or a list of N of these.
        info_keys: Entries of the info dicts to store, as in `GymEnv`.

    Examples:
        >>> env = SerialEnv(4, "CartPole-v1")
        >>> env.reset()["observation"].shape
        torch.Size([4, 4])
        >>> env.close()
    """

    def __init__(self, num_envs: int, create_env_fn: Any, *, info_keys: InfoNames = ()) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise UsageError(f"num_envs must be an int of at least 1; got {num_envs!r}.")
        listed = isinstance(create_env_fn, (list, tuple))
        makers = list(create_env_fn) if listed else [create_env_fn] * num_envs
        group = as_group(makers, None, info_keys)
        if group.num_envs != num_envs:
            group.close()
            raise UsageError(f"num_envs is {num_envs}, but {group.num_envs} envs were made.")
        super().__init__(group)
