"""Move the fragments in changes/ to CHANGELOG.md, under a version and the date of today.

python scripts/changelog.py 0.2.0
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

__all__ = ["collected", "main"]

ROOT = Path(__file__).parents[1]
KINDS = ("added", "changed", "fixed", "removed")


def collected(folder: Path) -> tuple[str, list[Path]]:
    """Return the fragments of a folder as sections, and their files; ValueError if one is wrong."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    files = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    for path in files:
        kind = path.name.split(".")[-2]
        changes = re.split(r"^- ", path.read_text(), flags=re.MULTILINE)
        texts = [text for text in (" ".join(change.split()) for change in changes) if text]
        if kind not in found or not texts:
            raise ValueError(f"{path.name}: name it NAME.KIND.md, KIND one of {KINDS}, with a text")
        found[kind] += [f"- {text}" for text in texts]
    parts = [f"### {kind.title()}\n\n" + "\n".join(lines) for kind, lines in found.items() if lines]
    return "\n\n".join(parts), files


def main(version: str) -> None:
    """Write CHANGELOG.md anew and delete the fragments."""
    sections, files = collected(ROOT / "changes")
    if not files:
        raise SystemExit("changes/ has no fragments")
    log = ROOT / "CHANGELOG.md"
    before, first, after = log.read_text().partition("\n## ")
    heading = f"\n## [{version}] - {datetime.date.today():%Y-%m-%d}\n\n"
    log.write_text(f"{before}{heading}{sections}\n{first}{after}")
    for path in files:
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
