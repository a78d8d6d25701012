"""Policies that are `tensordict.nn` modules, with `in_keys` and `out_keys`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase

from swath.errors import UsageError
from swath.memory import Slab
from swath.policies.base import Act, Interface, State, TorchPolicy
from swath.policies.probing import Trial, attempt, same_values
from swath.policies.unwrapping import Call, Program, Step, as_key, unwrap
from swath.tree import Key, key_name, nest

__all__ = ["TensorDictPolicy", "is_tensordict_policy"]

_IS_INIT: Key = ("is_init",)


def is_tensordict_policy(policy: Any) -> bool:
    """Tell whether a policy takes and returns a TensorDict."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    # A compiled module and the like, or one of TorchRL's callables that are no modules.
    return TensorDictModuleBase.is_tdmodule_compatible(policy) or (
        type(policy).__module__.startswith("torchrl.") and not isinstance(policy, torch.nn.Module)
    )


class TensorDictPolicy(TorchPolicy):
    """The adapter for modules that read and write TensorDicts."""

    def __init__(self, interface: Interface, module: Any) -> None:
        super().__init__(interface, module)
        self.module = module
        self._program: Program | None = None
        observed = [leaf.key for leaf in interface.observations]
        in_keys = [as_key(key) for key in getattr(module, "in_keys", ())]
        self._out_keys = [as_key(key) for key in getattr(module, "out_keys", [("action",)])]
        carried = [key for key in in_keys if ("next", *key) in self._out_keys]
        self.states = _states(module, carried, observed)
        self.needs_is_init = _IS_INIT in in_keys and _IS_INIT not in observed
        self.inputs = [*observed, *carried, *[_IS_INIT] * self.needs_is_init]
        # Parts of a nested key may be written by the policy itself, before it is read as a whole.
        there = [*self.inputs, *(key for key in self._out_keys if len(key) > 1)]
        missing = [key for key in in_keys if not any(t[: len(key)] == key for t in there)]
        if missing and not getattr(module, "partial_tolerant", False):
            raise UsageError(
                f"the policy reads {', '.join(map(key_name, missing))}, which nothing provides. "
                f"The env gives {', '.join(map(key_name, observed))}. Change the in_keys of the "
                "policy; a recurrent state needs ('next', key) among its out_keys."
            )

    def learn(self, rows: Mapping[Key, torch.Tensor]) -> None:
        """See `TorchPolicy`: calls the module both ways, and keeps the fast one if it may."""
        inputs = [rows[key] for key in self.inputs]
        plain = attempt(self.module, self._call_plain, inputs)
        self.settle(plain.values)
        self.copies_inputs = plain.keeps_inputs
        states = {state.key for state in self.states}
        keys = [form.key for form in self.forms]
        self._sources = [("next", *key) if key in states else key for key in keys]
        steps = unwrap(self.module)
        self._use(None if steps is None else self._equivalent(steps, plain, inputs))

    def _equivalent(
        self, steps: list[Step], plain: Trial, inputs: Sequence[torch.Tensor]
    ) -> Program | None:
        """Return the steps put together, if they do bit for bit what the module did."""
        keys = [form.key for form in self.forms]

        def call(rows: Sequence[torch.Tensor]) -> dict[Key, Any]:
            values = program.run(rows)
            if not all(isinstance(value, torch.Tensor) for value in values):
                raise TypeError("a TensorDict would convert or nest what is no tensor")
            return dict(zip(keys, program.pick(values), strict=True))

        try:
            program = Program(steps, self.inputs, self._sources)
            fast = attempt(self.module, call, inputs)
        except Exception:  # the plain call worked, so it is the taking apart that failed
            return None
        return program if same_values(plain, fast) else None

    @property
    def unwrapped(self) -> bool:
        """Whether the inner modules are called directly."""
        return self._program is not None

    def _use(self, program: Program | None) -> None:
        """Choose how the module is called from now on."""
        self._program, self.direct = program, None
        if program is None:
            self._called = self.compiled(self.module)
            self.forward = self._forward_plain
            return
        self.forward = self.compiled(program.forward)
        only = program.steps[0] if len(program.steps) == len(self._sources) == 1 else None
        if isinstance(only, Call) and len(only.reads) == len(only.writes) == 1:
            self.direct = only.reads[0], self.compiled(only.inner)

    @contextlib.contextmanager
    def bound(self, slab: Slab, steps: int) -> Iterator[Act]:
        """See `Policy`; hooks and other changes since the last rollout are respected."""
        if self._program is not None and unwrap(self.module) != self._program.steps:
            self._use(None)
        elif self._program is not None and self.takes_shortcuts:
            self.forward = self._program.shortened().forward
        with super().bound(slab, steps) as act:
            yield act

    def _source(self, rows: Sequence[torch.Tensor]) -> TensorDict:
        flat = dict(zip(self.inputs, rows, strict=True))
        return TensorDict(nest(flat), self.interface.batch_shape)

    def _forward_plain(self, *rows: torch.Tensor) -> Sequence[Any]:
        out = self._called(self._source(rows))
        return [out.get(key) for key in self._sources]

    def _call_plain(self, rows: Sequence[torch.Tensor]) -> dict[Key, Any]:
        """Return what the module wrote, as flat values; private keys stay private."""
        out = self.module(self._source(rows))
        states = {state.key for state in self.states}
        values: dict[Key, Any] = {}
        for key in self._out_keys:
            name = key[1:] if key[0] == "next" and key[1:] in states else key
            value = out.get(key, None)
            if is_tensor_collection(value):
                for inner, leaf in value.items(True, True):
                    values[(*name, *as_key(inner))] = leaf
            elif isinstance(value, torch.Tensor) and (name in states or name[-1][0] != "_"):
                values[name] = value
        return values


def _states(module: Any, keys: Sequence[Key], observed: Sequence[Key]) -> list[State]:
    """Return the recurrent states: what is read at the root and written below `next`."""
    if not keys:
        return []
    clash = [key for key in keys if key in observed]
    if clash:
        raise UsageError(
            f"both the policy and the env give {', '.join(map(key_name, clash))}. swath carries "
            "recurrent states itself: take the TensorDictPrimer out of the env."
        )
    initial = _initial_values(module, keys)
    missing = [key for key in keys if key not in initial]
    if missing:
        raise UsageError(
            f"the recurrent state {', '.join(map(key_name, missing))} has no initial value. Give "
            "the policy an attribute initial_state: a dict from key to the tensor of one env."
        )
    return [State(key, initial[key].detach()) for key in keys]


def _initial_values(module: Any, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
    """Return initial states from an attribute, or from the primers that TorchRL's modules make."""
    given = getattr(module, "initial_state", None)
    if isinstance(given, torch.Tensor) and len(keys) == 1:
        return {keys[0]: given}
    if isinstance(given, (Mapping, TensorDictBase)):
        return {as_key(k): v for k, v in TensorDict(given, []).items(True, True)}
    values: dict[Key, torch.Tensor] = {}
    for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        make_primer: Any = getattr(part, "make_tensordict_primer", None)
        if make_primer is not None:
            specs = make_primer().primers
            values.update({as_key(k): s.zero() for k, s in specs.items(True, True)})
    return values
