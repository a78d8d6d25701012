"""What the rollout loop calls: an adapter with known inputs and outputs, bound to a slab.

```
 row t of the slab --rows--> forward(*rows) --values--> row t of the slab (next states: row t + 1)
```

An adapter says which keys it reads and which it writes; `bind` turns it into one function of the
step number. No TensorDict is built and nothing is allocated on our side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import gymnasium as gym
import torch

from swath.errors import PolicyError
from swath.memory import Field, Slab
from swath.policies.outputs import Form, check_free, extra_field
from swath.policies.probing import modules_of
from swath.policies.shortcuts import installed, shortened
from swath.tree import Key, Leaf, action_leaves, key_name, observation_leaves

__all__ = ["Act", "Interface", "Policy", "State", "TorchPolicy"]

Act = Callable[[int], None]


@dataclass(frozen=True)
class Interface:
    """What an env shows to a policy."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    batched: bool

    @cached_property
    def observations(self) -> list[Leaf]:
        """The leaves of one env's observation."""
        return observation_leaves(self.observation_space)

    @cached_property
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

    def bound(self, slab: Slab, steps: int) -> AbstractContextManager[Act]:
        """Give the function that acts at step t of this slab; entered once per rollout."""
        ...


class TorchPolicy:
    """The adapter for everything that computes.

    Subclasses set `inputs` (keys read) and `forward`, which takes their rows and returns the
    values of `forms` in order. Where one row makes the action and nothing else, they may set
    `direct`: the key of that row, and a function of it.
    """

    inputs: list[Key]
    forward: Callable[..., Sequence[Any]]
    direct: tuple[Key, Callable[[torch.Tensor], Any]] | None = None
    copies_inputs = False
    """The policy keeps or changes what it is given, so it gets copies."""
    compile_with: Mapping[str, Any] | None = None
    takes_batch_of_one = False
    """A lone env's observation may be given with a batch dimension of one; see `probing`."""
    takes_shortcuts = False
    """Layers may be called without `nn.Module.__call__`; see `shortcuts`."""

    def __init__(self, interface: Interface, user_policy: Any) -> None:
        self.interface = interface
        self.modules = modules_of(user_policy)
        self.forms: list[Form] = []
        self.extras: list[Field] = []
        self.states: list[State] = []
        self.needs_is_init = False

    def learn(self, rows: Mapping[Key, torch.Tensor]) -> None:
        """Call the policy on these rows, to learn what it writes; it is left as it was."""
        raise NotImplementedError

    def settle(self, values: Mapping[Key, Any]) -> None:
        """Fix the form of every output from the first values, after checking them."""
        batch = self.interface.batch_shape
        actions = [Form.of_action(leaf, batch) for leaf in self.interface.actions]
        states = [Form(s.key, (*batch, *s.initial.shape), s.initial.dtype) for s in self.states]
        for form in (*actions, *states):
            if form.key not in values:
                raise PolicyError(
                    f"the policy gives no {key_name(form.key)}; it gave "
                    f"{[key_name(key) for key in values]}. Return it, or a dict that has it."
                )
            form.check(form.fit(values[form.key]))
        needed = [form.key for form in (*actions, *states)]
        taken = {*(leaf.key for leaf in self.interface.observations), *self.inputs, *needed}
        for key in values:
            if key not in needed:
                check_free(key, taken)
                self.extras.append(extra_field(key, values[key], batch))
        extras = [Form(field.key, (*batch, *field.shape), field.dtype) for field in self.extras]
        self.forms = [*actions, *extras, *states]

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call as it is to be made: through `torch.compile` if the user asked so."""
        return call if self.compile_with is None else torch.compile(call, **self.compile_with)

    @contextlib.contextmanager
    def bound(self, slab: Slab, steps: int) -> Iterator[Act]:
        """See `Policy`."""
        with installed(self.modules if self.takes_shortcuts else ()):
            yield self.bind(slab)

    def bind(self, slab: Slab) -> Act:
        """Return `act(t)` for this slab."""
        batched = self.interface.batched
        writes = [
            form.writer(
                slab.arrays[form.key],
                carried=slab.layout.places[form.key].field.carried,
                batched=batched,
            )
            for form in self.forms
        ]
        if self.direct is not None:
            key, call = self.direct
            if self.takes_shortcuts:
                call = shortened(call)
            row, write = self._rows(slab, key), writes[0]
            if self.takes_batch_of_one:
                form = Form.of_action(self.interface.actions[0], (1,))
                row = slab.rows(key, True)
                write = form.writer(slab.arrays[form.key], carried=False, batched=True)

            def act_directly(t: int) -> None:
                write(t, call(row[t]))

            return act_directly
        rows, forward = [self._rows(slab, key) for key in self.inputs], self.forward

        def act(t: int) -> None:
            values = forward(*[row[t] for row in rows])
            for write, value in zip(writes, values, strict=True):
                write(t, value)

        return act

    def _rows(self, slab: Slab, key: Key) -> Any:
        rows = slab.rows(key, self.interface.batched)
        return _Copies(rows) if self.copies_inputs else rows


class _Copies:
    """Rows of which each is copied when it is asked for."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getitem__(self, t: int) -> torch.Tensor:
        return self._rows[t].clone()
