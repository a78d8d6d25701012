"""A bell: one process rings, another sleeps until it does. Some 5 us for there and back."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Bell"]


class Bell:
    """Counts rings until somebody takes them; its descriptors can be sent to another process."""

    descriptors: tuple[int, ...] = ()

    def __init__(self, descriptors: tuple[int, ...] | None = None) -> None:
        if descriptors is None:
            descriptors = (os.eventfd(0),) if hasattr(os, "eventfd") else os.pipe()
        self.descriptors = descriptors
        self._in, self._out = descriptors[0], descriptors[-1]
        self._counts = len(descriptors) == 1

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._in

    def ring(self) -> None:
        """Ring once."""
        os.write(self._out, _ONE if self._counts else b"!")

    def take(self) -> int:
        """Wait until the bell has rung and return how often; 0 if nobody can ring it any more."""
        if self._counts:
            return int.from_bytes(os.read(self._in, 8), "little")
        return len(os.read(self._in, 4096))

    def close(self) -> None:
        """Give the descriptors back."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    __del__ = close  # of one among many when the next could not be made

    def __reduce__(self) -> Any:
        # A copy would have the numbers of our descriptors, and close what has them.
        raise TypeError("cannot copy or pickle a bell; send its descriptors")


_ONE = (1).to_bytes(8, "little")
