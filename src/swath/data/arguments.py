"""What is given to a replay buffer: names and numbers that are checked, frames in other forms."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.errors import UsageError, nearest

__all__ = ["as_frame", "check_capacity", "refusing_unknown_names"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ELSEWHERE = {
    "max_size": "capacity",
    "buffer_size": "capacity",
    "maxlen": "capacity",
    "size": "capacity",
    "max_frames": "capacity",
    "storage_type": "storage",
    "scratch_dir": "directory",
    "path": "directory",
}
"""Names that other libraries have for what we have."""


def refusing_unknown_names(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return an `__init__` that says which name was meant where one is unknown or missing."""
    known = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        kind = type(args[0]).__name__
        for name in kwargs:
            if name not in known:
                meant = _ELSEWHERE.get(name)
                hint = f" Did you mean {meant!r}?" if meant else nearest(name, known)
                raise UsageError(
                    f"{kind} has no argument {name!r}.{hint} It takes {', '.join(known)}."
                )
        if len(args) < 2 and known[0] not in kwargs:
            raise UsageError(
                f"{known[0]} is missing: give {kind} the largest number of frames to keep, such "
                f"as {kind}(100_000)."
            )
        return method(*args, **kwargs)

    return call


def check_capacity(capacity: Any) -> int:
    """Return the number of frames that a buffer holds as an int."""
    if isinstance(capacity, numbers.Integral) and not isinstance(capacity, bool):
        return int(capacity)
    whole = isinstance(capacity, numbers.Real) and float(capacity).is_integer()
    hint = f" Write {int(capacity):_}." if whole and not isinstance(capacity, bool) else ""
    raise UsageError(f"capacity={capacity!r} must be a whole number of frames, an int.{hint}")


def as_frame(frame: Any) -> TensorDictBase:
    """Return one frame as a TensorDict without batch size; nested dicts of values will do."""
    if isinstance(frame, TensorDictBase):
        if frame.batch_dims:
            raise UsageError(
                f"add() takes one frame, a TensorDict without batch size; this one has "
                f"{list(frame.batch_size)}. Give batches to extend()."
            )
        return frame
    if not isinstance(frame, Mapping):
        raise UsageError(
            f"add() takes one frame as a TensorDict or a dict of tensors, arrays and numbers; got "
            f"{type(frame).__name__}."
        )
    return TensorDict({name: _as_value(name, value) for name, value in frame.items()}, [])


def _as_value(name: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_frame(value)
    try:
        return torch.as_tensor(np.asarray(value) if isinstance(value, (list, tuple)) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"add() cannot store {name!r}: {type(value).__name__} has no array form ({error})."
        ) from error
