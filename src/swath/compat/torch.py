"""Private names of torch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Distribution

__all__ = [
    "compiled_for_cuda",
    "gloo_options",
    "has_rpc_agent",
    "is_hooked",
    "named_layers",
    "named_parameters_of",
    "restart_rpc_names",
    "validates_distributions",
]


_library: Any = torch.nn.modules.module


def is_hooked(module: nn.Module) -> bool:
    """Tell whether calling a module does more than its `forward`; True if that is not known."""
    try:
        return bool(
            module._forward_hooks
            or module._forward_pre_hooks
            or _library._has_any_global_hook()
            or module._compiled_call_impl
        )
    except AttributeError:
        return True


def named_layers(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules directly in a module; one that is used twice comes twice."""
    try:
        return module._modules
    except AttributeError:  # this leaves out the second use
        return dict(module.named_children())


def named_parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live table of a module's own parameters."""
    return module._parameters


def validates_distributions() -> bool:
    """Tell whether distributions check their parameters, as `set_default_validate_args` sets it."""
    return bool(getattr(Distribution, "_validate_args", __debug__))


def compiled_for_cuda(source: str) -> Callable[..., torch.Tensor] | None:
    """Return a function of tensors from CUDA source code; None if torch cannot make one."""
    jiterator: Any = getattr(torch.cuda, "jiterator", None)
    make = getattr(jiterator, "_create_jit_fn", None)
    return None if make is None else make(source)


def gloo_options(seconds: float, host: str) -> Any:
    """Return options of a gloo group: its patience and the address that it uses."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [gloo.create_device(hostname=host)]
    return options


def has_rpc_agent() -> bool:
    """Tell whether this process uses `torch.distributed.rpc` now."""
    import torch.distributed.rpc as rpc

    api: Any = rpc.api
    known = getattr(api, "_is_current_rpc_agent_set", None)
    return known is not None and bool(known())  # else `init_rpc` says so, in its own words


def restart_rpc_names() -> None:
    """Let the next agent of this process use the same names in the store as a first one does."""
    import torch.distributed.rpc as rpc

    rpc._init_counter = 0
