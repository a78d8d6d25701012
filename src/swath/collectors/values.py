"""What values an option takes: each kind reads one, which makes it what it is to be or refuses it.

None never comes here: for an option that is not None by default it means the default.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from tensordict.nn import InteractionType

from swath.errors import UsageError, nearest

__all__ = [
    "Choice",
    "Count",
    "Device",
    "Exploration",
    "Flag",
    "Function",
    "Kind",
    "Port",
    "Real",
    "Sink",
    "Text",
    "Whatever",
    "mappings_of",
]

_REFUSED: Any = object()
_GPUS = {"gpu": "cuda", "cuda0": "cuda:0", "gpu0": "cuda:0", "gpu:0": "cuda:0"}


class Kind(Protocol):
    """A kind of values."""

    def read(self, name: str, value: Any) -> Any:
        """Return a value that was given for an option; raise `UsageError` if it is none of these.

        Args:
            name: The option, as it was given.
            value: Not None.
        """
        ...


@dataclass(frozen=True)
class Whatever:
    """Values that whoever uses them checks."""

    def read(self, name: str, value: Any) -> Any:
        """Return the value."""
        return value


@dataclass(frozen=True)
class Count:
    """A whole number, in whatever type it comes."""

    least: int
    remark: str = ""
    most: int | None = None
    zero: Any = _REFUSED
    """What 0 stands for, if it is below the least."""
    negative: Any = _REFUSED
    """What numbers below 0 stand for."""
    also: tuple[str, ...] = ()
    """Words that may stand there, too."""
    each: bool = False
    """A list of numbers is taken, too."""

    def read(self, name: str, value: Any) -> Any:
        """Return the number as an int."""
        if self.each and isinstance(value, (list, tuple)):
            return [self._one(name, one) for one in value]
        return self._one(name, value)

    def _one(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value in self.also:
            return value
        count = _whole(value)
        if count is not None and count < self.least:
            stands_for = self.negative if count < 0 else self.zero
            if stands_for is not _REFUSED:
                return stands_for
        if count is None or count < self.least:
            remark = f" ({self.remark})" if self.remark else ""
            raise UsageError(
                f"{name} must be an int of at least {self.least}{remark}; got {value!r}."
            )
        if self.most is not None and count > self.most:
            raise UsageError(f"{name} must be at most {self.most}; got {value!r}.")
        return count


def _whole(value: Any) -> int | None:
    """Return a whole number of any type as an int; None if it is no such number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return int(number) if number.is_integer() else None


@dataclass(frozen=True)
class Port(Count):
    """A number of a port; as text, too, as it comes from files and from the environment."""

    def read(self, name: str, value: Any) -> Any:
        """Return the number as an int."""
        digits = isinstance(value, str) and value.strip().isdecimal()
        return super().read(name, int(value) if digits else value)


@dataclass(frozen=True)
class Real:
    """A number from `least`, or above it, to `most`."""

    most: float
    least: float = 0.0
    above: bool = True

    def read(self, name: str, value: Any) -> float:
        """Return the number."""
        real = isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))
        if not real or not self.least <= value <= self.most or (self.above and value == self.least):
            start = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
            raise UsageError(f"{name} must be {start} and at most {self.most:g}; got {value!r}.")
        return float(value)


@dataclass(frozen=True)
class Flag:
    """True or False."""

    def read(self, name: str, value: Any) -> bool:
        """Return the flag as a bool."""
        if not isinstance(value, (bool, np.bool_)):
            raise UsageError(f"{name} must be True or False; got {value!r}.")
        return bool(value)


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    choices: tuple[Any, ...]

    def read(self, name: str, value: Any) -> Any:
        """Return the choice."""
        for choice in self.choices:
            same = isinstance(value, bool) == isinstance(choice, bool) and value == choice
            if same and not isinstance(value, (list, tuple, np.ndarray)):
                return choice
        names = [choice for choice in self.choices if isinstance(choice, str)]
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise UsageError(
            f"{name} must be one of {', '.join(map(str, self.choices))}; got {value!r}.{hint}"
        )


@dataclass(frozen=True)
class Exploration:
    """How probabilistic policies choose, as tensordict's enum or by its name."""

    def read(self, name: str, value: Any) -> InteractionType:
        """Return it as tensordict's enum."""
        if isinstance(value, InteractionType):
            return value
        choices = tuple(kind.name.lower() for kind in InteractionType)
        chosen = Choice(choices).read(name, value.lower() if isinstance(value, str) else value)
        return InteractionType[chosen.upper()]


@dataclass(frozen=True)
class Function:
    """A callable."""

    each: bool = False
    """A list of such is taken, too."""

    def read(self, name: str, value: Any) -> Any:
        """Return the callable."""
        values = value if self.each and isinstance(value, (list, tuple)) else [value]
        if not all(callable(one) for one in values):
            raise UsageError(f"{name} must be callable; got {type(value).__name__} {value!r}.")
        return value


@dataclass(frozen=True)
class Sink:
    """What batches can be written to."""

    def read(self, name: str, value: Any) -> Any:
        """Return it."""
        if isinstance(value, type):
            raise UsageError(
                f"{name} is the class {value.__name__}; expected an object of it, such as "
                f"{value.__name__}(...)."
            )
        if not hasattr(value, "extend"):
            raise UsageError(
                f"{name} must have a method extend(batch); got {type(value).__name__}."
            )
        return value


@dataclass(frozen=True)
class Text:
    """Some text."""

    def read(self, name: str, value: Any) -> str:
        """Return the text."""
        if not (isinstance(value, str) and value):
            raise UsageError(f"{name} must be some text, or None; got {value!r}.")
        return value


@dataclass(frozen=True)
class Device:
    """A device of this machine, or a list with one for each worker."""

    def read(self, name: str, value: Any) -> Any:
        """Return it as it came."""
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None:
                _check_device(name, one)
        return value


def _check_device(name: str, value: Any) -> None:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        text = value.lower() if isinstance(value, str) else ""
        hint = nearest(_GPUS.get(text, text), ["cpu", "cuda", "cuda:0"])
        raise UsageError(f"{name} is {value!r}, which is not a torch device.{hint}") from error
    there = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    if device.type != "cpu" and not there:
        raise UsageError(f"{name} is {value!r}, and this machine has no such device; use 'cpu'.")


def mappings_of(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Return an option that is a mapping for all, or a list with one for each, as a list."""
    each = list(value) if isinstance(value, (list, tuple)) else [{} if value is None else value]
    if not each or not all(isinstance(one, Mapping) and _named(one) for one in each):
        raise UsageError(f"{name} must be a dict of options, or a list of dicts; got {value!r}.")
    return each


def _named(mapping: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in mapping)
