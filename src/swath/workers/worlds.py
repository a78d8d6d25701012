"""A world of ranks that exists already: this process was started by `torchrun` or `mpirun`.

Rank 0 trains; the others become workers as soon as the script makes its collector, and end with
it. So the same script is run by all ranks, and it needs no launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from swath.workers.remote import Invitation

__all__ = ["World", "find_world"]


class World(Protocol):
    """The ranks that were started together."""

    rank: int
    size: int

    def announce(self, invitation: Invitation) -> None:
        """In rank 0: tell the others where to come."""
        ...

    def serve_unless_first(self) -> None:
        """In all other ranks: be a worker, and end this process with it."""
        ...


def find_world(options: Mapping[str, Any]) -> World | None:
    """Return the world that this process was started in, if there is one."""
    return None
