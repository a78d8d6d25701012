"""What every link is, seen from your process; `links/process.py` and `links/remote.py` are two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Link", "end_all"]


class Link(Protocol):
    """Your process's end of a link to one worker.

    Messages arrive once, in order, or not at all, and then the link says that it has ended.
    """

    name: str
    """The worker in words, with process and host."""
    shares_memory: bool
    """The worker sees your process's memory; if not, blocks travel."""

    @property
    def pid(self) -> int | None:
        """The process, on its host; None while it is not known where the worker will run."""
        ...

    @property
    def host(self) -> str | None:
        """The host, once it is known."""
        ...

    @property
    def sentinel(self) -> int | None:
        """A further descriptor that is ready once the worker has ended, if there is one."""
        ...

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        ...

    def limit(self, seconds: float | None) -> None:
        """Give the worker up that takes or gives nothing for so long in a message, if it can."""
        ...

    def send(self, message: Any, memories: Any = ()) -> None:
        """Send a message, and memory beside it; EOFError if the worker is gone."""
        ...

    def ask(self, message: Any, memories: Any = (), expected: Any = None) -> None:
        """Send a message that the worker will answer; see `send`."""
        ...

    def send_last(self, message: Any) -> None:
        """Send a message that nothing follows, if that is possible at once."""
        ...

    def receive(self) -> Any:
        """Wait for a message and return it; EOFError if the worker is gone."""
        ...

    def waits(self) -> bool:
        """Tell whether a message waits."""
        ...

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        ...

    def ended(self) -> str:
        """Say how the worker ended, now that it has."""
        ...

    def kill(self) -> None:
        """End the worker, whatever it is doing."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """Let go of the worker once it has ended; end it after `timeout` seconds."""
        ...


def end_all(links: Iterable[Link]) -> None:
    """End workers that are not wanted, since others could not be started, and let go of them."""
    links = list(links)
    for link in links:  # first all: they end side by side
        link.kill()
    for link in links:
        link.close()
