"""Objects as bytes: whatever cloudpickle takes, and a name for what it does not take."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from swath.errors import UsageError

__all__ = ["RemoteTraceback", "pack", "pack_error", "unpack", "unpack_error"]

unpack = cloudpickle.loads


def pack(thing: Any, name: str) -> bytes:
    """Return an object as bytes; an error names the part of it that cannot travel."""
    error = _refusal(thing)
    if error is None:
        return cloudpickle.dumps(thing)
    path, culprit = name, thing
    known = {id(thing)}
    while True:
        for step, part in _parts(culprit):
            if id(part) not in known and (inner := _refusal(part)) is not None:
                known.add(id(part))
                path, culprit, error = f"{path}{step}", part, inner
                break
        else:
            break
    raise UsageError(
        f"{name} cannot be sent to a worker: {path} is a {type(culprit).__name__}, which cannot be "
        f"pickled ({type(error).__name__}: {error}). Make it inside the worker, in the callable "
        "that makes the env or in policy_factory."
    ) from error


def _refusal(thing: Any) -> Exception | None:
    try:
        cloudpickle.dumps(thing)
    except Exception as error:  # whatever an object's own pickling may raise
        return error
    return None


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, with how to get there."""
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif inspect.ismethod(thing):
        yield ".__self__", thing.__self__
    elif inspect.isfunction(thing):
        yield from ((f" > {key}", value) for key, value in _used(thing).items())
    elif not isinstance(thing, type):
        yield from ((f".{key}", value) for key, value in getattr(thing, "__dict__", {}).items())


def _used(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values that a function brings along, by name."""
    parameters = inspect.signature(function).parameters.values()
    found = {one.name: one.default for one in parameters if one.default is not one.empty}
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # of a name that has no value yet
        return found
    return {**found, **used.nonlocals, **used.globals}


class RemoteTraceback(Exception):
    """Carries the traceback of another process as text; it is the cause of what happened there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: BaseException) -> bytes:
    """Return an exception as bytes: itself, its cause and its traceback, as far as they travel."""
    text = "".join(traceback.format_exception(error))
    parts = []
    for part in (error, error.__cause__):
        try:
            cloudpickle.loads(cloudpickle.dumps(part))  # some pickle, but do not come back
        except Exception:
            part = RuntimeError(f"{type(part).__name__}: {part}")
        parts.append(part)
    return cloudpickle.dumps((*parts, text))


def unpack_error(parcel: bytes) -> BaseException:
    """Return the exception; what it goes back to has the traceback of the other process."""
    error, cause, text = unpack(parcel)
    error.__cause__ = cause
    (error if cause is None else cause).__cause__ = RemoteTraceback(text)
    return error
