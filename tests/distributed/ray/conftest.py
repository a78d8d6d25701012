"""One lean cluster for all tests here, on this machine; skipped, and said so, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install swath[ray]")
sys.path.insert(0, str(Path(__file__).parents[2] / "collectors"))  # for multi_kit, in actors too

LEAN = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": 256 << 20,
    "logging_level": "error",
    "log_to_driver": False,
}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with so many CPUs that none of the tests waits for one."""
    import ray

    ray.init(num_cpus=8, resources={"rare": 1}, **LEAN)
    yield ray
    ray.shutdown()
