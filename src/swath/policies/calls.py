"""A policy as calls of tensors, by key; several calls joined into one without a TensorDict.

Calling a `tensordict.nn` module through a fresh TensorDict costs about 90 us a step, more than a
small network. Joined calls read and write a plain list instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from swath.policies.shortcuts import shortened
from swath.tree import Key

__all__ = ["Call", "joined", "short"]


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
