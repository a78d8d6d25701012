"""What starts workers that join through a gate: local processes, or whoever comes by itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from swath.errors import UsageError, WorkerError, nearest
from swath.links import Launched, launch, pack
from swath.links.launch import ending
from swath.shield import Shield
from swath.workers.delayed import Request
from swath.workers.join import LINK_TIMEOUT
from swath.workers.remote import Invitation, Launcher, Started, main
from swath.workers.submitit import Executor, NodeLauncher
from swath.workers.worlds import World, WorldLauncher

__all__ = ["LocalLauncher", "Waiting", "launcher_for"]

_log = logging.getLogger("swath")
_TELL_EVERY = 30.0
"""Seconds between two lines of the log about a worker that is waited for."""
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
                "connected yet.",
                worker=self._number,
            )

    def cancel(self) -> None:
        self.process.kill()
        self.process.close()


class Waiting:
    """Starts nothing: workers come by themselves, by `python -m swath.workers.join`."""

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Say what to run for each."""
        awaited = {number: _Awaited(invitation, number) for number in numbers}
        commands = "\n".join(f"  {one.command}" for one in awaited.values())
        _log.warning("waiting for workers; run these commands on their machines:\n%s", commands)
        return awaited

    def close(self) -> None:
        """Nothing was started."""


class _Awaited:
    """A worker that somebody is to start."""

    process = None

    def __init__(self, invitation: Invitation, number: int) -> None:
        host = f"[{invitation.host}]" if ":" in invitation.host else invitation.host
        patience = invitation.patience
        # The value of the secret belongs in no log.
        self.command = (
            "SWATH_SECRET=$SWATH_SECRET python -m swath.workers.join "
            f"{host}:{invitation.port} {number}"
            + (f" --link-timeout {patience:g}" if patience != LINK_TIMEOUT else "")
        )
        self._next_line = monotonic() + _TELL_EVERY

    def check(self) -> None:
        """Say now and then that it has not come; it may always come."""
        if monotonic() >= self._next_line:
            self._next_line = monotonic() + _TELL_EVERY
            _log.warning("still waiting for a worker:\n  %s", self.command)

    def cancel(self) -> None:
        """Nothing: it ends with its connection."""
