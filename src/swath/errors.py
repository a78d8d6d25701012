"""Everything swath raises.

```
SwathError
|-- UsageError (ValueError)     the caller broke a rule; the message says what to do instead
|   |-- ClosedError             used after shutdown()
|   `-- DamagedFileError        a file is not as it was written: cut short, missing, changed
|-- EnvError (RuntimeError)     an env raised or returned something it did not declare
|-- PolicyError (RuntimeError)  a policy raised or returned something the env cannot use
`-- WorkerError (RuntimeError)  a worker was killed, crashed or gave no answer in time
```

A message says what is wrong (with the value), what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ClosedError",
    "DamagedFileError",
    "EnvError",
    "PolicyError",
    "SwathError",
    "UsageError",
    "WorkerError",
    "nearest",
]


class SwathError(Exception):
    """Base class of all errors that swath raises on purpose."""


class UsageError(SwathError, ValueError):
    """An argument is wrong, or a call is not possible now; the message says what to do."""


class ClosedError(UsageError):
    """The collector or env was used after it was shut down."""


class DamagedFileError(UsageError):
    """A file of a dataset or a buffer is missing, shortened or changed.

    The message names the file, what was expected and what was found. Nothing was changed on disk.
    """


class _LocatedError(SwathError, RuntimeError):
    """An error that knows where in the collection it happened."""

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        env: int | None = None,
        step: int | None = None,
        seed: int | None = None,
    ) -> None:
        places = {"worker": worker, "env": env, "step": step, "seed": seed}
        where = [f"{name} {value}" for name, value in places.items() if value is not None]
        super().__init__(f"{message} [{', '.join(where)}]" if where else message)
        self.worker, self.env, self.step, self.seed = worker, env, step, seed


class EnvError(_LocatedError):
    """An env raised an exception, or returned something that its spaces do not declare."""


class PolicyError(_LocatedError):
    """A policy raised an exception, or returned something that the env cannot use."""


class WorkerError(_LocatedError):
    """A worker was killed, crashed, or did not answer in time."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``" Did you mean 'seed'?"`` or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
