"""From what users pass as a policy to what the rollout loop calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.errors import PolicyError, SwathError, UsageError
from swath.policies.base import Interface, Policy, State, check_range, to_array
from swath.policies.callables import CallablePolicy, RecurrentPolicy
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
    if policy is None or isinstance(policy, RandomPolicy):
        return UniformPolicy(interface, sampler)
    if is_tensordict_policy(policy):
        return TensorDictPolicy(interface, policy)
    if callable(policy):
        return CallablePolicy(interface, policy)
    raise UsageError(
        f"policy is a {type(policy).__name__}; expected None (random), a callable or nn.Module "
        "from observation to action, or a tensordict.nn module."
    )


def probe(
    adapter: Policy, policy: Any, rows: Mapping[Key, torch.Tensor], compile_with: Any = None
) -> None:
    """Call a computing policy once, to learn what it writes; its state and RNG do not change.

    Args:
        adapter: What `as_policy` returned.
        policy: What the user passed.
        rows: A copy of the first rows that it will see.
        compile_with: Keyword arguments for `torch.compile`, or None to run it as it is.
    """
    if not isinstance(adapter, (CallablePolicy, TensorDictPolicy)):
        return
    with _untouched(policy):
        try:
            adapter.probe(rows)
            if compile_with is not None:
                adapter.forward = torch.compile(adapter.forward, **compile_with)
        except SwathError:
            raise
        except Exception as error:
            shapes = {"/".join(key): tuple(row.shape) for key, row in rows.items()}
            raise PolicyError(
                f"the policy raised {type(error).__name__}: {error}. It was called with "
                f"{shapes}; see the cause above."
            ) from error


@contextlib.contextmanager
def _untouched(policy: Any) -> Iterator[None]:
    """Restore torch's RNG and the buffers of the module (running statistics, say)."""
    state = torch.get_rng_state()
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    if isinstance(policy, torch.nn.Module):
        buffers = [
            (b, b.detach().clone())
            for b in policy.buffers()
            if not isinstance(b, TensorDictBase) and not torch.nn.parameter.is_lazy(b)
        ]
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
