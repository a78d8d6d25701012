"""Run all examples whole and write what came of it into docs/examples.md; `make examples`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = ("ppo_cartpole", "dqn_cartpole", "sac_pendulum", "ppo_torchrl_loss")
ROOT = Path(__file__).resolve().parent.parent
PAGE, OUT = ROOT / "docs" / "examples.md", ROOT / "docs" / "examples"
BEGIN, END = "<!-- results: written by make examples -->", "<!-- end of results -->"


def row(name: str) -> str:
    """Run one example and return its line of the table."""
    load = os.getloadavg()[0]
    command = ["python", f"examples/{name}.py", "--seed", "0"]
    subprocess.run([sys.executable, *command[1:], "--out", str(OUT)], cwd=ROOT, check=True)
    result = json.loads((OUT / f"{name}.json").read_text())
    cells = (
        f"[`{name}.py`](#{name})",
        result["seed"],
        f"{result['frames']:,}",
        f"{result['seconds']:.0f} s",
        f"{load:.1f}",
        f"{result['mean_return']:.1f}",
        f"`{' '.join(command)}`",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    head = "| example | seed | frames | wall time | load before | mean return | command |"
    table = "\n".join([head, "|---" * head.count(" | ") + "|---|", *map(row, EXAMPLES)])
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()
