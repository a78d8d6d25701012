"""Policies that take and return a TensorDict: modules of `tensordict.nn`, and functions of `td`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from swath.errors import PolicyError, UsageError
from swath.policies.base import Interface, Path, State, TorchPolicy
from swath.policies.calls import Call, as_key, as_keys, joined, unwrap
from swath.policies.probing import Trial
from swath.tree import Key, key_name, nest

__all__ = ["TensorDictPolicy", "is_tensordict_policy"]

_IS_INIT: Key = ("is_init",)
_FLAGS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))
_TRAJ_IDS: Key = ("collector", "traj_ids")
_OFFERED = (*_FLAGS, _TRAJ_IDS)
"""What a policy may read that is no observation."""


def is_tensordict_policy(policy: Any) -> bool:
    """Tell whether a policy takes and returns a TensorDict."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    # A compiled module and the like, or one of TorchRL's callables that are no modules.
    return (
        TensorDictModuleBase.is_tdmodule_compatible(policy)
        or (type(policy).__module__.startswith("torchrl.") and not _is_module(policy))
        or _says_so(policy)
    )


def _is_module(policy: Any) -> bool:
    return isinstance(policy, torch.nn.Module)


def _says_so(policy: Any) -> bool:
    """Tell whether the one argument that a callable must be given is called or typed as one."""
    policy = getattr(policy, "_orig_mod", policy)  # of a compiled module
    try:
        called = policy.forward if _is_module(policy) else policy
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # some things of C have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        return False
    first, *others = parameters
    if any(one.default is one.empty and one.kind in positional for one in others):
        return False
    kind = first.annotation
    typed = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return first.name in ("tensordict", "td") or "TensorDict" in typed


class TensorDictPolicy(TorchPolicy):
    """The adapter for what reads and writes TensorDicts."""

    def __init__(self, interface: Interface, policy: Any) -> None:
        super().__init__(interface, policy)
        self._apart: list[Call] | None = None
        observed = [leaf.key for leaf in interface.observations]
        in_keys = as_keys(getattr(policy, "in_keys", None) or ())
        out_keys = getattr(policy, "out_keys", None)
        self._out_keys = None if out_keys is None else as_keys(out_keys)
        """What it writes, if it says so."""
        written = self._out_keys or ()
        # What it also writes at the root is carried from there, and goes in as it came out.
        followed = [key for key in in_keys if ("next", *key) in written and key not in written]
        self.primed = [key for key in followed if key in observed]
        states = [key for key in followed if key not in observed]
        self.states = _states(policy, states)
        self.needs_is_init = _IS_INIT in in_keys and _IS_INIT not in observed
        offered = [key for key in _OFFERED if key in (in_keys or _FLAGS)]
        self.inputs = [*observed, *states, *[_IS_INIT] * self.needs_is_init, *offered]
        there = [*self.inputs, *written]
        missing = [key for key in in_keys if not any(t[: len(key)] == key for t in there)]
        if missing and not getattr(policy, "partial_tolerant", False):
            raise UsageError(
                f"the policy reads {', '.join(map(key_name, missing))}, which nothing provides. "
                f"The env provides {', '.join(map(key_name, observed))}. Change the in_keys of "
                "the policy; a recurrent state needs ('next', key) among its out_keys."
            )

    @property
    def unwrapped(self) -> bool:
        """Whether the inner modules are called directly."""
        return self._apart is not None

    @property
    def carries(self) -> bool:
        """Whether it is given back what it wrote: where its parts are called, all is known."""
        return not self.unwrapped

    def ask(self, policy: Callable[..., Any], rows: Sequence[torch.Tensor]) -> Any:
        flat = dict(zip(self.inputs, rows, strict=True))
        values = nest({**self.carried.values, **flat})
        given = TensorDict(values, self.interface.batch_shape, device=self.asked_device)
        for key, shape in self.interface.nested.items():
            given.get(key).batch_size = (*self.interface.batch_shape, *shape)
        answer = policy(given)
        if isinstance(answer, TensorDictBase):
            self.carried.note(answer, given, flat)
            if self.compile_with is not None:
                self.carried.keep()  # a compiled policy may write its next answer there
        return answer

    def learn(self, rows: Mapping[Key, torch.Tensor]) -> Trial:
        try:
            trial = super().learn(rows)
        except KeyError:
            further = [key for key in _OFFERED if key not in self.inputs and key in rows]
            if self.forms or not further:
                raise
            self.inputs += further  # it may read more than its in_keys say
            trial = super().learn(rows)
        finally:
            self.carried.clear()
        return trial

    def read(self, answer: Any, rows: Sequence[torch.Tensor]) -> dict[Key, Path]:
        if not isinstance(answer, TensorDictBase):
            raise PolicyError(
                f"the policy took a TensorDict and returned {type(answer).__name__}; return the "
                "TensorDict, or another one with the action in it."
            )
        written, paths = self._written(answer, rows), dict[Key, Path]()
        carried = {state.key for state in self.states}.union(self.primed)
        for key in written:
            if key[0] == "next" and key[1:] in carried:
                paths[key[1:]] = (key,)
            elif not any(name.startswith("_") for name in key):  # private keys stay private
                paths[key] = (key,)
        return paths

    def _written(self, answer: TensorDictBase, rows: Sequence[torch.Tensor]) -> Sequence[Key]:
        """Return the keys of what the policy wrote."""
        if self._out_keys is not None:
            actions = [leaf.key for leaf in self.interface.actions]  # not all policies name them
            known = answer.select(*self._out_keys, *actions, strict=False)
            return as_keys(known.keys(True, True))
        given = dict(zip(self.inputs, rows, strict=True))
        keys = as_keys(answer.keys(True, True))
        observed = {leaf.key for leaf in self.interface.observations}
        self.primed = [key[1:] for key in keys if key[0] == "next" and key[1:] in observed]
        return [key for key in keys if key not in given or not _is_same(answer[key], given[key])]

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


def _is_same(value: Any, given: torch.Tensor) -> bool:
    return value is given or (
        isinstance(value, torch.Tensor) and value.shape == given.shape and torch.equal(value, given)
    )


def _states(module: Any, keys: Sequence[Key]) -> list[State]:
    """Return the recurrent states: what is read at the root and written below `next`."""
    if not keys:
        return []
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
