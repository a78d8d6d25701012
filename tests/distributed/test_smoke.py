"""One collector over each backend, from the first frame to the last; their suites are long."""

from __future__ import annotations

from pathlib import Path

import multi_kit as kit
import pytest
from backend_kit import Backend
from world_kit import mpirun, needs, run

from swath.collectors.distributed import DistributedCollector
from swath.testing import check_transitions

pytestmark = pytest.mark.timeout(120)
KITS = str(Path(kit.__file__).parent)


def collect(make, workers=2, **options):
    """Collect with weights that change after every batch; each frame says which it had."""
    policy, batches = kit.Telling(), []
    options |= {"frames_per_batch": 20, "total_frames": 100, "seed": 1}
    with make([kit.wide] * workers, policy, **options) as collector:
        for number, batch in enumerate(collector):
            batches.append(batch)
            assert kit.told_right(batch)
            collector.update_policy_weights_(policy.become(number + 1))
        assert collector.policy_version == len(batches)
    assert check_transitions(batches) == 100


def test_gloo():
    collect(Backend("gloo").sync)


def test_rpc(torch_keeps_its_last_agent):
    collect(Backend("rpc").first_come)


def test_mpirun(request, tmp_path):
    needs("mpirun", request)
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path += {[KITS, str(Path(__file__).parent)]}\n"
        "import test_smoke\nfrom backend_kit import Backend\n"
        "test_smoke.collect(Backend('mpi').sync, 1)\nprint('all collected')\n"
    )
    code, out = run(mpirun(2), script)
    assert code == 0, out
    assert "all collected" in out


def test_submitit(tmp_path, local_jobs):
    slurm = {"cluster": "local", "folder": tmp_path}
    collect(DistributedCollector, launcher="submitit", slurm_kwargs=slurm, launch_timeout=60)


@pytest.mark.skipif("not __import__('ray_kit').INSTALLED", reason="needs Ray: swath[ray]")
def test_ray(cluster):
    collect(Backend("ray").sync)
