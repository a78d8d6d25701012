"""The contract of links over MPI: its own tests, run by rank 0 of a real `mpirun`.

What differs there, and why:

- `mpirun` ends all ranks when one dies, rank 0 too; `test_worlds.py` has that. What a link does
  then can only be seen with `--with-ft ulfm`, where the others go on. Some tests kill a rank: there
  is one for each of them, and one more.
- How a rank died only `mpirun` knows. The link tells that the connection has ended.
- A rank is not ours to end. When a link is closed it is free for the next one, and only one that is
  stuck ends, by itself, seconds later.
- ULFM sees who was killed or ended with 0, not who ended with another exit code: by default that
  even counts as the end of the job. Here it does not, and the link notices by its connection.
"""

from __future__ import annotations

import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

import pytest
import test_contract
from world_kit import mpirun, needs, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]
HERE = Path(__file__).parent
DEATHS = 7
FLAGS = ["--with-ft", "ulfm", "--runtime-options", "error-nonzero-status=0"]


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """Return what each test did, in all its variants, and all that the ranks wrote."""
    needs("mpirun", request)
    report = tmp_path_factory.mktemp("mpi") / "report.xml"
    arguments = [str(HERE / "test_contract.py"), "--color=no", f"--junit-xml={report}"]
    arguments.append("--timeout=180")  # the first waits until the ranks have imported torch
    script = HERE / "contract_ranks.py"
    _, out = run(mpirun(DEATHS + 2, *FLAGS), script, *arguments, seconds=400, quick=False)
    assert report.exists(), out
    cases = defaultdict(list)
    for case in xml.parse(report).iter("testcase"):
        cases[case.get("name").partition("[")[0]].append(case)
    return cases, out


@pytest.mark.parametrize("item", [one for one in vars(test_contract) if one.startswith("test_")])
def test_the_contract_is_kept(item, told):
    cases, out = told
    assert cases[item], out
    for case in cases[item]:
        assert "mpi" in case.get("name")
        kinds = {one.tag for one in case}
        assert not kinds & {"failure", "error", "skipped"}, out
