"""Objects as bytes: whatever cloudpickle takes, and a name for what it does not take."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from swath.errors import SwathError, UsageError

__all__ = [
    "RemoteTraceback",
    "pack",
    "pack_error",
    "shortened",
    "unpack",
    "unpack_error",
]

_MOST_BYTES = 64 << 20
"""Of an exception with all that it holds; there may be observations in it."""
_MOST_TEXT = 20_000
"""Characters of a message or a traceback that was not made to be read as a whole."""

unpack = cloudpickle.loads


def pack(thing: Any, name: str) -> bytes:
    """Return an object as bytes; an error names the part of it that cannot travel."""
    _send_script_by_value()
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
        f"{name} cannot be sent to a worker: {path} is a {type(culprit).__name__}, which cannot "
        f"be pickled ({type(error).__name__}: {error}). Create it in the worker: in the "
        "function that makes the env, or in policy_factory."
    ) from error


def _send_script_by_value() -> None:
    """Let functions and classes of the script travel by value in a process it has spawned, too.

    There multiprocessing has run the script as a module `__mp_main__`, which workers do not have.
    cloudpickle knows only `__main__` as a module that is nowhere else.
    """
    script = sys.modules.get("__mp_main__")
    if script is not None and script.__name__ == "__mp_main__":  # else it is `__main__` itself
        cloudpickle.register_pickle_by_value(script)


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
    """Return an exception as bytes: itself, its cause and its traceback, as far as they travel.

    What is too large is cut to what it says, so that there is a bound on what travels.
    """
    text = shortened("".join(traceback.format_exception(error)))
    parts = [_packed(part) for part in (error, error.__cause__) if part is not None]
    return pickle.dumps((parts, text))


def unpack_error(parcel: bytes) -> BaseException:
    """Return the exception; what it goes back to has the traceback of the other process."""
    parts, text = pickle.loads(parcel)
    errors = [_unpacked(*part) for part in parts]
    for error, cause in itertools.pairwise([*errors, RemoteTraceback(text)]):
        error.__cause__ = cause
    return errors[0]


def shortened(text: str) -> str:
    """Return a text, without its middle if it is very long."""
    left_out = len(text) - _MOST_TEXT
    if left_out <= 0:
        return text
    half = _MOST_TEXT // 2
    return f"{text[:half]} ... ({left_out:,} characters left out) ... {text[-half:]}"


def _packed(error: BaseException) -> tuple[bytes, str]:
    """Return an exception as bytes, or what comes nearest to it, and what it says."""
    try:
        said = str(error)
    except Exception as why:  # it is the user's class
        said = f"(its message could not be read: {type(why).__name__})"
    words = f"{type(error).__name__}: {shortened(said)}"
    is_long = isinstance(error, SwathError) and len(said) > _MOST_TEXT  # we put the user's in it
    if not is_long:
        try:
            return _dumped(error), words
        except (_TooLargeError, MemoryError):
            pass
        except Exception:  # it does not pickle
            return b"", words
    try:
        return _dumped(_told(error, said)), words
    except Exception:
        return b"", words


def _dumped(error: BaseException) -> bytes:
    target = _Bounded()
    _send_script_by_value()
    cloudpickle.dump(error, target)
    parcel = target.getvalue()
    unpack(parcel)  # some pickle, but do not come back
    return parcel


def _told(error: BaseException, said: str) -> BaseException:
    """Return an exception of the same type that only says the same, and is small."""
    kind: Any = type(error)
    text = shortened(said)
    told: BaseException = kind.__new__(kind, text)  # what `__init__` wants is not known
    told.args = (text,)
    if isinstance(error, SwathError):
        vars(told).update(vars(error))
    return told


def _unpacked(parcel: bytes, words: str) -> BaseException:
    """Return an exception; in words if it did not pickle, or its class is not known here."""
    try:
        return unpack(parcel)
    except Exception:
        return RuntimeError(words)


class _TooLargeError(Exception):
    """An exception has more bytes than are sent; for `_packed`, which sends its words then."""


class _Bounded(io.BytesIO):
    """Takes no more bytes than an exception may have."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MOST_BYTES:
            raise _TooLargeError
        return super().write(data)
