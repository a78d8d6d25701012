"""From what users pass as a policy to what the rollout loop calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swath.errors import PolicyError, SwathError, UsageError
from swath.policies.base import Interface, Policy, State, TorchPolicy
from swath.policies.callables import CallablePolicy, RecurrentPolicy
from swath.policies.outputs import check_range, to_array
from swath.policies.probing import takes_batch_of_one
from swath.policies.random import ActionSampler, RandomPolicy, UniformPolicy
from swath.policies.tensordicts import TensorDictPolicy, is_tensordict_policy
from swath.tree import Key

__all__ = [
    "ActionSampler",
    "Interface",
    "Policy",
    "RandomPolicy",
    "RecurrentPolicy",
    "State",
    "UniformPolicy",
    "as_policy",
    "check_range",
    "probe",
    "to_array",
]


def as_policy(policy: Any, interface: Interface, sampler: ActionSampler) -> Policy:
    """Return the adapter for whatever the user passed; computing ones still need `probe`."""
    if policy is None or isinstance(policy, RandomPolicy) or _is_blank_random(policy):
        return UniformPolicy(interface, sampler)
    if isinstance(policy, type) or not callable(policy):
        raise UsageError(
            f"policy is {policy!r}; expected None (random), a callable or nn.Module from "
            "observation to action, or a tensordict.nn module. Pass an object, or what makes one "
            "as policy_factory."
        )
    if is_tensordict_policy(policy):
        return TensorDictPolicy(interface, policy)
    return CallablePolicy(interface, policy)


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
        adapter.learn(rows)
        if adapter.direct is not None and not adapter.interface.batched:
            key, call = adapter.direct
            adapter.takes_batch_of_one = takes_batch_of_one(call, rows[key])
    except SwathError:
        raise
    except Exception as error:
        shapes = {"/".join(key): tuple(rows[key].shape) for key in adapter.inputs}
        raise PolicyError(
            f"the policy raised {type(error).__name__}: {error}. It was called with {shapes}; "
            "see the cause above."
        ) from error
