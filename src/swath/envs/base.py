"""Envs by themselves: TensorDict in, TensorDict out, over any group of envs.

A collector does not come through here: it drives the group underneath directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.gymnasium import GymGroup
from swath.errors import ClosedError, EnvError, UsageError
from swath.memory import HeapMemory, Layout, Slab
from swath.policies import ActionSampler, Interface, as_policy
from swath.rollout import CallFailed, EnvGroup, Plan, Runner, columns, keys
from swath.seeding import env_seed
from swath.tree import action_leaves, key_name, nest

__all__ = ["Env", "GymEnv", "SerialEnv"]


class Env:
    """N environments with a TensorDict interface; a lone one has batch size `[]`.

    Args:
        group: The envs underneath.

    >>> env = GymEnv("CartPole-v1")
    >>> td = env.rand_step(env.reset())
    >>> td["next", "observation"].shape, td["next", "reward"].shape
    (torch.Size([4]), torch.Size([1]))
    >>> env.rollout(5).batch_size
    torch.Size([5])
    >>> env.close()
    """

    def __init__(self, group: EnvGroup) -> None:
        self.group = group
        self.observation_space = group.observation_space
        self.action_space = group.action_space
        self.num_envs = group.num_envs
        self.batch_size = torch.Size([group.num_envs] if group.batched else [])
        self._interface = Interface(
            group.observation_space, group.action_space, group.num_envs, batched=group.batched
        )
        self._sampler = ActionSampler(action_leaves(group.action_space), range(group.num_envs))
        self._slab: Slab | None = None
        self._closed = False

    # -- one step at a time ---------------------------------------------------------------------

    def reset(self, mask: torch.Tensor | None = None, seed: int | None = None) -> TensorDict:
        """Start new episodes and return their first observations.

        Args:
            mask: Bool `[N]`; only these envs. All by default.
            seed: Seeds the envs first, as `set_seed` does.
        """
        if seed is not None:
            self.set_seed(seed)
        slab = self._opened()
        which = None if mask is None else mask.reshape(-1).nonzero()[:, 0].tolist()
        slab.arrays[keys.DONE][0, slice(None) if which is None else which] = False
        self._call(lambda: self.group.bind(slab).reset(0, which))
        return self._row(slab, root=True)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step with the `"action"` of the TensorDict and add what followed under `"next"`."""
        slab = self._opened()
        for leaf in self._interface.actions:
            action = tensordict.get(leaf.key, None)
            if action is None:
                raise UsageError(
                    f"step() needs {key_name(leaf.key)} in its TensorDict; it has "
                    f"{sorted(map(str, tensordict.keys(True, True)))}. Set it, or use rand_step()."
                )
            slab.arrays[leaf.key][0] = action.detach().cpu().numpy()
        columns.clear(slab)
        ended = self._call(lambda: self.group.bind(slab).step(0))
        slab.arrays[keys.NEXT_DONE][0, ended] = True
        row = self._row(slab, root=False)
        for place in slab.layout.places.values():  # the outcome is where the next step starts
            if place.field.carried:
                slab.arrays[place.field.key][0] = slab.arrays[place.field.key][1]
        return tensordict.set("next", row)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with a random action, written into the TensorDict."""
        td = TensorDict({}, self.batch_size) if tensordict is None else tensordict
        for leaf, draw in zip(self._interface.actions, self._sampler.draw(1), strict=True):
            action = torch.from_numpy(draw[0])
            td.set(leaf.key, action if self.group.batched else action[0])
        return self.step(td)

    def _row(self, slab: Slab, *, root: bool) -> TensorDict:
        """Return a copy of what an env shows: its state, or the outcome of a step."""
        flat = {}
        for key, place in slab.layout.places.items():
            below = key[0] == "next"
            if root != below and (place.field.carried or below):
                flat[key[below:]] = slab.tensors[key][0].clone()
        if not root:
            for leaf in self._interface.observations:
                flat[leaf.key] = slab.tensors[leaf.key][1].clone()
        batched = self.group.batched
        return TensorDict(
            nest({key: row if batched else row[0] for key, row in flat.items()}), self.batch_size
        )

    # -- whole rollouts -------------------------------------------------------------------------

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        *,
        break_when_any_done: bool = True,
        seed: int | None = None,
    ) -> TensorDict:
        """Start new episodes, step at most `max_steps` times and return `[*batch_size, T]`.

        Args:
            max_steps: The most steps to make.
            policy: Anything that a collector takes; random by default.
            break_when_any_done: Stop when the first episode ends; otherwise envs that end start
                new episodes.
            seed: Seeds envs and policy.
        """
        self._opened()
        plan = Plan(steps=max_steps, stop_at_first_end=break_when_any_done, seed=seed)
        runner = Runner(self.group, policy, plan, self._sampler)
        batch = runner.lend(runner.collect())
        self._slab = None  # the episodes moved on: the next step() must follow a reset()
        return batch

    # -- the rest -------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """Seed the envs and the random actions; it counts from the next reset."""
        self.group.seed([env_seed(seed, index) for index in range(self.num_envs)])
        self._sampler.seed(seed)

    def close(self) -> None:
        """Close the envs; closing twice is nothing."""
        if not self._closed:
            self._closed = True
            self.group.close()

    def _opened(self) -> Slab:
        if self._closed:
            raise ClosedError("this env is closed; make a new one.")
        if self._slab is None:
            fields = columns.env_fields(
                self._interface,
                self.group.info_fields,
                as_policy(None, self._interface, self._sampler),
                masked=self.group.skips_rows,
                compact=False,
            )
            layout = Layout(fields, 1, self.num_envs)
            self._slab = Slab(layout, HeapMemory(layout.nbytes))
            columns.clear(self._slab)
        return self._slab

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CallFailed as failure:
            cause = failure.__cause__
            text = failure.message or f"the env raised {type(cause).__name__}: {cause}"
            raise EnvError(text, env=failure.index) from cause

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, "
            f"observation_space={self.observation_space}, action_space={self.action_space})"
        )


class GymEnv(Env):
    """One gymnasium env, by id or as an object.

    Args:
        env: A registered id such as `"CartPole-v1"`, or a `gymnasium.Env`.
        info_keys: Entries of the info dicts to store, by name, or by name with a space.
        **kwargs: Passed on to `gymnasium.make` with an id.
    """

    def __init__(
        self,
        env: str | gym.Env[Any, Any],
        *,
        info_keys: Sequence[str] | Mapping[str, gym.Space[Any]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(GymGroup([make_gym(env, **kwargs)], batched=False, info_keys=info_keys))


class SerialEnv(Env):
    """N envs stepped one after the other in this process, with batch size `[N]`.

    Args:
        num_envs: How many.
        create_env_fn: Makes one env (an id, or a callable), or a list of N such.
        info_keys: Entries of the info dicts to store.

    >>> env = SerialEnv(4, "CartPole-v1")
    >>> env.reset()["observation"].shape
    torch.Size([4, 4])
    >>> env.close()
    """

    def __init__(
        self,
        num_envs: int,
        create_env_fn: Any,
        *,
        info_keys: Sequence[str] | Mapping[str, gym.Space[Any]] = (),
    ) -> None:
        if not isinstance(num_envs, int) or num_envs < 1:
            raise UsageError(f"num_envs must be an int of at least 1; got {num_envs!r}.")
        makers = create_env_fn if isinstance(create_env_fn, (list, tuple)) else None
        if makers is not None and len(makers) != num_envs:
            raise UsageError(f"num_envs is {num_envs}, but {len(makers)} env makers were given.")
        if isinstance(create_env_fn, gym.Env) and num_envs > 1:
            raise UsageError(
                "one env object cannot be used for several envs; pass a callable that makes one."
            )
        envs: list[gym.Env[Any, Any]] = []
        for i in range(num_envs):
            envs.extend(single_envs(makers[i] if makers is not None else create_env_fn))
        check_equal_spaces(envs)
        super().__init__(GymGroup(envs, batched=True, info_keys=info_keys))


def make_gym(env: str | gym.Env[Any, Any], **kwargs: Any) -> gym.Env[Any, Any]:
    """Return a gymnasium env from an id, or the env itself."""
    if isinstance(env, gym.Env):
        if kwargs:
            raise UsageError(
                f"keyword arguments {sorted(kwargs)} go with an env id, not with an env object."
            )
        return env
    if not isinstance(env, str):
        raise UsageError(
            f"expected a gymnasium id or a gymnasium.Env; got {type(env).__name__} {env!r}."
        )
    # Gymnasium's own checker looks at the first steps only; the collector checks every one.
    kwargs.setdefault("disable_env_checker", True)
    try:
        return gym.make(env, **kwargs)
    except gym.error.Error as error:
        raise UsageError(f"gymnasium cannot make the env {env!r}: {error}") from error


def single_envs(source: Any) -> list[gym.Env[Any, Any]]:
    """Return the gymnasium envs that a maker makes: one, or those of a `SerialEnv`."""
    made = source() if callable(source) and not isinstance(source, (gym.Env, Env)) else source
    if isinstance(made, Env) and isinstance(made.group, GymGroup):
        return made.group.envs
    if isinstance(made, (str, gym.Env)):
        return [make_gym(made)]
    raise UsageError(
        f"the env maker {source!r} returned {type(made).__name__}; expected a gymnasium id, a "
        "gymnasium.Env or a GymEnv."
    )


def check_equal_spaces(envs: Sequence[Any]) -> None:
    """Refuse envs that cannot share a slab."""
    for number, env in enumerate(envs[1:], 1):
        for name in ("observation_space", "action_space"):
            first, other = getattr(envs[0], name), getattr(env, name)
            if first != other:
                raise UsageError(
                    f"env {number} has {name} {other}, but env 0 has {first}; all envs of a "
                    "collector must have equal spaces."
                )
