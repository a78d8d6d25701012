"""A trainer that is a job itself, and whose workers are further jobs.

```
 your process                    folder that all share             the trainer's job
   submits main() ------------------------------------------------>  main()
   submits a job   <----------  N.request (invitation, numbers) <---   its collector wants a node
   cancels the job <----------  the file is gone                <---   it does not any more
   says that it failed ------>  N.error                         ---->  it raises
```

So only your process submits, and nobody has to know beforehand where the trainer will run. The
folder is private, since an invitation holds the secret of the run.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Any

from swath.errors import UsageError, nearest
from swath.workers.remote import Invitation
from swath.workers.submitit import Executor, SubmititJob, add_to_path

__all__ = ["Requests", "delayed_options", "submitit_delayed_launcher"]

_VARIABLE = "SWATH_DELAYED"
_EVERY = 0.5
FRAMEWORKS = ("distributed", "rpc")


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int = 0,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: a call of the function runs it as a job, its workers as further jobs.

    Inside, make a collector with `launcher="submitit_delayed"`. The call waits for the job and
    returns what the function returned; Ctrl-C cancels all jobs.

    Args:
        num_jobs: Jobs for workers, at most: one for each node of the collector.
        framework: "distributed", or "rpc" for slabs and weights by RPC.
        backend: That of the collector, if it does not say another.
        tcpport: The port that workers dial, if the collector does not say another; 0 for a free one.
        submitit_main_conf: Parameters of submitit for the function's job, as in `slurm_kwargs`.
        submitit_collection_conf: The same for the jobs of the workers.

    Examples:
        >>> @submitit_delayed_launcher(num_jobs=2, submitit_collection_conf={"mem_gb": 4})
        ... def main():
        ...     collector = DistributedCollector(
        ...         ["CartPole-v1"] * 2, frames_per_batch=100, launcher="submitit_delayed"
        ...     )
    """
    if framework not in FRAMEWORKS:
        raise UsageError(
            f"framework must be one of {', '.join(FRAMEWORKS)}; got {framework!r}."
            f"{nearest(framework, FRAMEWORKS)}"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def submitted(*args: Any, **kwargs: Any) -> Any:
            executor = Executor(submitit_main_conf)
            box = executor.folder / "requests"
            box.mkdir(mode=0o700)
            used = "rpc" if framework == "rpc" else backend
            told = json.dumps({"box": str(box), "backend": used, "tcp_port": tcpport})
            collection = {"folder": executor.folder, **(submitit_collection_conf or {})}
            if submitit_main_conf and "cluster" in submitit_main_conf:
                collection.setdefault("cluster", submitit_main_conf["cluster"])
            office = _Office(box, Executor(collection), num_jobs)
            work = functools.partial(function, *args, **kwargs)
            return office.serve(executor.run(_be_trainer, work, told, sys.path))

        return submitted

    return decorate


def _be_trainer(work: Callable[[], Any], told: str, path: Sequence[str]) -> Any:
    os.environ[_VARIABLE] = told
    add_to_path(path)
    return work()


class _Office:
    """Your process's side: submits what is requested."""

    def __init__(self, box: Path, executor: Executor, most: int) -> None:
        self._box, self._executor, self._most = box, executor, most
        self._jobs: dict[Path, SubmititJob] = {}

    def serve(self, trainer: SubmititJob) -> Any:
        """Serve the trainer until its job has ended; return what it returned."""
        try:
            while trainer.ended() is None:
                self._look()
                sleep(_EVERY)
            return trainer.result()
        finally:
            for job in (trainer, *self._jobs.values()):
                job.cancel()

    def _look(self) -> None:
        requests = set(self._box.glob("*.request"))
        for gone in self._jobs.keys() - requests:
            self._jobs.pop(gone).cancel()
        for request in sorted(requests):
            error = self._tended(request)
            if error is not None:
                _write(request.with_suffix(".error"), error.encode())

    def _tended(self, request: Path) -> str | None:
        """Begin what is requested, or look after it; return what is wrong, if anything is."""
        if request in self._jobs:
            return self._jobs[request].ended()
        if len(self._jobs) >= self._most:
            return f"the collector has more nodes than num_jobs={self._most} of the launcher."
        try:
            self._jobs[request] = self._executor.submit(*pickle.loads(request.read_bytes()))
        except Exception as error:
            return str(error)
        return None


class Requests:
    """The trainer's side: asks for jobs."""

    def __init__(self) -> None:
        self._box = Path(_told()["box"])
        self._numbers = itertools.count()

    def submit(self, invitation: Invitation, numbers: Sequence[int]) -> _Request:
        """Ask for a job for the workers of one node."""
        path = self._box / f"{os.getpid()}-{next(self._numbers)}.request"
        _write(path, pickle.dumps((invitation, numbers)))
        return _Request(path)


class _Request:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ended(self) -> str | None:
        error = self._path.with_suffix(".error")
        return error.read_text() if error.exists() else None

    def cancel(self) -> None:
        self._path.unlink(missing_ok=True)


def delayed_options() -> dict[str, Any]:
    """Return options of a collector as the decorator has them."""
    told = _told()
    del told["box"]
    return told


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
