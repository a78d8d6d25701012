"""Jobs that another process submits for us."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swath.workers import delayed
from swath.workers.delayed import Request
from swath.workers.remote import Invitation

LIVE = """
import sys, time
from pathlib import Path
from swath.workers.delayed import telling_of_life
with telling_of_life(Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(120)
"""


@pytest.mark.timeout(120)
def test_who_waits_for_a_job_hears_that_nobody_looks_after_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWATH_DELAYED", json.dumps({"folder": str(tmp_path), "options": {}}))
    monkeypatch.setattr(delayed, "_SILENT", 5.0)
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, str(tmp_path)], stdout=subprocess.PIPE
    ) as submitter:
        try:
            assert submitter.stdout is not None
            assert submitter.stdout.readline() == b"here\n"
            request = Request(Invitation("127.0.0.1", 1, b"s3", 60.0), [0])
            signs = set()
            while len(signs) < 3:  # it lives
                assert request.ended() is None
                if (tmp_path / "alive").exists():
                    signs.add((tmp_path / "alive").read_text())
                time.sleep(0.05)
        finally:
            submitter.kill()
    while (how := request.ended()) is None:
        time.sleep(0.05)
    assert "the process that submits the jobs has written nothing" in how
    request.cancel()
