"""What starts workers that join through a gate: local processes, or whoever comes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swath.errors import WorkerError
from swath.links import Launched, launch, pack
from swath.links.launch import ending
from swath.workers.remote import Invitation, Started, main

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """Processes of this machine, from the fork server."""

    def start(self, invitation: Invitation, numbers: Sequence[int]) -> Mapping[int, Started]:
        """Start a process for each."""
        return {
            number: _Process(number, launch(main, pack((invitation, number), "the invitation")))
            for number in numbers
        }

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
