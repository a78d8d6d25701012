"""What a Ray actor is: a port, and the worker behind it.

Ray imports this file to make the actor, so it imports nothing that is heavy before `preload` does.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from swath.preload import preload

__all__ = ["Host"]


class Host:
    """An actor with a worker; all its methods are called by a `RayLink`."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        preload()
        from swath.links.ray import RayPort

        self._port = RayPort()

    def here(self, probe: Any = None) -> tuple[int, str, str, Any]:
        """Return process, host and address, and memory of its own if it can map that of `probe`."""
        import ray
        from swath.memory import SharedMemory

        try:
            self._mapped = None if probe is None else SharedMemory.opened(probe)
        except OSError:
            self._mapped = None
        handle = None if self._mapped is None else self._mapped.handle
        return os.getpid(), socket.gethostname(), ray.util.get_node_ip_address(), handle

    def run(self, job: bytes) -> None:
        """Be a worker until a message ends it."""
        from swath.workers.body import serve

        try:
            serve(self._port, job)
        finally:
            self._port.close()

    def tell(self, number: int, message: Any, sizes: Sequence[int]) -> None:
        """Take a message."""
        self._port.deliver(number, message, sizes)

    def ask(
        self, number: int | None, turn: int, message: Any, sizes: Sequence[int], *pushed: Any
    ) -> Any:
        """Take weights and a message, if there are any, and return the report with this number."""
        if number is not None:
            self._port.deliver(number, message, sizes, *pushed)
        return self._port.report(turn)

    def push(self, number: int, message: Any, block: Any) -> None:
        """Take weights."""
        self._port.deliver(number, None, (), message, block)
