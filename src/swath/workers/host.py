"""What a Ray actor is: a port, and the worker behind it.

Ray imports this file to make the actor, so it imports nothing that is heavy before `preload` does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from swath.preload import preload

__all__ = ["Host"]


class Host:
    """An actor with a worker; all its methods are called by a `RayLink`."""

    def __init__(self, paths: Sequence[str] = (), door: str | None = None) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        preload()
        from swath.links.calls import RayPort
        from swath.links.door import knock

        self._port, self._channel = RayPort(), knock(door)

    def here(self) -> tuple[int, str, str, bool]:
        """Return process, host and address, and whether it has knocked at a door."""
        import ray

        address = ray.util.get_node_ip_address()
        return os.getpid(), socket.gethostname(), address, self._channel is not None

    def run(self, job: bytes) -> None:
        """Be a worker until a message ends it."""
        from swath.workers.body import serve

        try:
            serve(self._entered(), job)
        finally:
            self._port.close()
            if self._channel is not None:
                self._channel.close()

    def _entered(self) -> Any:
        """Return the port: that of a process, if it was let in."""
        from swath.links import ProcessPort

        if self._channel is not None:
            with contextlib.suppress(EOFError):
                return ProcessPort(self._channel)
        return self._port

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
