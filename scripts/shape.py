"""Measure the shape of the package against its budgets: concepts, not only lines.

python scripts/shape.py        # each figure beside its budget; fails where one is exceeded
python scripts/shape.py SRC    # the figures of another tree, such as that of an older version

The budgets stand in pyproject.toml, under `tool.swath.shape`. A figure that falls takes its budget
along; to raise one is a decision that a commit explains.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Figures", "measured"]

ROOT = Path(__file__).parents[1]
LOWER = ("collectors", "workers", "links")
"""The folders that hold the workers; where they are renamed, so they are here."""
AT_LEAST = {"words per function name", "comment lines, percent"}
"""Figures that are to be as large as their budget; all others, at most that."""


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    folder: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """How long it is."""
        return self.text.count("\n")


Figures = dict[str, float]


def modules(source: Path) -> list[Module]:
    """Return all files of a package."""
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join((source.name, *(part for part in parts if part != "__init__")))
        text = path.read_text()
        found.append(Module(name, parts[0] if len(parts) > 1 else "root", text, ast.parse(text)))
    return found


def measured(package: list[Module]) -> Figures:
    """Return each figure by its name."""
    lower = [module for module in package if module.folder in LOWER]
    code = {folder: 0 for folder in sorted({module.folder for module in package})}
    comments = lines = 0
    for module in package:
        own, commented = _counted(module)
        code[module.folder] += own
        comments, lines = comments + commented, lines + module.lines
    bases = _own_bases(package)
    words = [len(re.findall("[a-z0-9]+", name.lower())) for name in _functions(package)]
    return {
        "code lines": sum(code.values()),
        **{f"code lines in {folder}": count for folder, count in code.items()},
        "classes in " + ", ".join(LOWER): sum(1 for module in lower for _ in _classes(module)),
        "deepest chain of own classes": max(map(len, _chains(bases))),
        "classes of several own bases": sum(len(own) > 1 for own in bases.values()),
        "classes made at run time": sum(map(_made_classes, package)),
        "Any per 1,000 lines": round(1000 * sum(map(_anys, package)) / lines, 1),
        "containers keyed by worker": sum(map(_keyed_by_worker, lower)),
        "functions that a MultiAsync batch crosses": 0,
        "words per function name": round(sum(words) / len(words), 2),
        "comment lines, percent": round(100 * comments / lines, 1),
        "longest function": max(map(_length, _defined(package))),
        "largest file": max(module.lines for module in package),
    }


# -- lines ----------------------------------------------------------------------------------------


def _counted(module: Module) -> tuple[int, int]:
    """Return how many lines are code (no imports, docstrings, blanks), and how many comments."""
    code: set[int] = set()
    comments = 0
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            # What addresses a tool says nothing to a reader.
            comments += not re.match(r"#\s*(noqa|type:|pragma|pyright|--)", token.string)
        elif token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if _is_text(node) or isinstance(node, (ast.Import, ast.ImportFrom)) or _is_all(node):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code), comments


def _is_text(node: ast.AST) -> bool:
    held = isinstance(node, ast.Expr) and node.value
    return isinstance(held, ast.Constant) and isinstance(held.value, str)


def _is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


# -- classes and functions ------------------------------------------------------------------------


def _classes(module: Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _defined(package: list[Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for module in package:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how long a function is below its docstring."""
    first = node.body[1] if _is_text(node.body[0]) and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1


def _functions(package: list[Module]) -> Iterator[str]:
    for node in _defined(package):
        if not (node.name.startswith("__") and node.name.endswith("__")):
            yield node.name


def _own_bases(package: list[Module]) -> dict[str, list[str]]:
    """Return of each class of the package its bases that are of the package, too."""
    named = {(m.name, c.name): c for m in package for c in _classes(m)}
    by_name: dict[str, list[str]] = {}
    for module, name in named:
        by_name.setdefault(name, []).append(f"{module}.{name}")
    found = {}
    for (module, name), node in named.items():
        texts = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        # A class of the same file is meant before one of the same name elsewhere.
        own = [_nearest(module, by_name[text]) for text in texts if text in by_name]
        found[f"{module}.{name}"] = [one for one in own if one != f"{module}.{name}"]
    return found


def _nearest(module: str, candidates: list[str]) -> str:
    return max(candidates, key=lambda name: name.rpartition(".")[0] == module)


def _chains(bases: dict[str, list[str]]) -> Iterator[list[str]]:
    def chain(name: str) -> list[str]:
        return [name, *max((chain(base) for base in bases[name]), key=len, default=[])]

    return map(chain, bases)


def _made_classes(module: Module) -> int:
    """Return how many calls make a class: `type(name, bases, namespace)`."""
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return sum(ast.unparse(call.func) == "type" and len(call.args) == 3 for call in calls)


def _anys(module: Module) -> int:
    return sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(module.tree))


def _keyed_by_worker(module: Module) -> int:
    """Return how many attributes are dicts or sets by number, as a worker is known by one."""
    annotated = (node for node in ast.walk(module.tree) if isinstance(node, ast.AnnAssign))
    kinds = r"(dict|defaultdict|Counter|set|list)\[int\b"
    return sum(
        isinstance(node.target, ast.Attribute)
        and bool(re.match(kinds, ast.unparse(node.annotation)))
        for node in annotated
    )


_CROSSED = """
import sys, threading
from swath.collectors import MultiAsyncCollector
from swath.testing import CountingEnv

seen = set()
def note(frame, event, arg):
    if event == "call" and "swath" in frame.f_code.co_filename:
        seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

with MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=20) as collector:
    for _ in range(10):
        collector.next()
    sys.setprofile(note)
    for _ in range(20):
        collector.next()
    sys.setprofile(None)
print(len(seen))
"""


def crossed() -> int:
    """Return through how many functions a batch of a MultiAsyncCollector goes in this process."""
    command = [sys.executable, "-c", _CROSSED]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# -- the budgets ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Print all figures, and return whether one is beyond its budget."""
    source = Path(arguments[0]) if arguments else ROOT / "src" / "swath"
    figures = measured(modules(source))
    figures["functions that a MultiAsync batch crosses"] = crossed()
    if arguments:
        print("\n".join(f"{value:>10,}  {name}" for name, value in figures.items()))
        return 0
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["swath"]["shape"]
    beyond = [name for name, value in figures.items() if _is_beyond(name, value, budgets)]
    for name, value in figures.items():
        sign = "!" if name in beyond else " "
        print(f"{sign}{value:>10,}  {budgets.get(name, 0):>10,}  {name}")
    for name in beyond:
        print(f"{name} is beyond its budget in pyproject.toml: {figures[name]:,}", file=sys.stderr)
    return bool(beyond)


def _is_beyond(name: str, value: float, budgets: Figures) -> bool:
    budget = budgets.get(name, 0)
    return value < budget if name in AT_LEAST else value > budget


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
