"""Install the wheel of a folder in a bare environment and run the README's snippet there.

python scripts/try_wheel.py dist [v0.1.0]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(folder: str, tag: str | None = None) -> None:
    """Run the snippet with the one wheel of a folder, whose version must be that of the tag."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    if tag is not None and not wheel.name.startswith(f"swath-{tag.removeprefix('v')}-"):
        raise SystemExit(f"{wheel.name} is not the version of the tag {tag}")
    text = (ROOT / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:1]
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        scripts = Path(place) / ("Scripts" if sys.platform == "win32" else "bin")
        run = [str(scripts / "python"), "-m"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([*run, "pip", "install", "-q", *constraints, str(wheel)], check=True)
        (Path(place) / "readme.py").write_text(snippet)
        subprocess.run([str(scripts / "python"), "readme.py"], cwd=place, check=True)
        subprocess.run([*run, "swath", "--version"], cwd=place, check=True)
    print(f"{wheel.name}: the README runs in a bare environment")


if __name__ == "__main__":
    main(*sys.argv[1:])
