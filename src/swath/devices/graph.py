"""A piece of work on a GPU as one CUDA graph: recorded once, then started as a whole.

A graph repeats what it recorded, at the same addresses: weights, env state and slab change in
place, and random numbers go on from where the generator stands. What the host decides is decided
once, when it is recorded. So what is recorded must not ask the device anything, and numbers that
Python holds (`policy.epsilon`) must be those of the recording: `fingerprint` sees them change.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributions import Distribution

from swath.compat.torch import validates_distributions

__all__ = ["Recorder", "fingerprint", "refusal"]

Work = Callable[[], None]

_RECORDINGS = 5
"""Work whose weights or numbers are exchanged more often than so many times is left alone."""


class Recorder:
    """Starts work as a graph where it can, and says why where it cannot.

    Args:
        work: What to record.
        parts: The objects on whose tensors and numbers it depends.
        device: A CUDA device.
        why: Why it cannot be recorded, if that is known.
    """

    def __init__(
        self,
        work: Work,
        parts: Callable[[], Iterable[Any]],
        device: torch.device,
        why: str | None,
    ) -> None:
        self._work, self._parts, self._device, self.why = work, parts, device, why
        self._graph: torch.cuda.CUDAGraph | None = None
        self._marks: tuple[Any, ...] = ()
        self._recordings = 0

    def ready(self) -> bool:
        """Tell whether `replay` does the work; records it if need be, or again."""
        if self.why is not None:
            return False
        marks = fingerprint(self._parts())
        if self._graph is None or marks != self._marks:
            self._graph = None  # its memory first
            try:
                self._graph = self._recorded()
            except Exception as error:  # of the work or of the driver
                self.why = f"{type(error).__name__}: {error}"
                warnings.warn(f"nothing is run as a CUDA graph: {self.why}", stacklevel=2)
                return False
            self._marks = marks
        return True

    def replay(self) -> None:
        """Start the work, as it was recorded."""
        assert self._graph is not None
        self._graph.replay()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        if self._recordings == _RECORDINGS:
            raise RuntimeError("weights, or numbers that Python holds, change again and again")
        self._recordings += 1
        graph = torch.cuda.CUDAGraph()
        # In a mode in which other threads may use the device meanwhile.
        stream = torch.cuda.current_stream(self._device)
        recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # an old graph that is freed now would break the new one
        try:
            with unvalidated(), recording:
                self._work()
        except BaseException:
            # A recording that fails leaves torch's generator in it; the state's copy is not.
            generator = torch.cuda.default_generators[self._device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
        return graph


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
    validates = validates_distributions()
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
