"""What the ranks of a world run: rank 0 all tests of a file, the others are its workers."""

from __future__ import annotations

import sys

from swath.collectors.distributed import DistributedCollector
from swath.workers.worlds import find_world

if __name__ == "__main__":
    if find_world().rank:
        DistributedCollector("CartPole-v1", frames_per_batch=1)
    import pytest

    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
