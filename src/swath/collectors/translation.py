"""How what somebody writes who comes from another library becomes what swath understands.

A table says it, row by row: `from_torchrl.py` is the one of TorchRL. The option parser reads its
options, the docs read all of it.

```
  same         the same name with the same meaning
  no effect    accepted, since swath does it anyway or has nothing to do there
  translated   written in swath's way, before anything else looks at it
  refused      with a sentence that says what to write instead
```
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swath.errors import UsageError

__all__ = [
    "ANY",
    "Attribute",
    "Call",
    "Given",
    "Method",
    "Option",
    "Row",
    "Translation",
    "Variable",
    "missing_name",
    "translated",
]

Kind = Literal["option", "variable", "method", "attribute", "name"]
Outcome = Literal["same", "no effect", "translated", "refused"]
Given = Mapping[str, Any]


def ANY(value: object) -> bool:
    """Stand for all values of an option."""
    return True


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that TorchRL has, and what becomes of it."""

    name: str
    kind: Kind
    outcome: Outcome = "same"
    says: str = ""
    """What is to be known of it, in whole sentences; of what is refused, the sentence for that."""
    owners: tuple[str, ...] = ()
    """The classes that it is about, and their subclasses; all collectors if empty."""

    def concerns(self, owner: type) -> bool:
        """Tell whether this row is about a class."""
        return not self.owners or any(one.__name__ in self.owners for one in owner.__mro__)


@dataclass(frozen=True, kw_only=True)
class Option(Row):
    """An option of TorchRL's constructors that is none of swath's, or takes other values here.

    Of a value that is given, the first of these holds: it is without effect (`nothing`), given
    under swath's name (`alias_of`), translated (`into`), or refused (`says`).
    """

    kind: Kind = "option"
    outcome: Outcome = "no effect"
    scopes: tuple[str, ...] = ()
    """Where workers run, of the collectors that it is about; everywhere if empty."""
    nothing: tuple[Any, ...] | Callable[[Any], bool] = ()
    """Values without effect, or a test of them."""
    alias_of: str = ""
    """The option of swath of which this is another name."""
    into: Callable[[Any, Given], Given] | None = None
    """Return options of swath from a value and the others that were given."""
    when: Callable[[Any, Given], bool] | None = None
    """Tell whether a value, beside the others that were given, is what this row is about."""
    page: str = ""
    """What the docs say of it, if not what follows from the rest."""
    tried: tuple[Any, ...] = ()
    """Values that are not without effect, as examples for the docs and the tests."""

    def has_no_effect(self, value: Any) -> bool:
        """Tell whether a value is accepted, and nothing comes of it."""
        if callable(self.nothing):
            return self.nothing(value)
        return any(type(value) is type(one) and value == one for one in self.nothing)

    def is_about(self, owner: type, scope: str, value: Any, given: Given) -> bool:
        """Tell whether this row says what becomes of an option."""
        there = not self.scopes or scope in self.scopes
        return there and self.concerns(owner) and (self.when is None or self.when(value, given))


@dataclass(frozen=True, kw_only=True)
class Variable(Row):
    """A variable of the environment; if it names an option, it is read where that is not given."""

    kind: Kind = "variable"
    option: str = ""
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attribute(Row):
    """What is read of a collector, and never set."""

    kind: Kind = "attribute"
    read: Callable[[Any], Any]
    """Return it, of a collector."""


@dataclass(frozen=True, kw_only=True)
class Method(Row):
    """A method that swath's collectors do not have."""

    kind: Kind = "method"
    call: Callable[..., Any]
    """Called with the collector and what the method was given."""


@dataclass(frozen=True, kw_only=True)
class Call(Row):
    """A method of swath's that is called in TorchRL's way, too."""

    kind: Kind = "method"
    call: Callable[..., Any]
    """Called with the collector, the method, and what that was given."""


@dataclass
class Translation:
    """What was given, in swath's way."""

    options: dict[str, Any]
    aside: dict[str, Any] = field(default_factory=dict)
    """What has no effect."""
    names: dict[str, str] = field(default_factory=dict)
    """The names under which options were given, where swath has others."""


def translated(rows: Sequence[Row], owner: type, scope: str, given: Given) -> Translation:
    """Return what was given to a constructor in swath's way.

    Args:
        rows: The table; of several rows of one option, the first that is about it holds.
        owner: The class of the collector.
        scope: Where its workers run.
        given: The keyword arguments, as they came.
    """
    options = [row for row in rows if isinstance(row, Option) and row.name in given]
    about = [row for row in options if row.is_about(owner, scope, given[row.name], given)]
    done = Translation({k: v for k, v in given.items() if k not in {row.name for row in about}})
    for name in dict.fromkeys(row.name for row in about):
        _translate(done, next(row for row in about if row.name == name), given[name], owner)
    for row in rows:
        if isinstance(row, Variable) and row.option and scope in row.scopes:
            _look_up(done, row)
    return done


def _translate(done: Translation, row: Option, value: Any, owner: type) -> None:
    if row.has_no_effect(value):
        done.aside[row.name] = value
    elif row.alias_of:
        _rename(done, row, value)
    elif row.into is not None:
        done.options.update(row.into(value, done.options))
    else:
        raise UsageError(f"{owner.__name__} does not take {row.name}={_short(value)}: {row.says}")


def _look_up(done: Translation, row: Variable) -> None:
    """Take an option from the environment, if it was not given."""
    value = os.environ.get(row.name)
    if value and done.options.get(row.option) is None:
        done.options[row.option], done.names[row.option] = value, row.name


def _rename(done: Translation, row: Option, value: Any) -> None:
    """Take a value over under swath's name, unless that says the same or more."""
    new = row.alias_of
    there = done.options.get(new)
    if new in done.options and there not in (None, -1) and value not in (None, -1):
        if there == value:
            return
        raise UsageError(
            f"{row.name}={_short(value)} and {done.names.get(new, new)}={_short(there)} are two "
            "names of one option; give only one of them."
        )
    if new not in done.options or value not in (None, -1):
        done.options[new], done.names[new] = value, row.name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


def missing_name(rows: Sequence[Row], module: str, name: str) -> Exception:
    """Return what to raise for a name that a module does not have."""
    for row in rows:
        if row.kind == "name" and row.name == name and row.outcome == "refused":
            return ImportError(f"{module} has no {name}: {row.says}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
