"""Write the table of TorchRL's names into the page for those who come from there.

python scripts/torchrl_table.py          # writes docs/coming-from/torchrl.md
python scripts/torchrl_table.py --check  # only says whether the page is as the table is
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from swath.collectors.from_torchrl import ROWS
from swath.collectors.translation import ANY, Option, Row

__all__ = ["PAGE", "in_step", "rendered"]

PAGE = Path(__file__).parents[1] / "docs" / "coming-from" / "torchrl.md"
_BEGIN, _END = "<!-- table: {} -->\n", "<!-- end of table -->\n"
_HEADS = {
    "option": "Options",
    "variable": "Variables of the environment",
    "method": "Methods",
    "attribute": "Attributes",
    "name": "Names",
}


def rendered(kind: str) -> str:
    """Return the rows of one kind as Markdown."""
    rows = [row for row in ROWS if row.kind == kind]
    same = sorted({row.name for row in rows if _plain(row)})
    lines = [f"The same: {', '.join(f'`{name}`' for name in same)}.", ""] if same else []
    lines = [one for line in lines for one in textwrap.wrap(line, 100) or [""]]
    others = sorted((row for row in rows if not _plain(row)), key=lambda row: row.name.lower())
    if others:
        lines += [f"| {kind} | here |", "|---|---|", *map(_line, others), ""]
    return "\n".join(lines)


def _plain(row: Row) -> bool:
    return row.outcome == "same" and not row.says and not row.owners


def _line(row: Row) -> str:
    owners = f" ({', '.join(row.owners)})" if row.owners else ""
    return f"| `{row.name}`{owners} | {_what(row)} |".replace("\n", " ")


def _what(row: Row) -> str:
    says = row.says and row.says[0].upper() + row.says[1:]
    if not isinstance(row, Option):
        return " ".join(filter(None, (f"{row.outcome}.".capitalize(), says)))
    if row.page:
        return row.page
    if row.nothing is ANY:
        return f"No effect. {says}"
    parts = []
    if isinstance(row.nothing, tuple) and row.nothing:
        parts.append(f"{_values(row.nothing)}: no effect.")
    if row.alias_of:
        parts.append(f"Another name of `{row.alias_of}`.")
    elif row.into is not None:
        parts.append("Translated.")
    else:
        tried = _values(row.tried)
        parts.append(f"{tried} and the like: refused." if tried else "Anything else: refused.")
    return " ".join([*parts, says]).strip()


def _values(values: tuple[object, ...]) -> str:
    names = (value.__name__ if isinstance(value, type) else repr(value) for value in values)
    return ", ".join(f"`{name}`" for name in names)


def in_step(text: str) -> str:
    """Return the text of the page with the rows of now."""
    for kind, head in _HEADS.items():
        begin = _BEGIN.format(head)
        start = text.index(begin) + len(begin)
        stop = text.index(_END, start)
        text = f"{text[:start]}\n{rendered(kind)}\n{text[stop:]}"
    return text


def main() -> int:
    """Write the page, or say that it is to be written."""
    now = PAGE.read_text()
    new = in_step(now)
    if "--check" not in sys.argv:
        PAGE.write_text(new)
    elif now != new:
        sys.stderr.write(f"{PAGE} is not as the table is: python {sys.argv[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
