"""What to do and to say when this process may open nothing more."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from swath.errors import WorkerError

__all__ = ["check_descriptors", "in_words"]

_SCARCE = (errno.EMFILE, errno.ENFILE)
_ENOUGH = 24
"""Descriptors that one worker, and torch, can do with."""


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Let an error that no descriptor is left say so, and what to do, as a `WorkerError`.

    Whoever opens something closes it when it fails; here it is only told.

    Args:
        what: What could not be done.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's own are the latter
        if not any(os.strerror(one) in str(error) for one in _SCARCE):
            raise
        import resource  # every platform on which descriptors are counted has it

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = "any number" if hard == resource.RLIM_INFINITY else f"up to {hard}"
        raise WorkerError(
            f"{what}: too few file descriptors are left. This process may open {soft} (ulimit "
            "-n), and needs about 4 for each worker process, 12 for a worker over gloo or RPC, "
            "and 100 more. Raise the limit before Python starts, with `ulimit -n 4096` for "
            f"example ({most} is allowed), or use fewer workers."
        ) from error


def check_descriptors() -> None:
    """Raise if hardly any descriptor is left, before torch tries again and again without any."""
    opened: list[int] = []
    try:
        for _ in range(_ENOUGH):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for one in opened:
            os.close(one)
