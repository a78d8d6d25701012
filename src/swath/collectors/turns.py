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

    The background rests meanwhile. To let it rest and go on, and to take the turn and give it back,
    is bookkeeping that Ctrl-C does not come into; into the method it may.
    """

    @functools.wraps(method)
    def call(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        self._check_process()
        turn = self._owner.turn(f"{method.__name__}()")
        with self._shield, self.pause(), turn, self._shield.lifted():
            return method(self, *args, **kwargs)

    return call
