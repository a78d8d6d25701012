"""What the fork server imports, quickly: without torch's compiler.

tensordict marks a few functions for `torch.compile` while it is imported. Each mark imports
`torch._dynamo`, which takes as long as torch itself. Here the marks are noted instead, and set when
somebody does import it. This file imports nothing of swath, as that would import tensordict.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["COMPILER", "MODULES", "preload"]

MODULES = ("torch", "tensordict", "gymnasium", "cloudpickle", "swath.workers.body")
COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")


def preload() -> None:
    """Import what workers need; the compiler only if something else than a mark wants it."""
    compiler = importlib.import_module("torch.compiler")
    later = _Later()
    sys.meta_path.insert(0, later)
    own = {name: getattr(compiler, name) for name in _MARKS}
    for name, mark in own.items():
        setattr(compiler, name, later.instead_of(mark))
    try:
        for name in MODULES:
            importlib.import_module(name)
    finally:
        for name, mark in own.items():
            setattr(compiler, name, mark)


class _Later:
    """Sets marks once the compiler is there; finds modules, to hear of that."""

    def __init__(self) -> None:
        self._noted: list[tuple[Callable[[Any], Any], Any]] = []

    def instead_of(self, mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def note(function: Any) -> Any:
            if COMPILER in sys.modules:
                return mark(function)
            self._noted.append((mark, function))
            return function  # as the marks do

        return note

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = spec and spec.loader
        run = loader.exec_module

        def run_and_mark(module: ModuleType) -> None:
            run(module)
            for mark, function in self._noted:
                mark(function)

        loader.exec_module = run_and_mark
        return spec
