"""How what TorchRL's users read and call reaches its rows in the table.

A collector looks a name up here that it does not have itself (`BaseCollector.__getattr__`), and a
method that is marked with `called_as_in_torchrl` is called by way of its row. So none of it stands
in the core, in `help()` or in the pages about collectors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from swath.collectors.torchrl_attributes import ATTRIBUTES
from swath.collectors.torchrl_calls import ARGUMENTS, METHODS
from swath.collectors.translation import Attribute, Call, Method, Row

__all__ = ["MEMBERS", "called_as_in_torchrl", "look_up", "refuse_to_set", "register"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

MEMBERS: tuple[Row, ...] = (*ATTRIBUTES, *METHODS, *ARGUMENTS)
"""All rows of attributes and methods."""
_BY_NAME: dict[str, list[Row]] = {}
for _row in MEMBERS:
    _BY_NAME.setdefault(_row.name, []).append(_row)


def look_up(collector: Any, name: str) -> Any:
    """Return what TorchRL's collectors have under a name, or raise AttributeError."""
    row = _row_of(type(collector), name)
    if isinstance(row, Attribute):
        return row.read(collector)
    if isinstance(row, Method):
        return functools.partial(row.call, collector)
    raise AttributeError(f"{type(collector).__name__!r} object has no attribute {name!r}")


def refuse_to_set(collector: Any, name: str) -> None:
    """Refuse to set what is only read: it would change nothing."""
    if isinstance(_row_of(type(collector), name), Attribute) and "options" in vars(collector):
        raise AttributeError(
            f"{name} of a {type(collector).__name__} is fixed when it is made, so setting it "
            "would have no effect; make another collector."
        )


def _row_of(owner: type, name: str) -> Row | None:
    return next((row for row in _BY_NAME.get(name, ()) if row.concerns(owner)), None)


def called_as_in_torchrl(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a method that takes TorchRL's arguments, too; its signature stays as it is."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        collector, *others = args
        row = _row_of(type(collector), method.__name__)
        if not isinstance(row, Call):
            return method(*args, **kwargs)
        return row.call(collector, functools.partial(method, collector), *others, **kwargs)

    return call


def register(kind: type) -> None:
    """Let a class pass for one of TorchRL's collectors, if these are imported."""
    theirs = getattr(sys.modules.get("torchrl.collectors"), "BaseCollector", None)
    if theirs is not None and not issubclass(kind, theirs):
        theirs.register(kind)
