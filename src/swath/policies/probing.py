"""Calling a policy once before anything is collected, without leaving a trace in it.

The call tells what the policy writes. It also tells whether the policy keeps its inputs (a frame
stack, say) or changes them in place: then it cannot be given views of a slab, which is written
again later, and gets copies instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn.parameter import is_lazy

from swath.policies.outputs import to_array
from swath.tree import Key

__all__ = ["Trial", "attempt", "modules_of", "same_values", "takes_batch_of_one"]


@dataclass(frozen=True)
class Trial:
    """What came of a call."""

    values: dict[Key, Any]
    """Copies of what it returned."""
    keeps_inputs: bool
    """It still refers to what it was given, or has changed it."""
    random_state: bytes
    """Where the global random generators stood afterwards."""


def attempt(
    policy: Any,
    call: Callable[[Sequence[torch.Tensor]], Mapping[Key, Any]],
    rows: Sequence[torch.Tensor],
) -> Trial:
    """Make a call with copies of the rows, and put the policy and all generators back.

    Args:
        policy: The user's object that is called in the end.
        call: From the rows to flat values.
        rows: What to call it with.
    """
    with _untouched(policy):
        arrays = [to_array(row).copy() for row in rows]
        # A tensor made from an array keeps it alive, and so do all views of it.
        watches = [weakref.ref(array) for array in arrays]
        inputs = [torch.from_numpy(a).view(row.dtype) for a, row in zip(arrays, rows, strict=True)]
        values = {key: _copy(value) for key, value in call(inputs).items()}
        state = pickle.dumps(_random_states())
    changed = [a.tobytes() != to_array(row).tobytes() for a, row in zip(arrays, rows, strict=True)]
    del arrays, inputs
    if any(watch() is not None for watch in watches):
        gc.collect()  # what is left in a reference cycle is not kept
    kept = any(watch() is not None for watch in watches)
    return Trial(values, kept or any(changed), state)


def takes_batch_of_one(call: Any, row: torch.Tensor) -> bool:
    """Tell whether a module gives the same for a row and for a batch of that one row, bit for bit.

    PyTorch's layers take a longer way for vectors than for matrices of one row. Which kernels run
    depends on shapes alone, so a few values tell. They are tried on a copy of the module.
    """
    if not isinstance(call, torch.nn.Module) or not row.is_floating_point():
        return False
    noise = torch.Generator().manual_seed(0)
    inputs = [row + scale * torch.randn(row.shape, generator=noise) for scale in (0, 0.1, 1, 10)]
    try:
        module = copy.deepcopy(call)
        for one in inputs:
            alone, batch = (
                attempt(module, lambda rows: {("action",): module(*rows)}, [x])
                for x in (one, one.unsqueeze(0))
            )
            a, b = alone.values["action",], batch.values["action",]
            if not torch.equal(a.unsqueeze(0), b) or a.dtype is not b.dtype:
                return False
            if alone.random_state != batch.random_state or batch.keeps_inputs:
                return False
    except Exception:  # it cannot be copied, or takes no batch
        return False
    return True


def same_values(a: Trial, b: Trial) -> bool:
    """Tell whether two calls gave the same, bit for bit, and drew the same random numbers."""
    pairs = [(value, b.values.get(key)) for key, value in a.values.items()]
    return a.random_state == b.random_state and all(_same(*pair) for pair in pairs)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    first, second = to_array(a), to_array(b)
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy(), np.random.get_state(legacy=False), random.getstate()


@contextlib.contextmanager
def _untouched(policy: Any) -> Iterator[None]:
    """Restore the global generators, and the buffers of the modules behind a policy."""
    for_torch, for_numpy, for_python = _random_states()
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for root in modules_of(policy)
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if isinstance(buffer, torch.Tensor)
        and not isinstance(buffer, TensorDictBase)
        and not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        torch.set_rng_state(torch.from_numpy(for_torch))
        np.random.set_state(for_numpy)
        random.setstate(for_python)
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
        return [*modules_of(policy.__self__), *modules_of(policy.__func__)]
    if isinstance(policy, functools.partial):
        parts = [policy.func, *policy.args, *policy.keywords.values()]
        return [module for part in parts for module in modules_of(part)]
    parts = list(getattr(policy, "__dict__", {}).values())
    if inspect.isfunction(policy):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            names = inspect.getclosurevars(policy)
            parts += [*names.nonlocals.values(), *names.globals.values()]
    return [part for part in parts if isinstance(part, torch.nn.Module)]
