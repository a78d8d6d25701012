"""Runs scripts in all ranks of a real `torchrun` or a real `mpirun`, until the last has ended."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = Path(__file__).with_name("quick.py")
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def mpirun(ranks: int, *flags: str) -> list[str]:
    return [str(MPIRUN), *flags, "-n", str(ranks), sys.executable]


def needs(world: str, request: pytest.FixtureRequest) -> None:
    """Skip what needs MPI where there is none, and say so."""
    if world == "torchrun" or (MPIRUN and importlib.util.find_spec("mpi4py")):
        return
    reason = "mpirun or mpi4py is not installed: pip install 'swath[mpi]'"
    request.config.get_terminal_writer().line(f"\nNOT TESTED HERE: {reason}", red=True)
    pytest.skip(reason)


def run(world: list[str], script: Path, *arguments: str, seconds: float = 220, quick: bool = True):
    """Run a script with all its ranks; return the exit code and what was written.

    Unless they import what they need in a way of their own, all ranks do so quickly.
    """
    paths = [str(ROOT / "src"), str(ROOT / "tests/kits"), str(script.parent)]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }
    with subprocess.Popen(
        [*world, *([str(QUICK)] if quick else []), str(script), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            out, _ = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {seconds} s:\n{_ended(job)}")
        except BaseException:
            _ended(job)
            raise
    return job.returncode, out


def _ended(job: subprocess.Popen[str]) -> str:
    """End a job and return what it wrote: mpirun ends its ranks, which are in other groups."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        return job.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        return job.communicate()[0]
