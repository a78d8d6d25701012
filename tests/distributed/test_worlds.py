"""Ranks of a real `torchrun` and a real `mpirun` are the workers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import multi_kit as kit
import pytest

from swath.collectors.distributed import DistributedCollector
from swath.errors import UsageError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
pytestmark = pytest.mark.timeout(240)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
WORLDS = {
    "torchrun": TORCHRUN,
    "mpirun": [MPIRUN, "-n", "3", sys.executable],
    "ulfm": [MPIRUN, "--with-ft", "ulfm", "-n", "3", sys.executable],
}


def needs(world: str, request: pytest.FixtureRequest) -> None:
    if world == "torchrun" or (MPIRUN and importlib.util.find_spec("mpi4py")):
        return
    reason = "mpirun or mpi4py is not installed: pip install 'swath[mpi]'"
    request.config.get_terminal_writer().line(f"\nNOT TESTED HERE: {reason}", red=True)
    pytest.skip(reason)


def run(world: list[str], script: Path, *arguments: str, seconds: float = 120):
    """Run a script with all its ranks; return the exit code and what was written."""
    paths = [str(ROOT / "src"), str(HERE.parent / "collectors"), str(HERE)]
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
        [*world, str(script), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            out, _ = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            out, _ = job.communicate()
            pytest.fail(f"it did not end within {seconds} s:\n{out}")
    return job.returncode, out


@pytest.mark.parametrize(("world", "backends"), [("torchrun", "gloo rpc"), ("mpirun", "mpi gloo")])
def test_the_promises_hold_for_one_collector_after_the_other(world, backends, request):
    needs(world, request)
    code, out = run(WORLDS[world], HERE / "world_script.py", "promises", *backends.split())
    assert code == 0, out
    for words in (
        "every transition came once",
        "equal seeds give equal data",
        "at the same time: the ranks of this world work for another collector",
        "refused a connection from 127.0.0.1: it does not know the secret",
        "versions are right, a stranger was refused",
        "env: the env raised ZeroDivisionError: on purpose in step(); see the cause above [work",
        "too many: 3 workers need 4 ranks, and 3 were started",
        *(f"{backend}: all kept" for backend in backends.split()),
    ):
        assert words in out, out


def test_the_tests_of_the_process_collectors_pass_over_mpi(request):
    needs("mpirun", request)
    ranks = [MPIRUN, "-n", "5", sys.executable]
    code, out = run(ranks, HERE / "ranks.py", str(HERE / "over_mpi.py"), seconds=220)
    assert code == 0, out
    assert "passed" in out or "100%" in out, out


@pytest.mark.parametrize(("world", "backend"), [("torchrun", "gloo"), ("ulfm", "mpi")])
def test_a_rank_that_is_killed_is_named_with_its_host(world, backend, request):
    needs(world, request)
    _, out = run(WORLDS[world], HERE / "world_script.py", "death", backend)
    assert re.search(rf"worker 1 lost: .*rank 2 on {socket.gethostname()}, process \d+", out), out


@pytest.mark.parametrize(("world", "backend"), [("torchrun", "gloo"), ("mpirun", "mpi")])
def test_ranks_end_with_rank_0(world, backend, request):
    needs(world, request)
    code, out = run(WORLDS[world], HERE / "world_script.py", "trainer", backend)
    assert code != 0
    pids = [int(pid) for pid in re.search(r"ranks (\d+) (\d+)", out).groups()]
    assert kit.gone(pids, 10), out


def test_mpi_without_mpirun_is_refused():
    with pytest.raises(UsageError, match="mpirun -n N python"):
        DistributedCollector(["CartPole-v1"], frames_per_batch=10, backend="mpi")
    with pytest.raises(UsageError, match="give no launcher"):
        DistributedCollector(["CartPole-v1"], frames_per_batch=10, backend="mpi", launcher="mp")


EXAMPLES = [("torchrun", "torchrun.py"), ("mpirun", "mpirun.py"), ("python", "rpc.py")]


@pytest.mark.parametrize(("world", "name"), EXAMPLES)
def test_the_examples_run(world, name, request):
    if world != "python":
        needs(world, request)
    command = {**WORLDS, "python": [sys.executable, "-W", "error"]}[world]
    code, out = run(command, ROOT / "examples/distributed" / name, "400")
    assert code == 0, out
    assert re.search(r"400 frames, return \d+", out), out
