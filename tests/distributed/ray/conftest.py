"""One lean cluster for all tests here, on this machine; skipped, and said so, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install swath[ray]")
sys.path.insert(0, str(Path(__file__).parents[2] / "collectors"))  # for multi_kit, in actors too


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with so many CPUs that no test waits for one."""
    import ray
    from ray_kit import LEAN, end

    ray.init(num_cpus=8, resources={"rare": 1}, **LEAN)
    yield ray
    end(ray.shutdown)
