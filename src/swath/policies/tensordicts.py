"""Policies that are `tensordict.nn` modules, with `in_keys` and `out_keys`.

Calling such a module through a fresh TensorDict costs about 90 us a step, more than a small
network. So a module is taken apart into its inner calls (`unwrap`), which read and write a plain
dict. That is used only where the classes are known to do nothing else, and only after both ways
gave bit for bit the same values on the probe; otherwise the module is called the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type as current_interaction_type

from swath.errors import UsageError
from swath.policies.base import Interface, State, TorchPolicy
from swath.tree import Key, key_name, nest

__all__ = ["TensorDictPolicy", "is_tensordict_policy", "unwrap"]

Values = dict[Key, Any]
Step = Callable[[Values], None]

_IS_INIT: Key = ("is_init",)


def is_tensordict_policy(policy: Any) -> bool:
    """Tell whether a policy takes and returns a TensorDict."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    # TorchRL's RandomPolicy and a few others are callables on TensorDict without being modules.
    return type(policy).__module__.startswith("torchrl.") and not isinstance(
        policy, torch.nn.Module
    )


def as_key(key: Any) -> Key:
    """Return any spelling of a TensorDict key as a flat tuple of strings."""
    if isinstance(key, str):
        return (key,)
    return tuple(name for part in key for name in as_key(part))


class TensorDictPolicy(TorchPolicy):
    """The adapter for modules that read and write TensorDicts."""

    def __init__(self, interface: Interface, module: Any) -> None:
        super().__init__(interface)
        self.module = module
        observed = [leaf.key for leaf in interface.observations]
        in_keys = [as_key(key) for key in getattr(module, "in_keys", ())]
        self._out_keys = [as_key(key) for key in getattr(module, "out_keys", [("action",)])]
        self.needs_is_init = _IS_INIT in in_keys and _IS_INIT not in observed
        self.states = _states(module, in_keys, self._out_keys, observed)
        self.inputs = observed + [state.key for state in self.states]
        if self.needs_is_init:
            self.inputs.append(_IS_INIT)
        missing = [key for key in in_keys if key not in self.inputs]
        if missing:
            raise UsageError(
                f"the policy reads {', '.join(map(key_name, missing))}, which nothing provides. "
                f"The env gives {', '.join(map(key_name, observed))}. Change the in_keys of the "
                "policy; a recurrent state needs ('next', key) among its out_keys."
            )

    def probe(self, rows: Mapping[Key, torch.Tensor]) -> Mapping[Key, Any]:
        """Call the module both ways, keep the fast one if it is the same, return the values."""
        before = torch.get_rng_state()
        values = self._collect(self._call_plain([rows[key] for key in self.inputs]))
        self.settle(values)
        self.forward = self._forward_plain
        steps = unwrap(self.module)
        if steps is not None:
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            self._steps = steps
            fast = self._forward_fast(*[rows[key] for key in self.inputs])
            if torch.equal(torch.get_rng_state(), after) and all(
                _same(values[key], value) for key, value in zip(self.outputs, fast, strict=True)
            ):
                self.forward = self._forward_fast
        return values

    @property
    def unwrapped(self) -> bool:
        """Whether the inner modules are called directly."""
        return self.forward == self._forward_fast

    def _call_plain(self, rows: Sequence[torch.Tensor]) -> TensorDictBase:
        source = TensorDict(
            nest(dict(zip(self.inputs, rows, strict=True))), self.interface.batch_shape
        )
        return self.module(source)

    def _forward_plain(self, *rows: torch.Tensor) -> Sequence[Any]:
        out = self._call_plain(rows)
        return [out.get(self._source(key)) for key in self.outputs]

    def _forward_fast(self, *rows: torch.Tensor) -> Sequence[Any]:
        values: Values = dict(zip(self.inputs, rows, strict=True))
        for step in self._steps:
            step(values)
        return [values[self._source(key)] for key in self.outputs]

    def _source(self, key: Key) -> Key:
        return ("next", *key) if key in self._state_keys else key

    @property
    def _state_keys(self) -> set[Key]:
        return {state.key for state in self.states}

    def _collect(self, out: TensorDictBase) -> dict[Key, Any]:
        """Return what the module wrote, as flat values; private keys stay private."""
        values: dict[Key, Any] = {}
        for key in self._out_keys:
            name = key[1:] if key[0] == "next" and key[1:] in self._state_keys else key
            value = out.get(key, None)
            if value is None or isinstance(value, NonTensorData) or key[-1].startswith("_"):
                continue
            if isinstance(value, TensorDictBase):
                for inner, leaf in value.items(True, True):
                    values[(*name, *as_key(inner))] = leaf
            else:
                values[name] = value
        return values


def _states(
    module: Any, in_keys: Iterable[Key], out_keys: Iterable[Key], observed: Iterable[Key]
) -> list[State]:
    """Return the recurrent states: read at the root and written below `next`."""
    outs, known = set(out_keys), set(observed)
    keys = [key for key in in_keys if ("next", *key) in outs and key not in known]
    if not keys:
        return []
    initial = _initial_values(module)
    missing = [key for key in keys if key not in initial]
    if missing:
        raise UsageError(
            f"the recurrent state {', '.join(map(key_name, missing))} has no initial value. Give "
            "the policy an attribute initial_state: a dict from key to the tensor of one env."
        )
    return [State(key, initial[key]) for key in sorted(keys)]


def _initial_values(module: Any) -> dict[Key, torch.Tensor]:
    """Return initial states from an attribute, or from the primers that TorchRL's modules make."""
    given = getattr(module, "initial_state", None)
    if given is not None:
        return {as_key(k): v for k, v in TensorDict(given, []).items(True, True)}
    values: dict[Key, torch.Tensor] = {}
    for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        make_primer: Any = getattr(part, "make_tensordict_primer", None)
        if make_primer is not None:
            specs = make_primer().primers
            values.update({as_key(k): s.zero() for k, s in specs.items(True, True)})
    return values


def _same(a: Any, b: Any) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def unwrap(module: Any) -> list[Step] | None:
    """Return the inner calls of a module as steps on a dict of values, or None if unsure."""
    if not isinstance(module, torch.nn.Module) or _has_hooks(module):
        return None
    forward = type(module).forward
    if forward in (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward):
        return _unwrap_sequence(module)
    if forward is TensorDictModule.forward:
        return _unwrap_module(module)
    if forward is ProbabilisticTensorDictModule.forward:
        return _unwrap_probabilistic(module)
    return None


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _unwrap_sequence(module: Any) -> list[Step] | None:
    kind = type(module)
    if kind._run_module is not TensorDictSequential._run_module or module._select_before_return:
        return None
    if getattr(module, "inplace", None) not in (None, True):
        return None
    parts = [unwrap(part) for part in module._module_iter()]
    if any(part is None for part in parts):
        return None
    return [step for part in parts if part is not None for step in part]


def _unwrap_module(module: Any) -> list[Step] | None:
    kind = type(module)
    plain = (
        kind._call_module is TensorDictModule._call_module
        and kind._write_to_tensordict is TensorDictModule._write_to_tensordict
        and module._kwargs is None
        and not module.method_kwargs
        and module.method is None
        and not module._get_kwargs
        and module.inplace is True
    )
    if not plain:
        return None
    inner = module.module
    reads = [as_key(key) for key in module.in_keys]
    writes = [as_key(key) for key in module.out_keys_source]

    def call(values: Values) -> None:
        out = inner(*[values[key] for key in reads])
        if not isinstance(out, tuple):
            out = (out,)
        for key, value in zip(writes, out, strict=True):
            values[key] = value

    return [call]


def _unwrap_probabilistic(module: Any) -> list[Step] | None:
    kind = type(module)
    plain = (
        kind.get_dist is ProbabilisticTensorDictModule.get_dist
        and kind._dist_sample is ProbabilisticTensorDictModule._dist_sample
        and module.num_samples is None
        and getattr(module, "_generator", None) is None
        and getattr(module, "_generator_key", None) is None
        and len(module.dist_sample_keys) == 1
    )
    if not plain:
        return None
    names = [key[-1] if isinstance(key, tuple) else key for key in module.dist_keys]
    reads = [as_key(key) for key in module.in_keys]
    target = as_key(module.dist_sample_keys[0])
    kwargs = dict(module.distribution_kwargs or {})
    log_prob_key = as_key(module.log_prob_key) if module.return_log_prob else None

    def call(values: Values) -> None:
        params = {name: values[key] for name, key in zip(names, reads, strict=True)}
        dist = module.distribution_class(**params, **kwargs)
        sample = module._dist_sample(dist, interaction_type=current_interaction_type())
        values[target] = sample
        if log_prob_key is not None:
            values[log_prob_key] = dist.log_prob(sample)

    return [call]
