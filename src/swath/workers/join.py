"""Be a worker of a collector that waits for one: `python -m swath.workers.join HOST:PORT NUMBER`.

The collector has `launcher="wait"`; both read the secret of the run from the environment variable
SWATH_SECRET, unless the collector was given one.
"""

from __future__ import annotations

import argparse
import os
import sys

from swath.workers.remote import Invitation, join

__all__ = ["main"]


def main() -> int:
    """Join, and return what a shell wants to know."""
    parser = argparse.ArgumentParser("python -m swath.workers.join", description="Be a worker.")
    parser.add_argument("address", metavar="HOST:PORT", help="of the collector")
    parser.add_argument("number", type=int, help="which worker to be, from 0")
    parser.add_argument("--link-timeout", type=float, default=60.0, help="as the collector has it")
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    if not port.isdigit() or "SWATH_SECRET" not in os.environ:
        parser.error("give the collector as HOST:PORT and its secret in SWATH_SECRET.")
    secret = os.environ["SWATH_SECRET"].encode()
    try:
        join(Invitation(host.strip("[]"), int(port), secret, given.link_timeout), given.number)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
