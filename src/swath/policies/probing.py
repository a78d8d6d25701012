"""Calling a policy before anything is collected, without leaving a trace in it.

The first call tells what the policy writes. It also tells whether the policy keeps its inputs (a
frame stack, say) or changes them in place: then it cannot be given views of a slab, which is
written again later, and gets copies instead. Further calls tell whether a faster way does the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn.parameter import is_lazy

from swath.policies.outputs import to_array
from swath.seeding import RandomState

__all__ = ["Trial", "attempt", "modules_of", "repeats", "unchanged_buffers"]

Forward = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Trial:
    """What came of a call."""

    values: list[Any]
    """Copies of what it returned."""
    keeps_inputs: bool
    """It still refers to what it was given, or has changed it."""
    random_state: bytes
    """Where the global random generators stood afterwards."""
    draws: bool
    """It has drawn random numbers."""


def attempt(
    modules: Sequence[torch.nn.Module], call: Forward, rows: Sequence[torch.Tensor]
) -> Trial:
    """Make a call with copies of the rows, and put the modules and all generators back."""
    gpu = next((row.device for row in rows if row.is_cuda), None)
    random_state = RandomState.from_global(gpu)
    before = _as_bytes(random_state)
    with random_state.installed(), unchanged_buffers(modules):
        inputs = [row.clone() for row in rows]
        # A storage, as Python sees it, lives as long as any tensor that views it.
        watches = [weakref.ref(tensor.untyped_storage()) for tensor in inputs]
        values = [_copy(value) for value in call(*inputs)]
    changed = [not _is_same(*pair) for pair in zip(inputs, rows, strict=True)]
    del inputs
    if any(watch() is not None for watch in watches):
        gc.collect()  # what is left in a reference cycle is not kept
    kept = any(watch() is not None for watch in watches)
    after = _as_bytes(random_state)
    return Trial(values, kept or any(changed), after, after != before)


def _as_bytes(random_state: RandomState) -> bytes:
    state = random_state.state_dict()
    state = {name: to_array(s) if isinstance(s, torch.Tensor) else s for name, s in state.items()}
    return pickle.dumps(state)


def repeats(
    trial: Trial,
    modules: Sequence[torch.nn.Module],
    call: Forward,
    rows: Sequence[torch.Tensor],
) -> bool:
    """Tell whether a call does what another did, bit for bit, random numbers drawn included."""
    try:
        other = attempt(modules, call, rows)
        return (
            len(other.values) == len(trial.values)
            and all(map(_is_same, trial.values, other.values))
            and other.random_state == trial.random_state
            and other.keeps_inputs <= trial.keeps_inputs
        )
    except Exception:  # the first call worked, so this is no way to make it
        return False


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    first, second = to_array(a), to_array(b)
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


@contextlib.contextmanager
def unchanged_buffers(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put the buffers of these modules back at the end."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for root in modules
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if isinstance(buffer, torch.Tensor)
        and not isinstance(buffer, TensorDictBase)
        and not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for module, name, buffer, saved in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, saved):
                with torch.no_grad():
                    buffer.copy_(saved)


def modules_of(policy: Any) -> list[torch.nn.Module]:
    """Return a policy that is a module, or the modules that a function or object refers to."""
    if isinstance(policy, torch.nn.Module):
        return [policy]
    if inspect.ismethod(policy):
        if _is_env(policy.__self__):
            return []
        return [*modules_of(policy.__self__), *modules_of(policy.__func__)]
    if isinstance(policy, functools.partial):
        parts = [policy.func, *policy.args, *policy.keywords.values()]
        return [module for part in parts for module in modules_of(part)]
    parts = list(getattr(policy, "__dict__", {}).values())
    if inspect.isfunction(policy):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            names = inspect.getclosurevars(policy)
            parts += [*names.nonlocals.values(), *names.globals.values()]
    return [part for part in parts if isinstance(part, torch.nn.Module) and not _is_env(part)]


def _is_env(thing: Any) -> bool:
    """Tell one of TorchRL's envs, which are modules without being part of a policy."""
    return any(
        kind.__name__ == "EnvBase" and kind.__module__.startswith("torchrl.")
        for kind in type(thing).__mro__
    )
