"""A policy as calls of tensors, by key; a `tensordict.nn` module taken apart into such calls.

Calling such a module through a fresh TensorDict costs about 90 us a step, more than a small
network. Its inner calls can read and write a plain list instead:

```
 module --unwrap--> calls, by key --joined--> one call, by number in a list of values
```

A module is taken apart only if it is of a class, and set up in a way, that is known to do nothing
else; the caller then compares both ways on a first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type as current_interaction_type

from swath.compat.tensordict import draw, is_plain_choice, is_plain_module, plain_parts
from swath.policies.shortcuts import is_altered, shortened
from swath.tree import Key

__all__ = ["Call", "as_key", "as_keys", "joined", "short", "unwrap"]


@dataclass(frozen=True)
class Call:
    """A function of tensors, and the keys of what it takes and of what it returns.

    It returns a tuple, or the one value itself.
    """

    inner: Callable[..., Any]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


def short(call: Call) -> Call:
    """Return the call with its module, if it is one, called the shortest way."""
    return replace(call, inner=shortened(call.inner))


def joined(calls: Sequence[Call], inputs: Sequence[Key], outputs: Sequence[Key]) -> Call:
    """Return one call that makes all of these and gives `outputs`; KeyError if a key is missing."""
    if len(calls) == 1 and calls[0].writes == tuple(outputs):
        return calls[0]
    numbers = {key: number for number, key in enumerate(inputs)}
    steps = []
    for call in calls:
        reads = [numbers[key] for key in call.reads]
        writes = [numbers.setdefault(key, len(numbers)) for key in call.writes]
        steps.append((call.inner, reads, writes))
    blank = [None] * (len(numbers) - len(inputs))
    pick = itemgetter(*[numbers[key] for key in outputs])

    def inner(*rows: torch.Tensor) -> Any:
        values: list[Any] = [*rows, *blank]
        for inner, reads, writes in steps:
            out = inner(*[values[number] for number in reads])
            if not isinstance(out, tuple):
                out = (out,)
            for number, value in zip(writes, out, strict=True):
                values[number] = value
        return pick(values)

    return Call(inner, tuple(inputs), tuple(outputs))


def as_key(key: Any) -> Key:
    """Return any spelling of a TensorDict key as a flat tuple of strings."""
    if isinstance(key, str):
        return (key,)
    return tuple(name for part in key for name in as_key(part))


def as_keys(keys: Any) -> tuple[Key, ...]:
    """Return any spellings of TensorDict keys as flat tuples of strings."""
    return tuple(as_key(key) for key in keys)


class _Unsure(Exception):
    """A module may do more than we know of."""


def unwrap(module: Any) -> list[Call] | None:
    """Return the inner calls of a module, or None if unsure.

    Those of a module that was not changed since are equal.
    """
    try:
        return list(_calls(module))
    except _Unsure:
        return None


def _calls(module: Any) -> Iterator[Call]:
    if not isinstance(module, torch.nn.Module) or is_altered(module):
        raise _Unsure
    if isinstance(module, TensorDictSequential):
        parts = plain_parts(module)
        if parts is None:
            raise _Unsure
        for part in parts:
            yield from _calls(part)
    elif isinstance(module, TensorDictModule):
        if not is_plain_module(module):
            raise _Unsure
        yield Call(module.module, as_keys(module.in_keys), as_keys(module.out_keys_source))
    elif isinstance(module, ProbabilisticTensorDictModule):
        yield _choice(module)
    else:
        raise _Unsure


def _choice(module: Any) -> Call:
    known = ProbabilisticTensorDictModule
    joint = None
    if type(module).forward is not known.forward:
        torchrl: Any = sys.modules.get("torchrl.modules.tensordict_module.probabilistic")
        joint = getattr(torchrl, "sample_and_log_prob", None)
        safe = getattr(torchrl, "SafeProbabilisticModule", known)
        if joint is None or type(module).forward is not safe.forward:
            raise _Unsure
    if not is_plain_choice(module):
        raise _Unsure
    names = tuple(key[-1] for key in as_keys(module.dist_keys))
    writes = [module.dist_sample_keys[0], *[module.log_prob_key] * bool(module.return_log_prob)]
    inner = _Choice(module, names, len(writes) == 2, joint)
    return Call(inner, as_keys(module.in_keys), as_keys(writes))


@dataclass(frozen=True)
class _Choice:
    """Chooses from the distribution of a probabilistic module."""

    module: Any
    names: tuple[str, ...]
    """The parameters of the distribution."""
    rated: bool
    """Whether the log-probability of the choice is wanted too."""
    joint: Callable[..., Any] | None
    """TorchRL's function that draws and rates at once."""

    def __call__(self, *parameters: torch.Tensor) -> Any:
        module = self.module
        given = dict(zip(self.names, parameters, strict=True))
        dist = module.distribution_class(**given, **module.distribution_kwargs)
        how = current_interaction_type() or module.default_interaction_type
        if self.joint is not None and self.rated and how is InteractionType.RANDOM:
            return self.joint(dist, torch.Size(), reparameterize=dist.has_rsample)
        choice = draw(module, dist, how)
        return (choice, dist.log_prob(choice)) if self.rated else choice
