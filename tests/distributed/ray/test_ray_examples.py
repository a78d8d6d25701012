"""The examples for Ray, for a few steps: on a cluster of their own, and on one that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from multi_kit import Child

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "ray"
# Enough for episodes to end, for updates, and for weights to be published.
FRAMES = {"ppo": 12_000, "sac_replay": 1_400}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def run(name, *options):
    path, frames = str(EXAMPLES / f"{name}.py"), str(FRAMES[name])
    script = Child(
        [sys.executable, "-W", "error", path, "--frames", frames, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with script:
        out, err = script.communicate(timeout=250)
    assert script.returncode == 0, err
    assert "Traceback" not in err
    assert re.search(r"return -?\d+\.\d", out), out


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(FRAMES)


def jobs():
    from ray._private.state import jobs

    return jobs()


def test_ppo_runs_on_a_cluster_of_its_own():
    run("ppo")


def test_sac_runs_on_a_cluster_that_runs(cluster):
    before = len(jobs())
    run("sac_replay", "--address", cluster.get_runtime_context().gcs_address)
    assert len(jobs()) == before + 1
