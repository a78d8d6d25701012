"""What the rollout loop calls: an adapter with known inputs and outputs, bound to a slab.

```
 row t of the slab --rows--> forward(*rows) --values--> row t of the slab (next states: row t + 1)
```

An adapter says which keys it reads and which it writes; `bind` turns it into one function of the
step number. No TensorDict is built and nothing is allocated on our side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.errors import PolicyError, SwathError
from swath.memory import Field, Slab, numpy_dtype
from swath.tree import Key, Leaf, action_leaves, key_name, observation_leaves

__all__ = [
    "Act",
    "Interface",
    "Policy",
    "State",
    "TorchPolicy",
    "check_action",
    "check_range",
    "to_array",
]

Act = Callable[[int], None]


@dataclass(frozen=True)
class Interface:
    """What an env shows to a policy."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    batched: bool

    @property
    def observations(self) -> list[Leaf]:
        """The leaves of one env's observation."""
        return observation_leaves(self.observation_space)

    @property
    def actions(self) -> list[Leaf]:
        """The leaves of one env's action."""
        return action_leaves(self.action_space)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions that a policy sees."""
        return (self.num_envs,) if self.batched else ()


@dataclass(frozen=True)
class State:
    """One tensor that a recurrent policy carries from step to step, per env."""

    key: Key
    initial: torch.Tensor


class Policy(Protocol):
    """What the loop needs of a policy."""

    extras: list[Field]
    """What it stores beside the action."""
    states: list[State]
    """What it carries from step to step."""
    needs_is_init: bool
    """Reads a flag that is True at the first step of an episode."""

    def bind(self, slab: Slab, steps: int) -> Act:
        """Return the function that acts at step t of this slab; called once per rollout."""
        ...


def to_array(value: Any) -> np.ndarray:
    """Return a policy's output as numpy array, without a copy where it is a CPU tensor."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype is torch.bfloat16:
            value = value.view(torch.uint16)
        return value.cpu().numpy()
    return np.asarray(value)


class TorchPolicy:
    """The adapter for everything that computes: `forward(*rows)` gives the values of `outputs`.

    Subclasses set `inputs` (keys read), `outputs` (keys written, the action first) and `forward`.
    """

    inputs: list[Key]
    forward: Callable[..., Sequence[Any]]

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self.outputs: list[Key] = []
        self.extras: list[Field] = []
        self.states: list[State] = []
        self.needs_is_init = False

    def settle(self, values: Mapping[Key, Any]) -> None:
        """Learn from one probe which keys are written, with which shapes, and check the action."""
        batch = self.interface.batch_shape
        actions = {leaf.key: leaf for leaf in self.interface.actions}
        states = {state.key for state in self.states}
        for leaf in actions.values():
            check_action(leaf, values, batch)
        for key, value in values.items():
            if key in actions or key in states:
                continue
            array = to_array(value)
            if array.shape[: len(batch)] != batch:
                raise PolicyError(
                    f"the policy's output {key_name(key)} has shape {tuple(array.shape)}; it must "
                    f"start with the batch shape {batch} of its input."
                )
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.as_tensor(array).dtype
            self.extras.append(Field(key, tuple(array.shape[len(batch) :]), dtype))
        self.outputs = [*actions, *(field.key for field in self.extras), *sorted(states)]

    def bind(self, slab: Slab, steps: int) -> Act:
        """Return `act(t)` for this slab."""
        rows = [slab.rows(key, self.interface.batched) for key in self.inputs]
        stores = [self._store(slab, key) for key in self.outputs]
        forward = self.forward
        if len(rows) == 1 and len(stores) == 1:
            row, store = rows[0], stores[0]

            def act_simple(t: int) -> None:
                store(t, forward(row[t])[0])

            return act_simple

        def act(t: int) -> None:
            values = forward(*[row[t] for row in rows])
            for store, value in zip(stores, values, strict=True):
                store(t, value)

        return act

    def _store(self, slab: Slab, key: Key) -> Callable[[int, Any], None]:
        """Return the function that writes one output of step t."""
        place = slab.layout.places[key]
        array, shift = slab.arrays[key], int(place.field.carried)
        shape = (*self.interface.batch_shape, *place.field.shape)
        dtype = numpy_dtype(place.field.dtype)
        finite = key[0] == "action" and dtype.kind == "f"
        tensor_type = torch.Tensor

        def store(t: int, value: Any) -> None:
            # .numpy() is a view for a plain CPU tensor; whatever else comes takes the long way.
            if value.__class__ is tensor_type and not value.requires_grad:
                try:
                    value = value.numpy()
                except (TypeError, RuntimeError):
                    value = to_array(value)
            else:
                value = to_array(value)
            if value.shape != shape or value.dtype != dtype:
                value = _fit(value, shape, dtype, key)
            row = array[t + shift]
            row[...] = value
            if finite:
                flat = row.reshape(-1)
                # One dot product sees every inf and NaN; large finite values are told apart below.
                if not np.isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
                    raise PolicyError(
                        f"the policy gave a non-finite action: {_first_bad(row)}.", step=t
                    )

        return store


def _first_bad(row: np.ndarray) -> str:
    env = int(np.argmin(np.isfinite(row.reshape(len(row), -1)).all(1)))
    return f"env {env} got {row[env].tolist()}"


def _fit(value: np.ndarray, shape: tuple[int, ...], dtype: Any, key: Key) -> np.ndarray:
    """Return the value in the shape and dtype of its field, or say why it cannot be."""
    if value.shape != shape:
        raise PolicyError(
            f"the policy's output {key_name(key)} has shape {tuple(value.shape)}; "
            f"{tuple(shape)} was expected."
        )
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise PolicyError(
            f"the policy's output {key_name(key)} has dtype {value.dtype}; {dtype} was expected. "
            "Convert it in the policy, so that nothing is rounded behind your back."
        )
    return value.astype(dtype, copy=False)


def check_action(leaf: Leaf, values: Mapping[Key, Any], batch: tuple[int, ...]) -> None:
    """Refuse an action that does not fit the action space, with a hint where one is likely."""
    if leaf.key not in values:
        raise PolicyError(
            f"the policy gives no {key_name(leaf.key)}; it gave "
            f"{[key_name(key) for key in values]}. Return the action, or a dict with an 'action'."
        )
    array, shape = to_array(values[leaf.key]), (*batch, *leaf.shape)
    if array.shape != shape:
        raise PolicyError(_shape_message(leaf, array, shape, batch))
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise PolicyError(
            f"the policy's action {key_name(leaf.key)} has dtype {array.dtype}, but the action "
            f"space {leaf.space} needs {leaf.dtype}. Convert it in the policy."
        )
    check_range(leaf, array)


def _shape_message(
    leaf: Leaf, array: np.ndarray, shape: tuple[int, ...], batch: tuple[int, ...]
) -> str:
    text = (
        f"the policy's action {key_name(leaf.key)} has shape {tuple(array.shape)}, but the action "
        f"space {leaf.space} with batch shape {batch} needs {shape}."
    )
    if isinstance(leaf.space, spaces.Discrete) and array.shape == (*shape, int(leaf.space.n)):
        return f"{text} It looks like logits or a one-hot vector: return its argmax(-1)."
    if array.shape == (*shape, 1):
        return f"{text} Drop the last dimension with squeeze(-1)."
    return text


def check_range(leaf: Leaf, array: np.ndarray, error: type[SwathError] = PolicyError) -> None:
    """Refuse numbers that a discrete action space does not have, and non-finite ones."""
    if array.size == 0:
        return
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise error(f"the policy's action {key_name(leaf.key)} is not finite: {array}.")
        return
    low, high = _bounds(leaf.space)
    if low is not None and ((array < low) | (array > high)).any():
        raise error(
            f"the policy's action {key_name(leaf.key)} has values from {array.min()} to "
            f"{array.max()}, outside the action space {leaf.space}."
        )


def _bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    return None, None  # a Box: envs clip or accept as they see fit
