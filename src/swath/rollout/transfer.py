"""From the device on which a rollout was made to the one on which batches are stored.

A slab is copied in one piece, once per rollout, on a stream of its own. The host does not wait for
an upload: whoever uses the batch on the current stream comes after it, and the source is used again
when the copy has left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from swath.devices import OwnStream
from swath.memory import Layout, Slab, SlabPool, memory_on

__all__ = ["Transfer"]


class Transfer:
    """Slabs on the device where batches are stored.

    Args:
        layout: Of the slabs.
        source: Where rollouts are made.
        target: Where batches are stored.
    """

    def __init__(self, layout: Layout, source: torch.device, target: torch.device) -> None:
        self.target = target
        self.pool = SlabPool(lambda: Slab(layout, memory_on(target, layout.nbytes)))
        self._stream = OwnStream(target if target.type == "cuda" else source)
        self._leaving: deque[tuple[Any, Slab, Callable[[Slab], None]]] = deque()

    def move(self, slab: Slab, give_back: Callable[[Slab], None]) -> Slab:
        """Return a slab with the same bytes there; the other is given back when it may be."""
        self.reclaim()
        moved = self.pool.take()
        with self._stream.entered():
            moved.memory.block.copy_(slab.memory.block, non_blocking=True)
        if self.target.type == "cuda":
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream.stream)
            self._leaving.append((event, slab, give_back))
        else:
            self._stream.synchronize()
            give_back(slab)
        return moved

    def reclaim(self) -> None:
        """Give back the slabs whose copies are done."""
        while self._leaving and self._leaving[0][0].query():
            _, slab, give_back = self._leaving.popleft()
            give_back(slab)
