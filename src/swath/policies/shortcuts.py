"""Calling the layers of `torch.nn` without what `nn.Module.__call__` adds.

A small network spends more time in Python than in its kernels: an MLP 4-64-64-2 takes 32 us a call
on one observation, the kernels that give the same numbers in the shortest time 9 us. The user's own
code runs as it is, but for the length of a rollout `self.net` in it is a `Shortcut`, which calls
those kernels with the live parameters:

```
 Actor.forward --self.net--> Shortcut --> linear, tanh, linear, ...   (this thread, this rollout)
               --self.net--> nn.Sequential                            (other threads; afterwards)
```

Only layers whose class is exactly one of `torch.nn`, with no hooks or other changes, are shortened.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn

from swath.compat.torch import is_hooked, named_layers, named_parameters_of

__all__ = ["installed", "is_altered", "shortened"]

Call = Callable[[Any], Any]

_FUNCTIONS: dict[type, Call] = {nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid}
_IN_PLACE: dict[Call, Call] = {
    one: getattr(torch, f"{one.__name__}_") for one in (torch.tanh, torch.sigmoid, torch.relu)
}


def is_altered(module: nn.Module) -> bool:
    """Tell whether calling a module is more than calling the `forward` of its class."""
    return bool(
        is_hooked(module)
        or "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
    )


def shortened(call: Any) -> Any:
    """Return the shortest way to call a module once, with one argument; other callables as is."""
    if not isinstance(call, nn.Module) or is_altered(call):
        return call
    return Shortcut(call) if _is_stock(call) else call.forward


@contextlib.contextmanager
def installed(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Let the users' modules below these roots find shortcuts in the place of their layers.

    They are put into the instances' `__dict__`, where Python looks first; the registered modules
    stay as they are, so that parameters, `state_dict` and `modules()` see no difference.
    """
    placed = []
    try:
        for module in (module for root in roots for module in root.modules()):
            if not _is_stock(module):
                for name, child in named_layers(module).items():
                    if child is not None and _is_stock(child) and not is_altered(child):
                        shortcut = Shortcut(child)
                        if vars(module).setdefault(name, shortcut) is shortcut:
                            placed.append((vars(module), name, shortcut))
        yield
    finally:
        for names, name, shortcut in placed:
            if names.get(name) is shortcut:
                del names[name]


class Shortcut:
    """Stands for a layer: called by its own thread it runs the kernels, else it is the layer."""

    def __init__(self, module: nn.Module) -> None:
        vars(self).update(
            _module=module, _calls=tuple(_calls(module)), _thread=get_ident()
        )  # not by assignment, which goes to the layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or get_ident() != self._thread:
            return self._module(*args, **kwargs)
        value = args[0]
        for call in self._calls:
            value = call(value)
        return value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._module[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._module)

    def __len__(self) -> int:
        return len(self._module)

    def __reduce__(self) -> Any:
        return _same, (self._module,)  # a copy or a pickle holds the layer itself


def _same(module: nn.Module) -> nn.Module:
    return module


def _is_stock(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _calls(module: nn.Module) -> Iterator[Call]:
    """Yield the calls that one call of this module comes down to."""
    kind = type(module)
    if not _is_stock(module) or is_altered(module):
        yield module
    elif kind is nn.Sequential:
        fresh = False  # whether nobody else has what the layer before gives
        for child in named_layers(module).values():  # children() leaves out a layer's second use
            assert child is not None
            call: Any = None
            for call in _calls(child):
                yield _IN_PLACE.get(call, call) if fresh else call
                fresh = False
            fresh = type(child) is nn.Linear and call is not child  # which is how altered ones go
    elif kind is nn.Linear:
        yield _linear(named_parameters_of(module))
    elif kind is nn.ReLU and not module.inplace:
        yield torch.relu
    else:
        yield _FUNCTIONS.get(kind, module.forward)


def _linear(parameters: dict[str, Any]) -> Call:
    linear, of_vector = torch.nn.functional.linear, torch.addmv
    autocast = torch.is_autocast_enabled
    weight, bias = parameters.get("weight"), parameters.get("bias")
    direct = (
        isinstance(weight, nn.Parameter)
        and isinstance(bias, nn.Parameter)
        and weight.is_cpu
        and _is_exact(weight.shape, weight.stride(), weight.dtype, torch.get_num_threads())
    )

    def call(value: Any) -> Any:
        # Looked up at each call: they may be exchanged at any time, as `torch.func` does.
        weight, bias = parameters["weight"], parameters["bias"]
        if direct and value.dim() == 1 and value.stride(0) == 1 and not autocast("cpu"):
            return of_vector(bias, weight, value)
        return linear(value, weight, bias)

    return call


@functools.cache
def _is_exact(shape: Any, stride: Any, dtype: torch.dtype, threads: int) -> bool:
    """Tell whether `addmv`, in half the time, gives bit for bit what `linear` gives for a vector.

    Which kernels run depends on these alone, so a few values tell.
    """
    overlap = any(step == 0 for step in stride)
    if overlap or dtype not in (torch.float32, torch.float64):
        return False
    kind: Any = {"dtype": dtype, "device": "cpu"}
    draw = functools.partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), **kind)
    weight = torch.empty_strided(shape, stride, **kind).copy_(draw(*shape))
    cases = [(scale * draw(shape[1]), draw(shape[0])) for scale in (0, 0.1, 1, 10)]
    linear = torch.nn.functional.linear
    return all(torch.equal(linear(x, weight, b), b.addmv(weight, x)) for x, b in cases)
