"""Taking a `tensordict.nn` module apart into the calls that it makes.

Calling such a module through a fresh TensorDict costs about 90 us a step, more than a small
network. Its inner calls can read and write a plain list instead:

```
 module --unwrap--> steps, by key --Program--> runs, by number in a list of values
```

A module is taken apart only if it is of a class, and set up in a way, that is known to do nothing
else; the caller then compares both ways on a first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type as current_interaction_type

from swath.policies.shortcuts import is_altered, shortened
from swath.tree import Key

__all__ = ["Call", "Program", "Step", "as_key", "unwrap"]

Values = list[Any]
Run = Callable[[Values], None]


def as_key(key: Any) -> Key:
    """Return any spelling of a TensorDict key as a flat tuple of strings."""
    if isinstance(key, str):
        return (key,)
    return tuple(name for part in key for name in as_key(part))


class Slots:
    """Numbers for keys: where each value stands in a list."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._numbers = {key: number for number, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, keys: Sequence[Key]) -> list[int]:
        """Return the numbers of values that are there; KeyError if one is not."""
        return [self._numbers[key] for key in keys]

    def write(self, keys: Sequence[Key]) -> list[int]:
        """Return the numbers of values to be written, new ones for new keys."""
        for key in keys:
            self._numbers.setdefault(key, len(self._numbers))
        return self.read(keys)


@dataclass(frozen=True)
class Call:
    """Calls a function of tensors."""

    inner: Callable[..., Any]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]

    def linked(self, slots: Slots) -> Run:
        """Return this step as a function of the list of values."""
        inner, reads, writes = self.inner, slots.read(self.reads), slots.write(self.writes)

        def run(values: Values) -> None:
            out = inner(*[values[number] for number in reads])
            if not isinstance(out, tuple):
                out = (out,)
            for number, value in zip(writes, out, strict=True):
                values[number] = value

        return run


@dataclass(frozen=True)
class Sample:
    """Chooses from the distribution of a probabilistic module."""

    module: Any
    names: tuple[str, ...]
    """The parameters of the distribution."""
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    """The choice and, if asked for, its log-probability."""
    joint: Callable[..., Any] | None
    """TorchRL's function that draws and rates at once."""

    def linked(self, slots: Slots) -> Run:
        """Return this step as a function of the list of values."""
        module, rated = self.module, len(self.writes) == 2
        reads, writes = slots.read(self.reads), slots.write(self.writes)
        parameters = list(zip(self.names, reads, strict=True))

        def run(values: Values) -> None:
            given = {name: values[number] for name, number in parameters}
            dist = module.distribution_class(**given, **module.distribution_kwargs)
            how = current_interaction_type() or module.default_interaction_type
            if self.joint is not None and rated and how is InteractionType.RANDOM:
                out = self.joint(dist, torch.Size(), reparameterize=dist.has_rsample)
            else:
                choice = module._dist_sample(dist, interaction_type=how)
                out = (choice, dist.log_prob(choice)) if rated else (choice,)
            for number, value in zip(writes, out, strict=True):
                values[number] = value

        return run


Step = Call | Sample


class Program:
    """Steps put together: `forward(*rows)` gives the values of `outputs`.

    Args:
        steps: What `unwrap` returned.
        inputs: The keys of the rows.
        outputs: The keys of the values to return.
    """

    def __init__(self, steps: list[Step], inputs: Sequence[Key], outputs: Sequence[Key]) -> None:
        slots = Slots(inputs)
        self._inputs, self._outputs = inputs, outputs
        self.steps, self._runs = steps, [step.linked(slots) for step in steps]
        self._blank = [None] * (len(slots) - len(inputs))
        self._wanted = slots.read(outputs)

    def shortened(self) -> Program:
        """Return this program with its modules called the shortest way."""
        steps = [
            replace(step, inner=shortened(step.inner)) if isinstance(step, Call) else step
            for step in self.steps
        ]
        return Program(steps, self._inputs, self._outputs)

    def forward(self, *rows: torch.Tensor) -> Sequence[Any]:
        """Run all steps and return the outputs."""
        return self.pick(self.run(rows))

    def run(self, rows: Sequence[torch.Tensor]) -> Values:
        """Run all steps and return all values."""
        values = [*rows, *self._blank]
        for run in self._runs:
            run(values)
        return values

    def pick(self, values: Values) -> Sequence[Any]:
        """Return the outputs among all values."""
        return [values[number] for number in self._wanted]


def unwrap(module: Any) -> list[Step] | None:
    """Return the inner calls of a module as steps on a dict of values, or None if unsure.

    Steps of a module that was not changed since are equal.
    """
    if not isinstance(module, torch.nn.Module) or is_altered(module):
        return None
    forward = type(module).forward
    if forward in (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward):
        return _unwrap_sequence(module)
    if forward is TensorDictModule.forward:
        return _unwrap_module(module)
    if isinstance(module, ProbabilisticTensorDictModule):
        return _unwrap_probabilistic(module)
    return None


def _unwrap_sequence(module: Any) -> list[Step] | None:
    if (
        type(module)._run_module is not TensorDictSequential._run_module
        or module._select_before_return
        or module.inplace not in (None, True)
    ):
        return None
    parts = list(module._module_iter())
    if isinstance(module, ProbabilisticTensorDictSequential):
        if not module._requires_sample:  # an earlier part has made the sample
            return None
        if not module.return_composite:
            parts = [module.det_part, parts[-1]]
    steps: list[Step] = []
    for part in parts:
        inner = unwrap(part)
        if inner is None:
            return None
        steps += inner
    return steps


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
    reads = tuple(as_key(key) for key in module.in_keys)
    return [Call(module.module, reads, tuple(as_key(key) for key in module.out_keys_source))]


def _unwrap_probabilistic(module: Any) -> list[Step] | None:
    kind = type(module)
    joint = None
    if kind.forward is not ProbabilisticTensorDictModule.forward:
        torchrl: Any = sys.modules.get("torchrl.modules.tensordict_module.probabilistic")
        joint = getattr(torchrl, "sample_and_log_prob", None)
        if joint is None or kind.forward is not torchrl.SafeProbabilisticModule.forward:
            return None
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
    names = tuple(as_key(key)[-1] for key in module.dist_keys)
    reads = tuple(as_key(key) for key in module.in_keys)
    writes = [module.dist_sample_keys[0]]
    if module.return_log_prob:
        writes.append(module.log_prob_key)
    return [Sample(module, names, reads, tuple(as_key(key) for key in writes), joint)]
