"""From whatever the user passes as envs to one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import gymnasium as gym
import torch

from swath.envs.base import Env
from swath.envs.batch import NativeGroup
from swath.envs.group import called, close_all
from swath.envs.gymnasium import GymGroup
from swath.envs.info import InfoNames
from swath.envs.joined import join
from swath.envs.native import TorchEnv
from swath.envs.registry import HOW_TO_REGISTER, with_registered
from swath.envs.torchrl import TorchRLGroup, is_torchrl_env
from swath.envs.vector import VectorGroup
from swath.errors import SwathError, UsageError
from swath.rollout import EnvGroup

__all__ = ["as_group", "is_env"]

_ACCEPTED = (
    "a gymnasium id, a gymnasium.Env or VectorEnv, a swath env, a torch-native env, a TorchRL "
    "EnvBase, a callable that makes one of these, or a list of such"
)


def as_group(
    source: Any, kwargs: Mapping[str, Any] | None = None, info_keys: InfoNames = ()
) -> EnvGroup:
    """Return the group for an env, an id, a callable or a list of these.

    Args:
        source: What the user passed.
        kwargs: Keyword arguments for the callables, or for `gymnasium.make` with an id.
        info_keys: Entries of the info dicts to store, of gymnasium envs.
    """
    if not isinstance(kwargs, (Mapping, NoneType)):
        raise UsageError(
            f"create_env_kwargs is {kwargs!r}; keyword arguments as a mapping are expected. A "
            "collector with workers takes a list of these, too, one for each worker."
        )
    if isinstance(source, (list, tuple)):
        return _from_list(source, kwargs, info_keys)
    env = source
    if not (isinstance(source, str) or is_env(source)):
        env, kwargs = _made(source, kwargs or {}), None
    if isinstance(env, str):
        env = _registered(env, kwargs or {})
    elif kwargs:
        raise UsageError(
            f"keyword arguments {sorted(kwargs)} can only be given with an env id or a "
            "callable, not with an env."
        )
    return called(_wrap, env, info_keys)


def _from_list(
    sources: Sequence[Any], kwargs: Mapping[str, Any] | None, info_keys: InfoNames
) -> EnvGroup:
    if not sources:
        raise UsageError(f"the list of envs is empty; expected {_ACCEPTED}.")
    groups: list[EnvGroup] = []
    try:
        for source in sources:
            groups.append(as_group(source, kwargs, info_keys))
        # A list has a dimension of envs, as does a vector env: one env in it, too.
        return groups[0] if len(groups) == 1 and groups[0].batched else join(groups)
    except BaseException:
        close_all(groups)  # nobody else will
        raise


def _made(maker: Any, kwargs: Mapping[str, Any]) -> Any:
    if not callable(maker):
        _refuse_multi_agent(maker)
        raise UsageError(f"create_env_fn is {maker!r}; expected {_ACCEPTED}.")
    if isinstance(maker, torch.nn.Module):
        raise UsageError(
            f"create_env_fn is a {type(maker).__name__}, which looks like a policy; expected "
            f"{_ACCEPTED}. The env comes first, the policy second."
        )
    try:
        made = with_registered(lambda: maker(**kwargs))
    except SwathError:
        raise
    except gym.error.UnregisteredEnv as error:
        raise UsageError(
            f"the env maker {maker!r} asks for an env that is not registered: {error} "
            f"{HOW_TO_REGISTER}"
        ) from error
    except Exception as error:
        raise UsageError(
            f"the env maker {maker!r} raised {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(made, str) or is_env(made)):
        _refuse_multi_agent(made)
        raise UsageError(
            f"the env maker {maker!r} returned {type(made).__name__}; expected {_ACCEPTED}."
        )
    return made


def _registered(name: str, kwargs: Mapping[str, Any]) -> gym.Env[Any, Any]:
    # Gymnasium's own checker looks at the first steps only; the collector checks every one.
    try:
        options = {"disable_env_checker": True, **kwargs}
        return with_registered(lambda: gym.make(name, **options))
    except gym.error.UnregisteredEnv as error:
        hint = f" If a package registers this id: {HOW_TO_REGISTER}"
        raise UsageError(f"gymnasium cannot make the env {name!r}: {error}{hint}") from error
    except Exception as error:  # of the many things that the constructor of an env may raise
        raise UsageError(f"gymnasium cannot make the env {name!r}: {error}") from error


def _refuse_multi_agent(thing: Any) -> None:
    """Refuse an env of PettingZoo's, by what all of these have."""
    agents = getattr(thing, "possible_agents", None)
    if agents is not None:
        shown = ", ".join(map(repr, agents[:3])) + ", ..." * (len(agents) > 3)
        raise UsageError(
            f"{type(thing).__name__} is a PettingZoo env with several agents ({shown}); expected "
            "an env with one observation and one action. Wrap it as "
            "torchrl.envs.PettingZooWrapper(env)."
        )


def is_env(thing: Any) -> bool:
    """Tell an env from what makes one."""
    if isinstance(thing, type):
        return False
    # TorchRL's first: it would not survive the probing of its attributes by the protocol.
    kinds = (Env, gym.Env, gym.vector.VectorEnv, TorchEnv)
    return is_torchrl_env(thing) or isinstance(thing, kinds)


def _wrap(env: Any, info_keys: InfoNames) -> EnvGroup:
    """Return the group of an env object."""
    if isinstance(env, gym.vector.VectorEnv):
        return VectorGroup(env, info_keys)
    if isinstance(env, gym.Env):
        return GymGroup([env], batched=False, info_keys=info_keys)
    if info_keys:
        raise UsageError(
            f"info_keys are only for gymnasium envs, and this is a {type(env).__name__}. Give "
            "them to the swath env when you make it."
        )
    if isinstance(env, Env):
        return env.group
    if is_torchrl_env(env):
        return TorchRLGroup(env)
    return NativeGroup(env, env.num_envs, env.observation_space, env.action_space)
