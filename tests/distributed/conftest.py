"""A real Slurm and two hosts, where this machine can have them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wait_kit import comes_true

ROOT = Path(__file__).parents[2]


def _script(request: pytest.FixtureRequest, name: str, *arguments: str) -> str:
    """Run a script of the project; skip the test if it says that it cannot run here."""
    command = [str(ROOT / "scripts" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode == 3:
        reason = f"{name}: {done.stderr.strip()}"
        request.config.get_terminal_writer().line(f"\nNOT TESTED HERE: {reason}", red=True)
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Slurm:
    """What tests ask of Slurm."""

    @staticmethod
    def jobs() -> dict[str, str]:
        """Return the jobs that have not ended, and their states."""
        told = subprocess.run(
            ["squeue", "-h", "-o", "%i %T"], capture_output=True, text=True, check=True
        ).stdout
        return dict(line.split() for line in told.splitlines())

    def gone(self, within: float = 40.0) -> bool:
        """Wait until there are no jobs."""
        return comes_true(lambda: not self.jobs(), within, every=0.1)

    @staticmethod
    def cancel(job: str) -> None:
        subprocess.run(["scancel", job], check=True)


@pytest.fixture(scope="session")
def _slurm(request: pytest.FixtureRequest) -> Iterator[str]:
    conf = _script(request, "slurm.sh", "up", "2").rpartition("=")[2].strip()
    yield conf
    _script(request, "slurm.sh", "down", os.path.dirname(conf))


@pytest.fixture
def slurm(_slurm: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Return a Slurm of two nodes; no job may be left in it."""
    monkeypatch.setenv("SLURM_CONF", _slurm)
    told = Slurm()
    yield told
    assert told.gone(), "a test left a job behind"


@pytest.fixture
def local_jobs() -> Iterator[None]:
    """Wait for jobs of the local executor: they end by themselves, some time after shutdown."""
    yield
    for thread in threading.enumerate():
        if thread.name == "swath job":
            thread.join(30)


class Hosts:
    """Two hosts with a link between them: the trainer's `a` and the workers' `b`."""

    address = "10.231.7.1"
    other = "10.231.7.2"

    def __init__(self, request: pytest.FixtureRequest, name: str) -> None:
        self._request, self._name = request, name
        self._started: list[subprocess.Popen[str]] = []

    def link(self, what: str) -> None:
        """Let a script of the project do something to the link: up, cut, mend, down."""
        _script(self._request, "netns.sh", what, self._name)

    def start(self, side: str, *arguments: str, secret: str = "s3") -> subprocess.Popen[str]:
        """Start Python on a host."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"{self._name}-{side}", sys.executable, "-u", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SWATH_SECRET": secret},
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Return two hosts."""
    two = Hosts(request, f"swath-{os.getpid()}")
    two.link("up")
    yield two
    two.end()
    two.link("down")
