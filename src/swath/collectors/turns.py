"""Calls that have a collector to themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from swath.collectors.base import BaseCollector

__all__ = ["between_batches"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound="BaseCollector")


def between_batches(
    method: Callable[Concatenate[_C, _P], _R],
) -> Callable[Concatenate[_C, _P], _R]:
    """Return a method that is called between two batches, and by one thread at a time.

    The background rests meanwhile. All of it is bookkeeping, that of the workers included; Ctrl-C
    comes where the method waits.
    """

    @functools.wraps(method)
    def call(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        self._check_process()
        turn = self._owner.turn(f"{method.__name__}()")
        with self._shield, self.pause(), turn:
            return method(self, *args, **kwargs)

    return call
