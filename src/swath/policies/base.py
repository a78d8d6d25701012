"""What the rollout loop calls: an adapter with known inputs and outputs, bound to a slab.

```
 row t of the slab --rows--> call(*rows) --values--> row t of the slab (next states: row t + 1)
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
from operator import itemgetter
from typing import Any

import gymnasium as gym
import torch

from swath.errors import PolicyError
from swath.memory import Field, Slab, leaf_dtype, nested_shapes
from swath.policies.calls import Call, joined, short
from swath.policies.carried import Carried
from swath.policies.outputs import LONE_ENV, Form, check_free, check_range
from swath.policies.probing import Trial, attempt, modules_of, repeats
from swath.policies.shortcuts import installed
from swath.policies.staging import Staging
from swath.tree import Key, Leaf, action_leaves, fetch, key_name, observation_leaves

__all__ = ["Act", "Interface", "Path", "Policy", "State", "TorchPolicy"]

Act = Callable[[int], None]
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Interface:
    """What an env shows to a policy."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    batched: bool
    lead: tuple[int, ...] | None = None
    """How the envs are arranged, if not in one row."""
    leaves: tuple[Sequence[Leaf], Sequence[Leaf]] | None = None
    """Those of observation and action, if they are not those of the spaces."""

    @cached_property
    def observations(self) -> Sequence[Leaf]:
        """The leaves of one env's observation."""
        return self.leaves[0] if self.leaves else observation_leaves(self.observation_space)

    @cached_property
    def actions(self) -> Sequence[Leaf]:
        """The leaves of one env's action."""
        return self.leaves[1] if self.leaves else action_leaves(self.action_space)

    @property
    def by_name(self) -> bool:
        """Whether a policy of one argument gets the entry of that name, as with TorchRL's envs."""
        return any(leaf.exact for leaf in self.actions)

    @cached_property
    def nested(self) -> dict[Key, tuple[int, ...]]:
        """The TensorDicts in an observation that have batch dimensions of their own, and which."""
        return nested_shapes(
            [Field(o.key, o.shape, torch.uint8, nested=o.nested) for o in self.observations]
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions that a policy sees."""
        if self.lead is not None:
            return self.lead
        return (self.num_envs,) if self.batched else ()


@dataclass(frozen=True)
class State:
    """One tensor that a recurrent policy carries from step to step, per env."""

    key: Key
    initial: torch.Tensor


class Policy:
    """What the loop calls."""

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self.extras: list[Field] = []
        """What it stores beside the action."""
        self.states: list[State] = []
        """What it carries from step to step."""
        self.primed: list[Key] = []
        """Observations that are such states, too: the env only says how they start."""
        self.carried = Carried()
        """What it wrote at its last step, where it is given that back."""
        self.needs_is_init = False
        """Reads a flag that is True at the first step of an episode."""
        self.device = torch.device("cpu")
        """Where it computes."""
        self.asked_device: torch.device | None = None
        """Where the user said that it computes."""
        self.modules: list[torch.nn.Module] = []

    @property
    def carries(self) -> bool:
        """Whether it is given back what it wrote."""
        return False

    @property
    def can_be_recorded(self) -> bool:
        """Whether its next step reads tensors that are there and will stay."""
        return bool(self.carried.values) or not self.carries

    def bound(self, slab: Slab, steps: int) -> AbstractContextManager[Act]:
        """Give the function that acts at step t of this slab; entered once per rollout."""
        raise NotImplementedError


class TorchPolicy(Policy):
    """The adapter for everything that computes.

    Subclasses set `inputs` (keys read), `arguments` (from their rows to what the user's policy is
    called with; None if that is the rows), and say in `read` where its answer has which value.
    """

    inputs: list[Key]
    arguments: Callable[[Sequence[torch.Tensor]], Sequence[Any]] | None = None
    calls: list[Call]
    """What is called at each step."""
    outputs: list[Key]
    """The keys under which the calls give the values of `forms`."""
    copies_inputs = False
    """The policy keeps or changes what it is given, so it gets copies."""
    compile_with: Mapping[str, Any] | None = None
    graphed = False
    """Run it as a CUDA graph if it computes on another device than the slab's; see `Staging`."""
    staging: Staging | None = None
    takes_shortcuts = False
    """Layers may be called without `nn.Module.__call__`; see `shortcuts`."""

    def __init__(self, interface: Interface, policy: Any) -> None:
        super().__init__(interface)
        self.policy = policy
        self.modules = modules_of(policy)
        self.paths: dict[Key, Path] = {}
        self.forms: list[Form] = []

    def ask(self, policy: Callable[..., Any], rows: Sequence[torch.Tensor]) -> Any:
        """Return what a policy, the user's or a compiled one, answers to these rows."""
        return policy(*(self.arguments(rows) if self.arguments else rows))

    def read(self, answer: Any, rows: Sequence[torch.Tensor]) -> dict[Key, Path]:
        """Return where in the policy's answer to these rows each value stands."""
        raise NotImplementedError

    def learn(self, rows: Mapping[Key, torch.Tensor]) -> Trial:
        """Call the policy on these rows, to learn what it writes; it is left as it was."""

        def call(*inputs: torch.Tensor) -> list[Any]:
            answer = self.ask(self.policy, inputs)
            self.paths.update(self.read(answer, inputs))
            return [fetch(answer, path) for path in self.paths.values()]

        trial = attempt(self.modules, call, [rows[key] for key in self.inputs])
        self.settle(dict(zip(self.paths, trial.values, strict=True)))
        self.copies_inputs, self.outputs = trial.keeps_inputs, list(self.paths)
        self.calls = self.choose(trial, rows)
        return trial

    def advice(self, error: Exception, rows: Mapping[Key, torch.Tensor]) -> str:
        """Return what may help, in whole sentences, where the policy has failed on these rows."""
        if self.interface.batched:
            return ""
        try:
            with_batch = [rows[key][None] for key in self.inputs]
            attempt(self.modules, lambda *inputs: [self.ask(self.policy, inputs)], with_batch)
        except Exception:  # of the user's code
            return ""
        return LONE_ENV

    def settle(self, values: Mapping[Key, Any]) -> None:
        """Fix the form of every output from the first values, after checking them."""
        batch = self.interface.batch_shape
        needed = {leaf.key: Form.of_action(leaf, batch) for leaf in self.interface.actions}
        for state in self.states:
            shape = (*batch, *state.initial.shape)
            needed[state.key] = Form(state.key, shape, state.initial.dtype, leads=len(batch))
        for leaf in self.interface.observations:
            if leaf.key in self.primed:  # the env has row t + 1, until the step is made
                shape, key = (*batch, *leaf.shape), ("next", *leaf.key)
                needed[leaf.key] = Form(key, shape, leaf_dtype(leaf), leads=len(batch))
        for key in needed:
            if key not in values:
                raise PolicyError(
                    f"the policy returned no {key_name(key)}; it returned "
                    f"{[key_name(key) for key in values]}. Return it, or a dict that has it."
                )
        taken = {*(leaf.key for leaf in self.interface.observations), *self.inputs, *needed}
        for key, value in values.items():
            form = needed.get(key)
            if form is None:
                check_free(key, taken, also_at_root=key[1:] in values)
                form = Form.of_extra(key, value, batch)
                self.extras.append(Field(key, form.shape[len(batch) :], form.dtype))
            array = form.fit(value)
            if form.leaf is not None:
                check_range(form.leaf, array)
            self.forms.append(form)

    def choose(self, trial: Trial, rows: Mapping[Key, torch.Tensor]) -> list[Call]:
        """Return what to call at each step, to do what the policy did in this trial."""
        return [self.as_it_is()]

    def as_it_is(self) -> Call:
        """Return the whole policy as one call."""
        policy, paths = self.compiled(self.policy), list(self.paths.values())
        inputs, outputs = tuple(self.inputs), tuple(self.outputs)
        if self.arguments is None and paths == [()]:
            return Call(policy, inputs, outputs)
        self._policy, self._pick = policy, _picker(paths)
        return Call(self._answer, inputs, outputs)

    def _answer(self, *rows: torch.Tensor) -> Any:
        answer = self.ask(self._policy, rows)
        try:
            return self._pick(answer)
        except (LookupError, TypeError) as error:
            raise PolicyError(
                f"the policy returned a {type(answer).__name__} that differs from its first "
                f"call, when it returned {', '.join(map(key_name, self.paths))}. Always return "
                "the same entries."
            ) from error

    def refresh(self) -> None:
        """Heed hooks and other changes of the policy since the last rollout."""

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call as it is to be made: through `torch.compile` if the user asked so."""
        return call if self.compile_with is None else torch.compile(call, **self.compile_with)

    def repeats(self, trial: Trial, calls: list[Call], rows: Mapping[Key, torch.Tensor]) -> bool:
        """Tell whether these calls do what the policy did in this trial, bit for bit."""

        def call(*inputs: torch.Tensor) -> Sequence[Any]:
            whole = joined(calls, self.inputs, self.outputs)
            given = dict(zip(self.inputs, inputs, strict=True))
            out = whole.inner(*[given[key] for key in whole.reads])
            return [out] if len(self.outputs) == 1 else out

        return repeats(trial, self.modules, call, [rows[key] for key in self.inputs])

    @contextlib.contextmanager
    def bound(self, slab: Slab, steps: int) -> Iterator[Act]:
        self.refresh()
        with installed(self.modules if self.takes_shortcuts else ()):
            try:
                yield self.bind(slab)
            finally:
                self.carried.keep()

    def bind(self, slab: Slab) -> Act:
        """Return `act(t)` for this slab."""
        calls = [short(call) for call in self.calls] if self.takes_shortcuts else self.calls
        call = joined(calls, self.inputs, self.outputs)
        inner = _on_copies(call.inner) if self.copies_inputs else call.inner
        if self.device != slab.device:
            self.staging = self.staging or Staging(self, call.reads, slab)
            return self.staging.bind(inner, slab)
        rows = [slab.rows(key, self.interface.batch_shape) for key in call.reads]
        writes = [form.writer(slab) for form in self.forms]

        def act(t: int) -> None:
            values = inner(*[row[t] for row in rows])
            for write, value in zip(writes, values, strict=True):
                write(t, value)

        if len(writes) > 1:
            return act
        (write,) = writes

        def act_for_one_value(t: int) -> None:
            write(t, inner(*[row[t] for row in rows]))

        if len(rows) != 1:
            return act_for_one_value
        (row,) = rows

        def act_directly(t: int) -> None:
            write(t, inner(row[t]))

        return act_directly


def _on_copies(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *rows: inner(*[row.clone() for row in rows])


def _picker(paths: Sequence[Path]) -> Callable[[Any], Any]:
    """Return the function that takes the values at these paths out of an answer."""
    if all(len(path) == 1 for path in paths):
        return itemgetter(*[path[0] for path in paths])  # one call for all of them
    if len(paths) == 1:
        return lambda answer: fetch(answer, paths[0])
    return lambda answer: [fetch(answer, path) for path in paths]
