"""From what users pass as a policy to what the rollout loop calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from swath.errors import PolicyError, SwathError, UsageError
from swath.memory.weights import copy_weights
from swath.policies.base import Interface, Policy, State, TorchPolicy
from swath.policies.callables import CallablePolicy, RecurrentPolicy
from swath.policies.calls import short
from swath.policies.outputs import check_range, to_array
from swath.policies.probing import Trial, modules_of
from swath.policies.random import ActionSampler, RandomPolicy, UniformPolicy
from swath.policies.shortcuts import installed
from swath.policies.tensordicts import TensorDictPolicy, is_tensordict_policy
from swath.tree import Key

__all__ = [
    "ActionSampler",
    "Interface",
    "MadeWith",
    "Policy",
    "RandomPolicy",
    "RecurrentPolicy",
    "State",
    "UniformPolicy",
    "as_policy",
    "check_range",
    "made_by",
    "policy_module",
    "probe",
    "to_array",
]


def as_policy(
    policy: Any, interface: Interface, sampler: ActionSampler, takes_tensordict: bool = False
) -> Policy:
    """Return the adapter for whatever the user passed; computing ones still need `probe`.

    Args:
        policy: What the user passed.
        interface: What the envs show to it.
        sampler: Draws random actions.
        takes_tensordict: It does, even if nothing about it says so.
    """
    if policy is None or isinstance(policy, RandomPolicy) or _is_blank_random(policy):
        return UniformPolicy(interface, sampler)
    if isinstance(policy, type) or not callable(policy):
        raise UsageError(
            f"policy is {policy!r}; expected None (random), a callable or nn.Module from "
            "observation to action, or a tensordict.nn module. Pass a policy, or pass a "
            "function that makes one as policy_factory."
        )
    if takes_tensordict or is_tensordict_policy(policy):
        return TensorDictPolicy(interface, policy)
    return CallablePolicy(interface, policy)


def made_by(factory: Callable[[], Any]) -> Any:
    """Return the policy that a `policy_factory` makes."""
    made = factory()
    if made is None:
        raise UsageError(
            f"policy_factory {factory!r} returned None; it must return a policy. Leave it out for "
            "random actions."
        )
    return made


@dataclass(frozen=True)
class MadeWith:
    """A `policy_factory` whose policies begin with weights that were given."""

    factory: Callable[[], Any]
    weights: Mapping[str, torch.Tensor]

    def __call__(self) -> Any:
        """Return a policy."""
        made = made_by(self.factory)
        module = policy_module(made)
        if module is not None:
            copy_weights(self.weights, module)
        return made


def policy_module(policy: Any) -> torch.nn.Module | None:
    """Return the module that holds the weights of a policy, if it has any."""
    modules = modules_of(policy)
    if len(modules) == 1:
        return modules[0]
    return torch.nn.ModuleList(modules) if modules else None


def _is_blank_random(policy: Any) -> bool:
    """Tell TorchRL's RandomPolicy that is to take the action space from the collector."""
    kind = type(policy)
    ours = kind.__name__ == "RandomPolicy" and kind.__module__.startswith("torchrl.")
    return ours and policy.action_spec is None


def probe(
    adapter: Policy, policy: Any, rows: Mapping[Key, torch.Tensor], compile_with: Any = None
) -> None:
    """Call a computing policy, to learn what it writes; its buffers and all RNGs are put back.

    Args:
        adapter: What `as_policy` returned.
        policy: What the user passed.
        rows: A copy of the first rows that it will see.
        compile_with: Keyword arguments for `torch.compile`, or None to run it as it is.
    """
    if not isinstance(adapter, TorchPolicy):
        return
    adapter.compile_with = compile_with
    try:
        trial = adapter.learn(rows)
    except SwathError:
        raise
    except Exception as error:
        shapes = {"/".join(key): tuple(rows[key].shape) for key in adapter.inputs}
        raise PolicyError(
            f"the policy raised {type(error).__name__}: {error}. It was called with {shapes}; "
            f"see the cause above.{adapter.advice(error, rows)}"
        ) from error
    _check_exploration(adapter, trial, rows)
    if not isinstance(getattr(policy, "__self__", policy), torch.nn.Module):
        return  # a function has no copy to try faster ways on
    try:
        twin = copy.deepcopy(adapter)
    except Exception:  # whatever a user's object does when it is copied
        return
    adapter.takes_shortcuts = compile_with is None and _takes_shortcuts(twin, trial, rows)


def _check_exploration(
    adapter: TorchPolicy, trial: Trial, rows: Mapping[Key, torch.Tensor]
) -> None:
    """Warn of a policy that goes on drawing random actions though it was not to explore."""
    asked = interaction_type()
    if asked in (None, InteractionType.RANDOM) or not trial.draws or adapter.compile_with:
        return
    with set_interaction_type(InteractionType.RANDOM):
        same = adapter.repeats(trial, adapter.calls, rows)
    adapter.carried.clear()
    if same:
        warnings.warn(
            f"exploration_type={asked.name.lower()!r} has no effect: the policy draws random "
            "numbers by itself. Let a ProbabilisticTensorDictModule choose the action, or read "
            "interaction_type() of tensordict.nn.probabilistic in the policy.",
            stacklevel=2,
        )


def _takes_shortcuts(twin: TorchPolicy, trial: Trial, rows: Mapping[Key, torch.Tensor]) -> bool:
    """Tell whether a policy does the same while shortcuts stand in its modules."""
    with installed(twin.modules):
        return twin.repeats(trial, [short(call) for call in twin.calls], rows)
