"""What mkdocs does beside rendering: tables made from the code, prompts, and llms.txt."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from swath.collectors.documented import texts
from swath.collectors.options import Options

ROOT = Path(__file__).parents[1]
SCOPES = {
    ("inline", "workers", "cluster", "ray"): "all",
    ("workers", "cluster", "ray"): "with workers",
    ("cluster", "ray"): "`DistributedCollector`, `RPCCollector`, `RayCollector`",
    ("cluster",): "`DistributedCollector`, `RPCCollector`",
    ("ray",): "`RayCollector`",
}
"""Which collectors an option is for, by its scopes; see `swath.collectors.options`."""


def options_table() -> str:
    """Return all options of all collectors as a table."""
    lines = ["| option | what it does | default | which collectors |", "|---|---|---|---|"]
    for field in fields(Options):
        scopes = tuple(field.metadata.get("scopes", ("inline", "workers", "cluster", "ray")))
        if not scopes:  # nothing that a user gives
            continue
        which = SCOPES.get(scopes, ", ".join(scopes))
        text = texts()[field.name].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {text} | {_default(field)} | {which} |")
    return "\n".join(lines)


def _default(field: Any) -> str:
    if field.default is MISSING or field.name == "frames_per_batch":
        return "required"
    name = getattr(field.default, "name", None)  # of an enum
    return f"`{name.lower()!r}`" if name else f"`{field.default!r}`"


def versions_table() -> str:
    """Return the packages that swath needs, with the lowest and the pinned version of each."""
    project = (ROOT / "pyproject.toml").read_text()
    needs = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    lines = ["| package | lowest | developed with |", "|---|---|---|"]
    for name, lowest in re.findall(r'"([\w-]+)>=([\w.]+)"', needs[1] if needs else ""):
        lines.append(f"| {name} | {lowest} | {pinned[name]} |")
    return "\n".join(lines)


TABLES = {
    "<!-- table of options -->": options_table,
    "<!-- table of versions -->": versions_table,
    "<!-- SECURITY.md -->": (ROOT / "SECURITY.md").read_text,
}
"""What the marks in pages stand for."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in the tables; show examples with prompts as what they are."""
    for mark, table in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return re.sub(r"```python\n(?=>>> )", "```pycon\n", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt, a list of all pages, and llms-full.txt, their text."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    whole = []
    for section, pages in sections(config["nav"]):
        lines += [f"## {section}", ""]
        for path in pages:
            markdown = on_page_markdown((docs / path).read_text())
            title, first = opening(markdown)
            url = config["site_url"] + re.sub(r"(index)?\.md$", "", path)
            lines.append(f"- [{title}]({url.rstrip('/')}/): {first}")
            whole.append(with_docstrings(markdown))
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))
    (site / "llms-full.txt").write_text("\n\n".join(whole))


def sections(nav: list[Any]) -> list[tuple[str, list[str]]]:
    """Return the sections of the navigation with the paths of their pages."""
    found: list[tuple[str, list[str]]] = [("Start", [])]
    for entry in nav:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        if isinstance(value, str):
            found[0][1].append(value)
        else:
            paths = [e if isinstance(e, str) else next(iter(e.values())) for e in value]
            found.append((next(iter(entry)), paths))
    return found


def opening(markdown: str) -> tuple[str, str]:
    """Return the title of a page and its first sentence."""
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    rest = markdown[title.end() :] if title else markdown
    rest = re.sub(r"^```.*?^```", "", rest, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", rest):
        text = " ".join(block.split())
        if text and text[0] not in "`|#<!:>[-*":
            sentence = re.match(r".+?\.(?= |$)", text)
            plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", sentence.group() if sentence else text)
            return (title.group(1) if title else ""), plain.rstrip(":").replace("**", "")
    return (title.group(1) if title else ""), ""


def with_docstrings(markdown: str) -> str:
    """Return a page of the reference with the docstrings that mkdocstrings would put in."""
    return re.sub(r"^::: (\S+)\n((?: {4}.*\n)*)", _documented, markdown, flags=re.MULTILINE)


def _documented(found: re.Match[str]) -> str:
    module, _, name = found[1].rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    members = re.search(r"members: \[(.+)\]", found[2])
    parts = [f"### {name}", inspect.getdoc(thing) or ""]
    for member in members[1].split(", ") if members else []:
        parts += [f"#### {name}.{member}", inspect.getdoc(getattr(thing, member)) or ""]
    return "\n\n".join(parts) + "\n"
