"""Policies that are `tensordict.nn` modules, with `in_keys` and `out_keys`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from swath.errors import UsageError
from swath.policies.base import Interface, Path, State, TorchPolicy
from swath.policies.calls import Call, as_key, as_keys, joined, unwrap
from swath.policies.probing import Trial
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

    def __init__(self, interface: Interface, policy: Any) -> None:
        super().__init__(interface, policy)
        self.arguments = self._tensordict
        self._apart: list[Call] | None = None
        observed = [leaf.key for leaf in interface.observations]
        in_keys = as_keys(getattr(policy, "in_keys", ()))
        self._out_keys = as_keys(getattr(policy, "out_keys", ()))
        carried = [key for key in in_keys if ("next", *key) in self._out_keys]
        self.states = _states(policy, carried, observed)
        self.needs_is_init = _IS_INIT in in_keys and _IS_INIT not in observed
        self.inputs = [*observed, *carried, *[_IS_INIT] * self.needs_is_init]
        # Parts of a nested key may be written by the policy itself, before it is read as a whole.
        there = [*self.inputs, *(key for key in self._out_keys if len(key) > 1)]
        missing = [key for key in in_keys if not any(t[: len(key)] == key for t in there)]
        if missing and not getattr(policy, "partial_tolerant", False):
            raise UsageError(
                f"the policy reads {', '.join(map(key_name, missing))}, which nothing provides. "
                f"The env gives {', '.join(map(key_name, observed))}. Change the in_keys of the "
                "policy; a recurrent state needs ('next', key) among its out_keys."
            )

    @property
    def unwrapped(self) -> bool:
        """Whether the inner modules are called directly."""
        return self._apart is not None

    def _tensordict(self, rows: Sequence[torch.Tensor]) -> tuple[TensorDict]:
        flat = dict(zip(self.inputs, rows, strict=True))
        return (TensorDict(nest(flat), self.interface.batch_shape),)

    def read(self, answer: Any) -> dict[Key, Path]:
        states = {state.key for state in self.states}
        actions = [leaf.key for leaf in self.interface.actions]  # not all policies name them
        paths: dict[Key, Path] = {}
        for key in as_keys(answer.select(*self._out_keys, *actions, strict=False).keys(True, True)):
            name = key[1:] if key[0] == "next" and key[1:] in states else key
            if name in states or name[-1][0] != "_":  # private keys stay private
                paths[name] = (key,)
        return paths

    def choose(self, trial: Trial, rows: Mapping[Key, torch.Tensor]) -> list[Call]:
        """Take the module apart if its parts then do the same."""
        self.outputs = [source for (source,) in self.paths.values()]
        apart = unwrap(self.policy)
        if apart is None or not self.repeats(trial, [_checked(call) for call in apart], rows):
            return [self.as_it_is()]
        self._apart = apart
        if self.compile_with is None:
            return apart
        whole = joined(apart, self.inputs, self.outputs)
        return [replace(whole, inner=self.compiled(whole.inner))]

    def refresh(self) -> None:
        if self._apart is not None and unwrap(self.policy) != self._apart:
            self._apart = None
            self.calls = [self.as_it_is()]


def _checked(call: Call) -> Call:
    """Return a call that fails where a TensorDict would convert or nest what it returns."""

    def inner(*values: Any) -> Any:
        out = call.inner(*values)
        parts = out if isinstance(out, tuple) else (out,)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise TypeError(f"{call.writes} are not all tensors")
        return out

    return replace(call, inner=inner)


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
