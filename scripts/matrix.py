"""Run the tests with the lowest declared versions, with the pins, and with the newest versions.

    python scripts/matrix.py                    # all three: .venv-lowest, .venv-pins, .venv-newest
    python scripts/matrix.py lowest --python python3.10 -- tests/data -x

What follows `--` goes to pytest. `--index-url` and the like are read by pip from its environment:
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets small builds of torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

__all__ = ["COLUMNS", "lowest", "main", "requirements"]

ROOT = Path(__file__).parents[1]
COLUMNS = ("lowest", "pins", "newest")
EXTRAS = ("ray", "slurm", "jax", "minari")
TOOLS = "test"


def declared() -> dict[str, Any]:
    """Return the project table of `pyproject.toml`."""
    if tomllib is None:
        raise SystemExit("make matrix needs Python 3.11 or newer; the tests may use an older one")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(project: dict[str, Any]) -> list[str]:
    """Return what swath needs, and what its extras need that tests can do with."""
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(one for name in EXTRAS for one in extras[name])]


def lowest(requirement: str) -> str:
    """Return a requirement as a pin of the lowest version that it allows."""
    wanted, semicolon, marker = requirement.partition(";")
    return re.sub(r">=\s*([^,\s]+).*", r"==\1", wanted) + semicolon + marker


def install(column: str, python: str) -> Path:
    """Return the interpreter of a fresh environment that has the versions of a column."""
    place = ROOT / f".venv-{column}"
    subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
    scripts = place / ("Scripts" if sys.platform == "win32" else "bin")
    project = declared()
    wanted, more = requirements(project), ["--upgrade", "--upgrade-strategy", "eager"]
    if column == "lowest":
        wanted, more = [lowest(one) for one in wanted], []
    elif column == "pins":
        more = ["-c", str(ROOT / "constraints.txt")]
    tools = project["optional-dependencies"][TOOLS]
    pip = [str(scripts / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *more, *wanted, *tools], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return scripts / "python"


def versions(python: Path) -> str:
    """Return the versions that matter in an environment, in a line."""
    told = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True).stdout
    named = ("torch", "tensordict", "numpy", "gymnasium", "cloudpickle", "rich", "typer", "ray")
    found = dict(line.split("==") for line in told.splitlines() if line.count("==") == 1)
    about = subprocess.run([python, "--version"], capture_output=True, text=True).stdout.strip()
    return ", ".join([about, *(f"{name} {found[name]}" for name in named if name in found)])


def main(arguments: Sequence[str]) -> int:
    """Run the columns that were asked for; return 1 if tests fail in one."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    ours, theirs = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("columns", nargs="*", help=f"some of {', '.join(COLUMNS)}; all by default")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to test")
    given = parser.parse_args(ours)
    results = []
    if unknown := set(given.columns) - set(COLUMNS):
        parser.error(f"unknown columns: {', '.join(unknown)}")
    for column in given.columns or COLUMNS:
        python = install(column, given.python)
        tests = ["-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "-m", "not cluster"]
        code = subprocess.run([python, *tests, *theirs], cwd=ROOT).returncode
        results.append((column, "passed" if code == 0 else f"failed ({code})", versions(python)))
    for column, outcome, about in results:
        print(f"{column:8} {outcome:12} {about}")
    return int(any(outcome != "passed" for _, outcome, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
