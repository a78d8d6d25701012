"""Ranks of a real `torchrun` and a real `mpirun` are the workers."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import multi_kit as kit
import pytest
from world_kit import ROOT, mpirun, needs, run

from swath.collectors.distributed import DistributedCollector
from swath.errors import UsageError

HERE = Path(__file__).parent
KITS = ROOT / "tests" / "kits"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
WORLDS = {
    "torchrun": TORCHRUN,
    "mpirun": mpirun(3),
    "ulfm": mpirun(3, "--with-ft", "ulfm"),
}


@pytest.mark.parametrize(("world", "backends"), [("torchrun", "gloo rpc"), ("mpirun", "mpi gloo")])
def test_the_promises_hold_for_one_collector_after_the_other(world, backends, request):
    needs(world, request)
    code, out = run(WORLDS[world], HERE / "world_script.py", "promises", *backends.split())
    assert code == 0, out
    for words in (
        "every transition came once",
        "equal seeds give equal data",
        "at the same time: the ranks already work for another collector",
        "refused a connection from 127.0.0.1: it does not know the secret",
        "versions are right, a stranger was refused",
        "env: the env raised ZeroDivisionError: on purpose in step(); see the cause above [work",
        "too many: 3 workers need 4 ranks, but 3 were started",
        *(f"{backend}: all kept" for backend in backends.split()),
    ):
        assert words in out, out


@pytest.mark.timeout(480)
def test_the_promises_of_every_backend_hold_over_mpi(request):
    needs("mpirun", request)
    tests = ROOT / "tests" / "backends"
    code, out = run(mpirun(5), KITS / "ranks.py", str(tests), "--backend", "mpi", seconds=400)
    assert code == 0, out
    assert re.search(r"\d+ passed", out), out


@pytest.mark.parametrize(("world", "blocks"), [("torchrun", "gloo"), ("ulfm", "mpi")])
def test_a_rank_that_is_killed_is_named_with_its_host(world, blocks, request):
    needs(world, request)
    code, out = run(WORLDS[world], HERE / "world_script.py", "death", blocks)
    assert re.search(rf"worker 0 lost: .*rank 1 on {socket.gethostname()}, process \d+", out), out
    assert kit.gone(ranks(out)), out
    if world == "ulfm":  # rank 0 goes on, and ends as if nothing had been
        assert code == 0, out
        assert "afterwards: rank 1 has died" in out, out
        assert "end of the script" in out, out


def ranks(out: str) -> list[int]:
    return [int(pid) for pid in re.search(r"ranks (\d+) (\d+)", out).groups()]


def test_mpirun_ends_all_ranks_when_one_is_killed(request):
    needs("mpirun", request)
    code, out = run(WORLDS["mpirun"], HERE / "world_script.py", "death", "mpi")
    assert code != 0, out
    assert "end of the script" not in out, out
    assert kit.gone(ranks(out)), out


@pytest.mark.parametrize("how", ["hangs", "leaves"])
def test_rank_0_does_not_wait_for_ever_for_a_rank_that_does_not_end(how, request):
    needs("ulfm", request)
    code, out = run(WORLDS["ulfm"], HERE / "world_script.py", how, "mpi")
    assert code != 0, out
    assert kit.gone(ranks(out)), out
    if how == "hangs":  # of one that leaves with an exit code mpirun may take notice itself
        assert "end of the script" in out, out
        assert "ranks [1] did not end, so this job is aborted" in out, out


def test_a_rank_that_comes_when_all_is_over_ends_with_the_others(request):
    needs("mpirun", request)
    code, out = run(WORLDS["mpirun"], HERE / "world_script.py", "late", "mpi")
    assert (code, "end of the script" in out) == (0, True), out


RANK_0_DIES = [("torchrun", "gloo"), ("mpirun", "mpi"), ("ulfm", "mpi")]


@pytest.mark.parametrize(("world", "blocks"), RANK_0_DIES)
def test_ranks_end_with_rank_0(world, blocks, request):
    needs(world, request)
    code, out = run(WORLDS[world], HERE / "world_script.py", "trainer", blocks)
    assert (code == 0) == (world == "ulfm")  # it does not count who died
    assert kit.gone(ranks(out)), out


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
