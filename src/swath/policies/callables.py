"""Policies that are plain callables: observation in; action, or action and extras, out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.errors import UsageError
from swath.policies.base import Interface, State, TorchPolicy
from swath.tree import Key, builder, fetch, key_name

__all__ = ["CallablePolicy", "RecurrentPolicy"]

_EXTRA_NAMES = ("log_prob", "value")


class RecurrentPolicy(torch.nn.Module):
    """Give a callable a state: `fn(observation, state) -> (action, state)`.

    The state is carried from step to step and from batch to batch, starts from `initial_state` at
    each episode, and is stored at `"policy_state"` (what went in) and `("next", "policy_state")`
    (what came out), so that training can replay it. A policy of your own with an attribute
    `initial_state` needs no wrapping.

    Args:
        fn: Called with the observation and the state; returns `(action, state)` or
            `(action, extras, state)` with a dict of extras.
        initial_state: The state of one env at the start of an episode, without batch dimension:
            a tensor, or a dict or tuple of tensors.

    >>> counter = RecurrentPolicy(lambda obs, n: ((n % 2).long(), n + 1), torch.zeros(()))
    >>> counter(torch.zeros(4), counter.initial_state)
    (tensor(0), tensor(1.))
    """

    def __init__(self, fn: Callable[..., Any], initial_state: Any) -> None:
        super().__init__()
        self.fn = fn
        self.initial_state = initial_state

    def forward(self, observation: Any, state: Any) -> Any:
        """Call the wrapped function."""
        return self.fn(observation, state)


class CallablePolicy(TorchPolicy):
    """The adapter for callables and modules that know nothing of TensorDict."""

    def __init__(self, interface: Interface, fn: Callable[..., Any]) -> None:
        super().__init__(interface)
        self.fn = fn
        leaves = interface.observations
        self._build = builder(interface.observation_space, leaves)
        self._single = len(leaves) == 1 and not leaves[0].path
        self._num_observations = len(leaves)
        self.states = _initial_states(fn)
        self._nest_state = _state_nester(fn) if self.states else None
        self.inputs = [leaf.key for leaf in leaves] + [state.key for state in self.states]

    def probe(self, rows: Mapping[Key, torch.Tensor]) -> Mapping[Key, Any]:
        """Call the policy once, learn the form of its answer and return it as flat values."""
        values = self._read(self._call([rows[key] for key in self.inputs]))
        self.settle(values)
        if (
            self._single
            and not self.states
            and self.outputs == [("action",)]
            and not _nested(values)
        ):
            self.forward = self._forward_single
        else:
            self.forward = self._forward
        return values

    def _call(self, rows: Sequence[torch.Tensor]) -> Any:
        observation = self._build(rows[: self._num_observations])
        if self._nest_state is None:
            return self.fn(observation)
        return self.fn(observation, self._nest_state(rows[self._num_observations :]))

    def _forward(self, *rows: torch.Tensor) -> Sequence[Any]:
        values = self._read(self._call(rows))
        return [values[key] for key in self.outputs]

    def _forward_single(self, row: torch.Tensor) -> Sequence[Any]:
        out = self.fn(row)
        return (out,) if out.__class__ is torch.Tensor else (self._read(out)[("action",)],)

    def _read(self, out: Any) -> dict[Key, Any]:
        """Return whatever the callable answered as flat values with keys."""
        state: Any = None
        if self.states:
            if not isinstance(out, tuple) or len(out) not in (2, 3):
                raise UsageError(
                    "a policy with an initial_state must return (action, state) or "
                    f"(action, extras, state); it returned {type(out).__name__}."
                )
            *first, state = out
            out = first[0] if len(first) == 1 else tuple(first)
        action, extras = self._split(out)
        values = {leaf.key: fetch(action, leaf.path) for leaf in self.interface.actions}
        values.update(_flatten(extras, ()))
        if self.states:
            values.update(_flatten(state, ("policy_state",)))
        return values

    def _split(self, out: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the action and the extras of an answer."""
        if isinstance(out, (Mapping, TensorDictBase)) and "action" in out.keys():
            return out["action"], {k: v for k, v in out.items() if k != "action"}
        is_tuple_space = isinstance(self.interface.action_space, spaces.Tuple)
        if not isinstance(out, tuple) or (is_tuple_space and not _has_extras(out)):
            return out, {}
        action, *rest = out
        if len(rest) == 1 and isinstance(rest[0], (Mapping, TensorDictBase)):
            return action, dict(rest[0].items())
        if len(rest) > len(_EXTRA_NAMES):
            raise UsageError(
                f"the policy returned a tuple of {len(out)} values; swath names (action, "
                f"{', '.join(_EXTRA_NAMES)}). Return a dict with an 'action' to name them yourself."
            )
        return action, dict(zip(_EXTRA_NAMES, rest, strict=False))


def _has_extras(out: tuple[Any, ...]) -> bool:
    return len(out) == 2 and isinstance(out[0], tuple) and isinstance(out[1], Mapping)


def _nested(values: Mapping[Key, Any]) -> bool:
    return not isinstance(values[("action",)], (torch.Tensor, np.ndarray, int, float, np.generic))


def _flatten(value: Any, key: Key) -> dict[Key, Any]:
    if isinstance(value, (Mapping, TensorDictBase)):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = ((str(i), part) for i, part in enumerate(value))
    else:
        return {key: value}
    flat: dict[Key, Any] = {}
    for name, part in parts:
        flat.update(_flatten(part, (*key, str(name))))
    return flat


def _initial_states(fn: Callable[..., Any]) -> list[State]:
    initial = getattr(fn, "initial_state", None)
    if initial is None:
        return []
    if callable(initial) and not isinstance(initial, torch.Tensor):
        initial = initial()
    flat = _flatten(initial, ("policy_state",))
    for key, value in flat.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the policy's initial_state has a {type(value).__name__} at {key_name(key)}; it "
                "must be a tensor, or a dict or tuple of tensors, for one env."
            )
    return [State(key, value.detach().clone()) for key, value in sorted(flat.items())]


def _state_nester(fn: Callable[..., Any]) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return the function that puts flat state tensors back into the user's structure."""
    initial = getattr(fn, "initial_state", None)
    if callable(initial) and not isinstance(initial, torch.Tensor):
        initial = initial()
    keys = sorted(_flatten(initial, ("policy_state",)))

    def rebuild(shape: Any, key: Key, values: Mapping[Key, torch.Tensor]) -> Any:
        if isinstance(shape, (Mapping, TensorDictBase)):
            return {name: rebuild(part, (*key, name), values) for name, part in shape.items()}
        if isinstance(shape, tuple):
            return tuple(rebuild(p, (*key, str(i)), values) for i, p in enumerate(shape))
        return values[key]

    return lambda rows: rebuild(initial, ("policy_state",), dict(zip(keys, rows, strict=True)))
