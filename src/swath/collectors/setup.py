"""The set-up of a collector in plain words, by which a state of another one is told.

A state has this text beside its pickled part, and it is compared first: what does not belong is
refused before anything is unpickled or changed.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swath.errors import UsageError
from swath.memory import Field
from swath.memory.weights import WeightSpec
from swath.tree import key_name

__all__ = [
    "FORMAT",
    "Setup",
    "check_state",
    "check_weights",
    "checksum",
    "fields_in_words",
    "opened",
    "packed",
    "weights_in_words",
]

FORMAT = 2
"""Of states; it counts up when one of an earlier version cannot be loaded any more."""
Setup = dict[str, str | list[str]]
"""What must be equal where a state is taken and where it is loaded, by what it is about."""


def fields_in_words(fields: Iterable[Field]) -> list[str]:
    """Return a line for each key of a rollout: name, shape of a frame, dtype."""
    return [
        f"{key_name(field.key)} {list(field.shape)} {field.dtype}"
        + ("" if field.delivered else ", not delivered")
        for field in fields
    ]


def weights_in_words(spec: WeightSpec) -> list[str]:
    """Return a line for each tensor of a policy."""
    return [f"{name} {list(shape)} {dtype}" for name, (shape, dtype) in spec.shapes.items()]


def check_state(state: Any, ours: Setup) -> None:
    """Refuse what is no state, or one of another set-up, without unpickling any of it."""
    found = state.get("format") if isinstance(state, Mapping) else None
    if found == 1:
        raise UsageError(
            "this state has format 1, which does not describe its set-up; format 2 is "
            "expected. Load it with the version of swath that wrote it."
        )
    if found != FORMAT:
        raise UsageError(
            f"this is not a state of a swath collector (format {found!r}; {FORMAT} was expected)."
        )
    theirs = state.get("setup")
    counts = [state.get(name) for name in ("frames", "batches")]
    if not isinstance(theirs, Mapping) or not all(type(one) is int and one >= 0 for one in counts):
        raise UsageError(
            "this state was changed since state_dict() returned it: its set-up or its counts are "
            "missing. Nothing was changed; take another copy of it."
        )
    for about, here in ours.items():
        there = theirs.get(about)
        if there == here:
            continue
        if there is None:
            there = f"a collector without {about}"
        if isinstance(here, list) and isinstance(there, list):
            there, here = (
                f"{about} {[one for one in some if one not in other] or some}"
                for some, other in ((there, here), (here, there))
            )
        raise UsageError(
            f"this state is of {there}; this collector has {here}. Nothing was changed; load "
            "the state into a collector that is made in the same way as the one that was saved."
        )


def check_weights(weights: Any, module: torch.nn.Module | None) -> None:
    """Refuse the weights of a state that are not all those of this policy."""
    if weights is None or module is None:
        return
    if not isinstance(weights, Mapping) or set(weights) != set(module.state_dict()):
        raise UsageError(
            "this state was changed since state_dict() returned it: its weights are not those of "
            "the policy. Nothing was changed; take another copy of it."
        )


def packed(inner: Any) -> torch.Tensor:
    """Return the part of a state that is no plain number or tensor as a tensor of bytes."""
    blob = io.BytesIO()
    pickle.dump(inner, blob, protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(blob.getvalue()), dtype=torch.uint8)


def checksum(blob: torch.Tensor) -> int:
    """Return a number by which a change of these bytes is noticed."""
    return zlib.crc32(blob.numpy().data)


def opened(state: Mapping[str, Any]) -> Any:
    """Return what `packed` was given, unless its bytes have changed: unpickled they may do harm."""
    blob = state["collector"]
    if state.get("checksum") != checksum(blob):
        raise _unreadable("it differs from its checksum")
    try:
        return pickle.loads(blob.numpy().data)
    except Exception as error:  # whatever an object's own unpickling may raise
        raise _unreadable(f"{type(error).__name__}: {error}") from error


def _unreadable(why: str) -> UsageError:
    return UsageError(
        f"the pickled part of this state cannot be read ({why}), so nothing was changed. It is "
        "damaged, or needs modules that cannot be imported here. It holds pickled envs: load "
        "only states that you trust."
    )
