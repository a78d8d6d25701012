"""Private names of tensordict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)

__all__ = ["draw", "is_plain_choice", "is_plain_module", "plain_parts", "unchecked"]


def unchecked(
    tree: Mapping[str, Any],
    values: Mapping[Any, torch.Tensor],
    size: torch.Size,
    names: Sequence[str | None] | None,
    **more: Any,
) -> TensorDict:
    """Return a TensorDict of values that are known to fit, without a look at them.

    Args:
        tree: Nested dicts that have the key of a value at each end.
        values: By key.
        size: The batch size of all TensorDicts.
        names: The names of its dimensions.
        more: What stands at the root beside them, before them.
    """
    for name, part in tree.items():
        if type(part) is dict:
            more[name] = unchecked(part, values, size, names)
        else:
            more[name] = values[part]
    own = None if names is None else [*names]
    try:
        batch = TensorDict._new_unsafe(None, size, names=own)
        batch._tensordict.update(more)
    except AttributeError:
        return TensorDict(more, size, names=own)
    return batch


def _is_own(module: Any, known: type, *methods: str) -> bool:
    """Tell whether a module has the methods of a known class, all of which there are."""
    kind = type(module)
    return all(getattr(kind, name, 0) is getattr(known, name, 1) for name in methods)


# Each of these is False or None where a version has not what it asks for: the module is then called
# as a whole, which is always right.


def plain_parts(module: TensorDictSequential) -> list[Any] | None:
    """Return the parts that calling a sequence comes down to; None if it may do more."""
    whole: Any = module
    known: type = TensorDictSequential
    try:
        plain = not whole._select_before_return and whole.inplace in (None, True)
        parts = list(whole._module_iter())
        if isinstance(module, ProbabilisticTensorDictSequential):
            known = ProbabilisticTensorDictSequential
            plain = plain and whole._requires_sample  # else an earlier part has made the sample
            if not whole.return_composite:
                parts = [whole._det_part, parts[-1]]  # the public name is deprecated since 0.15
    except AttributeError:
        return None
    return parts if plain and _is_own(module, known, "forward", "_run_module") else None


def is_plain_module(module: TensorDictModule) -> bool:
    """Tell whether a module only calls the one inside with the values of its keys."""
    whole: Any = module
    try:
        plain = (
            whole._kwargs is None
            and not whole.method_kwargs
            and whole.method is None
            and not whole._get_kwargs
            and whole.inplace is True
        )
    except AttributeError:
        return False
    methods = ("forward", "_call_module", "_write_to_tensordict")
    return plain and _is_own(module, TensorDictModule, *methods)


def is_plain_choice(module: ProbabilisticTensorDictModule) -> bool:
    """Tell whether a module only draws one value from the distribution of its keys."""
    whole: Any = module
    plain = (
        whole.num_samples is None
        and getattr(whole, "_generator", None) is None
        and getattr(whole, "_generator_key", None) is None
        and len(whole.dist_sample_keys) == 1
    )
    return plain and _is_own(module, ProbabilisticTensorDictModule, "get_dist", "_dist_sample")


def draw(module: Any, dist: Any, how: Any) -> Any:
    """Return what a probabilistic module chooses from a distribution."""
    return module._dist_sample(dist, interaction_type=how)
