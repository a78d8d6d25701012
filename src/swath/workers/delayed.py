"""A trainer that is a job itself, and whose workers are further jobs.

```
 your process                    folder that all share             the trainer's job
   submits main() ------------------------------------------------>  main()
   submits a job   <----------  N.request (invitation, numbers) <---   its collector wants a node
   cancels the job <----------  the file is gone                <---   it does not any more
   says that it failed ------>  N.error                         ---->  it raises
   says that it lives  ------>  alive, another number each time ---->  it raises if that stays
```

So only your process submits, and nobody has to know beforehand where the trainer will run. The
folder is private, since an invitation holds the secret of the run. Your process may be killed, on
another host than the trainer's: then nobody looks after jobs, and who waits for one has to know.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from swath.errors import UsageError
from swath.workers.join import add_to_path
from swath.workers.remote import Invitation
from swath.workers.submitit import Executor, SubmititJob

__all__ = ["Request", "delayed_options", "submitit_delayed_launcher"]

_VARIABLE = "SWATH_DELAYED"
_EVERY = 0.5
_ALIVE = "alive"
_SILENT = 120.0
"""Seconds without a sign of life; a shared file system may be a minute late."""


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int = 0,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a function as a Slurm job, and its workers as more jobs.

    In the function, make a collector with `launcher="submitit_delayed"`. A call of the function
    waits for the job and returns what the function returned; Ctrl-C cancels all jobs.

    Args:
        num_jobs: Largest number of jobs for workers; each node of the collector is one job.
        framework: "distributed", or "rpc" to send rollouts and weights by RPC.
        backend: The default of the collector's `backend`.
        tcpport: The default of the collector's `tcp_port`; 0 for any free port.
        submitit_main_conf: Parameters of submitit for the job of the function; see `slurm_kwargs`.
        submitit_collection_conf: The same for the jobs of the workers.

    Examples:
        >>> @submitit_delayed_launcher(num_jobs=2, submitit_collection_conf={"mem_gb": 4})
        ... def main():
        ...     collector = DistributedCollector(
        ...         ["CartPole-v1"] * 2, frames_per_batch=100, launcher="submitit_delayed"
        ...     )
    """
    if framework not in ("distributed", "rpc"):
        raise UsageError(f"framework must be one of distributed, rpc; got {framework!r}.")
    options = {"backend": "rpc" if framework == "rpc" else backend, "tcp_port": tcpport}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def submitted(*args: Any, **kwargs: Any) -> Any:
            mine = Executor(submitit_main_conf)
            same = {"cluster": mine.cluster, "folder": mine.folder}
            theirs = Executor({**same, **(submitit_collection_conf or {})})
            work = functools.partial(function, *args, **kwargs)
            told = json.dumps({"folder": str(mine.folder), "options": options})
            return _serve(
                mine.run(_be_trainer, work, told, sys.path), mine.folder, theirs, num_jobs
            )

        return submitted

    return decorate


def _be_trainer(work: Callable[[], Any], told: str, path: Sequence[str]) -> Any:
    os.environ[_VARIABLE] = told
    add_to_path(path)
    return work()


def _serve(trainer: SubmititJob, folder: Path, executor: Executor, most: int) -> Any:
    """Submit what the trainer requests until its job has ended; return what it returned."""
    jobs: dict[Path, SubmititJob] = {}
    try:
        with telling_of_life(folder):
            while trainer.ended() is None:
                _tend_all(folder, jobs, executor, most)
                sleep(_EVERY)
            return trainer.result()
    finally:
        for job in (trainer, *jobs.values()):
            job.cancel()


@contextlib.contextmanager
def telling_of_life(folder: Path) -> Iterator[None]:
    """Say in a folder that this process lives, in a thread: Slurm may let the others wait long."""
    end = threading.Event()

    def tell() -> None:
        for number in count():
            with contextlib.suppress(OSError):  # a full disk: said again soon
                _write(folder / _ALIVE, str(number).encode())
            if end.wait(_EVERY):
                return

    thread = threading.Thread(target=tell, name="swath alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _tend_all(folder: Path, jobs: dict[Path, SubmititJob], executor: Executor, most: int) -> None:
    """Look after all that is requested, and end what is not any more."""
    requests = sorted(folder.glob("*.request"))
    for gone in jobs.keys() - set(requests):
        jobs.pop(gone).cancel()
    for request in requests:
        error = _tend(request, jobs, executor, most)
        if error is not None:
            _write(request.with_suffix(".error"), error.encode())


def _tend(
    request: Path, jobs: dict[Path, SubmititJob], executor: Executor, most: int
) -> str | None:
    """Begin what is requested, or look after it; return what is wrong, if anything is."""
    if request in jobs:
        return jobs[request].ended()
    if len(jobs) >= most:
        return f"the collector has more nodes than num_jobs={most} of the launcher."
    try:
        jobs[request] = executor.submit(*pickle.loads(request.read_bytes()))
    except Exception as error:
        return str(error)
    return None


class Request:
    """In the trainer's job: asks for a job for the workers of one node."""

    def __init__(self, invitation: Invitation, numbers: Sequence[int]) -> None:
        self._path = Path(_told()["folder"], f"{uuid.uuid4()}.request")
        self._heard, self._since = "", monotonic()
        _write(self._path, pickle.dumps((invitation, numbers)))

    def ended(self) -> str | None:
        """Say what became of the job, if it has ended, was not accepted, or nobody looks after it.

        Clocks of hosts differ: what counts is whether the sign of life is another one.
        """
        error, alive = self._path.with_suffix(".error"), self._path.with_name(_ALIVE)
        if error.exists():
            return error.read_text()
        heard = self._heard
        with contextlib.suppress(OSError):  # not there yet, or changed while it is looked for
            heard = alive.read_text()
        if heard != self._heard:
            self._heard, self._since = heard, monotonic()
        elif monotonic() - self._since > _SILENT:
            return (
                f"the process that submits the jobs has written nothing to {alive.parent} for "
                f"{_SILENT:g} s: it was killed or stopped, or can no longer write there."
            )
        return None

    def cancel(self) -> None:
        """Want it no more."""
        self._path.unlink(missing_ok=True)


def delayed_options() -> dict[str, Any]:
    """Return options of a collector as the decorator has them."""
    return _told()["options"]


def _told() -> dict[str, Any]:
    if _VARIABLE not in os.environ:
        raise UsageError(
            "launcher='submitit_delayed' is for functions that submitit_delayed_launcher decorates."
        )
    return json.loads(os.environ[_VARIABLE])


def _write(path: Path, content: bytes) -> None:
    """Write a file that others read as soon as it is there."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)
