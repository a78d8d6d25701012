"""Be a worker of a collector that waits for one: `python -m swath.workers.join HOST:PORT NUMBER`.

The collector has `launcher="wait"`; both have the secret from the environment, SWATH_SECRET.
"""

from __future__ import annotations

import argparse
import os
import sys

from swath.workers.remote import Invitation, join

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m swath.workers.join", description="Be a worker.")
    parser.add_argument("address", metavar="HOST:PORT", help="of the collector")
    parser.add_argument("number", type=int, help="which worker to be, from 0")
    parser.add_argument("--link-timeout", type=float, default=60.0, help="as the collector has it")
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    secret = os.environ.get("SWATH_SECRET", "").encode()
    if not (port.isdigit() and secret):
        parser.error("give the collector as HOST:PORT and its secret in SWATH_SECRET.")
    try:
        join(Invitation(host.strip("[]"), int(port), secret, given.link_timeout), given.number)
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
