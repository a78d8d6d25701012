"""What `help()` shows of a collector: its signature, and the text of every option.

The texts stand once, below the fields of `Options`; the reference of the docs is made of them, too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from itertools import pairwise

from swath.collectors.options import Options, Scope

__all__ = ["document", "texts"]

_MARK = "    **options:"


@functools.cache
def texts() -> dict[str, str]:
    """Return the text of each option, on one line."""
    try:
        source = inspect.getsource(Options)
    except OSError:  # an installation without sources, of which help() says less
        return {}
    tree = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, below in pairwise(tree.body):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[line.target.id] = " ".join(str(below.value.value).split())
    return found


def document(kind: type, scope: Scope) -> None:
    """Give a class of collectors the signature and the help that its options make.

    Args:
        kind: The class; its docstring ends the arguments with a line for `**options`.
        scope: Where its workers run.
    """
    signature = Options.signature(scope)
    kind.__signature__ = signature  # type: ignore[attr-defined]
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
    at = next((n for n, line in enumerate(lines) if line.startswith(_MARK)), None)
    if at is None:
        return
    end = next((n for n in range(at + 1, len(lines)) if not lines[n].strip()), len(lines))
    names = [name for name in signature.parameters if name in texts()]
    lines[at:end] = [line for name in names for line in _entry(name)] or lines[at:end]
    kind.__doc__ = "\n".join(lines)


def _entry(name: str) -> list[str]:
    """Return the lines of one option."""
    text = f"{name}: {texts()[name]}"
    return textwrap.wrap(text, 88, initial_indent=" " * 4, subsequent_indent=" " * 8)
