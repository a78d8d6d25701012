"""What the ranks of `mpirun` run: rank 0 tests, the others are the other ends of its links.

They end without MPI_Finalize, which waits for ever for a rank that ended with an exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from swath.preload import preload


def run_tests(arguments: list[str]) -> int:
    import contract_kit as kit
    import pytest

    _, board = kit.ranks()
    try:
        return pytest.main(["-p", "no:cacheprovider", "-q", *arguments])
    finally:
        board.post("end")


def serve(world: Any) -> int:
    world.gather(os.getpid())  # as `kit.ranks` does; then rank 0 need not wait for us
    os.nice(2 * world.rank)  # the first is needed first
    preload()  # without torch's compiler that is faster
    import contract_kit as kit

    kit.serve_pairs()
    return 0


if __name__ == "__main__":
    from mpi4py.MPI import COMM_WORLD as world  # all ranks wait for each other here

    code = 1
    try:
        code = serve(world) if world.rank else run_tests(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)
