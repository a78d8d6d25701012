"""A piece of work on a GPU as one CUDA graph: recorded once, then started as a whole.

A graph repeats what it recorded, at the same addresses: weights, env state and slab change in place,
and random numbers go on from where the generator stands. What the host decides is decided once, when
it is recorded. So what is recorded must not ask the device anything, and numbers that Python holds
(`policy.epsilon`) must be those that it was recorded with: `fingerprint` sees them change.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributions import Distribution

__all__ = ["Graph", "fingerprint", "refusal", "unvalidated"]

Work = Callable[[], None]


class Graph:
    """A piece of work, recorded; RuntimeError, and nothing changed, if it cannot be."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # In a mode in which other threads may use the device meanwhile.
        recording = torch.cuda.graph(
            self._graph,
            stream=torch.cuda.current_stream(device),
            capture_error_mode="thread_local",
        )
        try:
            with unvalidated(), recording:
                work()
        except BaseException:
            # A recording that fails leaves torch's generator in it; the state's copy is not.
            generator = torch.cuda.default_generators[device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise

    def replay(self) -> None:
        """Start the work."""
        self._graph.replay()


def refusal(work: Work) -> str | None:
    """Do the work and return why it cannot be recorded; None if nothing speaks against it."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with unvalidated():
                work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in seen:
        if "synchronizing CUDA operation" in str(warning.message):
            return f"it waits for the device (at {warning.filename}:{warning.lineno})"
    return None


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Let distributions not check their parameters, which needs an answer of the device."""
    validates = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validates)


def fingerprint(things: Iterable[Any]) -> tuple[Any, ...]:
    """Return what a graph cannot follow: addresses of tensors, and numbers that Python holds."""
    marks: list[Any] = []
    for thing in things:
        for part in thing.modules() if isinstance(thing, torch.nn.Module) else (thing,):
            named = dict(getattr(part, "__dict__", {}))
            for values in (named, named.get("_parameters", {}), named.get("_buffers", {})):
                for name, value in values.items():
                    if isinstance(value, torch.Tensor):
                        marks.append((name, value.data_ptr()))
                    elif isinstance(value, (int, float, str)):
                        marks.append((name, value))
    return tuple(marks)
