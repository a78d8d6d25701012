"""The device plan of a runner, in words."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym

from swath.policies.base import TorchPolicy
from swath.rollout.device import DeviceRunner
from swath.rollout.runner import Runner

__all__ = ["described", "envs_in_words"]


def envs_in_words(runner: Runner) -> str:
    """Return what envs there are and how they are held: what can take over what others have left.

    Examples:
        >>> from swath.envs import SerialEnv
        >>> from swath.rollout import Plan
        >>> envs_in_words(Runner(SerialEnv(2, "CartPole-v1").group, None, Plan(steps=1)))
        'GymGroup of 2 CartPole-v1, Runner'
    """
    return f"{_envs_of(runner.group)}, {type(runner).__name__}"


def _envs_of(group: Any) -> str:
    parts = getattr(group, "parts", None)
    if parts is not None:
        return f"{type(group).__name__} of {' and '.join(_envs_of(part) for part, *_ in parts)}"
    envs = getattr(group, "envs", [getattr(group, "env", None)])
    names = " or ".join(dict.fromkeys(_name(env) for env in envs if env is not None))
    processes = len(getattr(group, "links", ()))
    where = f" in {processes} processes" if processes else ""
    return f"{type(group).__name__} of {group.num_envs} {names}{where}".replace("  ", " ")


def _name(env: Any) -> str:
    """Return the id under which an env is registered, or its class."""
    if not isinstance(env, (gym.Env, gym.vector.VectorEnv)):
        return type(env).__qualname__
    inner: Any = env.unwrapped
    name = getattr(getattr(inner, "spec", None), "id", None)  # EnvPool's specs have no id
    return type(inner).__qualname__ if name is None else name


def described(runner: Runner, own_policy: bool = False) -> str:
    """Return what lives where, what is copied when, and how many bytes.

    Args:
        runner: Whose.
        own_policy: The policy is a copy of the learner's.
    """
    env, policy, storing = runner.devices
    made = env if isinstance(runner, DeviceRunner) else "cpu"
    whose = "a copy; update_policy_weights_() updates it" if own_policy else "yours"
    steps, nbytes = runner.layout.steps, runner.layout.nbytes
    lines = [
        ("envs", env, f"{runner.group.num_envs}, {type(runner.group).__name__}"),
        ("policy", policy, whose),
        ("rollouts", made, f"{steps} steps, {nbytes:,} bytes"),
        ("batches", storing, _delivered(str(made), str(storing), nbytes)),
        ("each step", "", _per_step(runner)),
    ]
    if isinstance(runner, DeviceRunner):
        why = runner.graph.why
        graph = f"one CUDA graph, then {nbytes:,} bytes copied on the device"
        lines.append(("each rollout", "", graph if why is None else f"step by step: {why}"))
    return "\n".join(f"{what:12} {where!s:8} {how}" for what, where, how in lines)


def _delivered(made: str, storing: str, nbytes: int) -> str:
    if made == storing:
        return "views of the rollout, nothing is copied"
    return f"copied from {made} once per rollout, {nbytes:,} bytes"


def _per_step(runner: Runner) -> str:
    env, policy, _ = map(str, runner.devices)
    if isinstance(runner, DeviceRunner):
        return "nothing is copied between host and device, and nobody waits"
    moved, adapter = [], runner.policy
    if env != "cpu":
        moved.append(f"actions are copied to {env}, everything else from there, through the host")
    if isinstance(adapter, TorchPolicy) and policy != "cpu":
        places = runner.layout.places
        up = sum(_size(places[key].field) for key in adapter.inputs) * runner.group.num_envs
        down = sum(math.prod(form.shape) * form.dtype.itemsize for form in adapter.forms)
        how = "as one CUDA graph" if adapter.graphed else "call by call"
        moved.append(f"{up:,} bytes up to {policy}, {down:,} down, in one copy each; {how}")
    return "; ".join(moved) or "nothing is copied between devices"


def _size(field: object) -> int:
    return math.prod(field.shape) * field.dtype.itemsize  # type: ignore[attr-defined]
