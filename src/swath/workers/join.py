"""Where workers are to be: in a job, or by hand, `python -m swath.workers.join HOST:PORT NUMBER`.

By hand, the collector has `launcher="wait"`, and both have the secret from the environment,
SWATH_SECRET. Imports are in functions: without torch's compiler they take half the time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from swath.preload import preload

__all__ = ["LINK_TIMEOUT", "add_to_path", "node"]

LINK_TIMEOUT = 60.0
"""Seconds, unless the collector has others; see the option `link_timeout`."""


def node(payloads: Sequence[bytes], path: Sequence[str]) -> None:
    """Be a node, in a job: run workers until the last of them has ended."""
    for one in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_DFL)  # submitit would go on, or let Slurm start it again
    add_to_path(path)
    preload()
    from swath.links import forkserver, launch
    from swath.workers.remote import main

    forkserver.in_worker = os.getpid()  # workers are forks of this process: it has torch already
    workers = [launch(main, payload) for payload in payloads]
    left: dict[Any, Any] = {worker.sentinel: worker for worker in workers}
    while left:
        for sentinel in wait(list(left)):
            if left.pop(sentinel).exit_code() == 1:  # it could not join, or the trainer is gone
                sys.exit(1)  # no exception: the log is to end with what the worker said


def add_to_path(path: Sequence[str]) -> None:
    """Let this process import what the one that submitted it can."""
    sys.path.extend(one for one in path if one not in sys.path)


def _by_hand() -> None:
    parser = argparse.ArgumentParser("python -m swath.workers.join", description="Be a worker.")
    parser.add_argument("address", metavar="HOST:PORT", help="of the collector")
    parser.add_argument("number", type=int, help="the number of this worker, from 0")
    parser.add_argument(
        "--link-timeout",
        type=float,
        default=LINK_TIMEOUT,
        help="the same as link_timeout of the collector",
    )
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    secret = os.environ.get("SWATH_SECRET", "").encode()
    if not (port.isdigit() and secret):
        parser.error("give the collector as HOST:PORT and its secret in SWATH_SECRET.")
    preload()
    from swath.workers.remote import Invitation, join

    try:
        where = Invitation(host.strip("[]"), int(port), secret, given.link_timeout)
        if not join(where, given.number, tell=_tell):
            sys.exit(1)
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))


def _tell(text: str) -> None:
    sys.stderr.write(f"swath: {text}\n")


if __name__ == "__main__":
    _by_hand()
