"""What starts workers that join through a gate: local processes, or whoever comes by itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swath.errors import UsageError, WorkerError, nearest
from swath.links import Launched, launch, pack
from swath.links.launch import ending
from swath.shield import Shield
from swath.workers.delayed import Request
from swath.workers.remote import Invitation, Launcher, Started, main
from swath.workers.submitit import Executor, NodeLauncher
from swath.workers.worlds import World, WorldLauncher

__all__ = ["LocalLauncher", "Waiting", "launcher_for"]

_log = logging.getLogger("swath")
LAUNCHERS = ("mp", "submitit", "submitit_delayed", "wait")


def launcher_for(
    name: str | None, slurm: Mapping[str, Any] | None, world: World | None, per_node: int = 1
) -> Launcher:
    """Return a launcher by its name, or for a world that exists; `per_node` workers on a node."""
    if world is not None:
        return WorldLauncher(world)
    if name is None or name == "mp":
        return LocalLauncher()
    if name == "submitit":
        return NodeLauncher(Executor(slurm).submit, per_node)
    if name == "submitit_delayed":
        return NodeLauncher(Request, per_node)
    if name == "wait":
        return Waiting()
    raise UsageError(
        f"launcher must be one of {', '.join(LAUNCHERS)}; got {name!r}.{nearest(name, LAUNCHERS)}"
    )


class LocalLauncher:
    """Processes of this machine, from the fork server."""

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Start a process for each."""
        started: dict[int, Started] = {}
        try:
            for number in numbers:
                payload = pack((invitation, number), "the invitation")
                started[number] = _Process(number, launch(main, payload, shield))
        except BaseException:
            for one in started.values():
                one.cancel()
            raise
        return started

    def close(self) -> None:
        """Nothing: the fork server serves others, too."""


class _Process:
    def __init__(self, number: int, process: Launched) -> None:
        self._number, self.process = number, process

    def check(self) -> None:
        code = self.process.exit_code()
        if code is not None:
            raise WorkerError(
                f"worker {self._number} (process {self.process.pid}) {ending(code)} It had not "
                "come in yet.",
                worker=self._number,
            )

    def cancel(self) -> None:
        self.process.kill()
        self.process.close()


class Waiting:
    """Starts nothing: workers come by themselves, by `python -m swath.workers.join`."""

    process = None

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Say where to come."""
        address = f"{invitation.host}:{invitation.port}"
        _log.warning("waiting for workers: python -m swath.workers.join %s %s", address, numbers)
        return dict.fromkeys(numbers, self)

    def check(self) -> None:
        """Nothing: a worker may always come."""

    def cancel(self) -> None:
        """Nothing: it ends with its connection."""

    def close(self) -> None:
        """Nothing was started."""
