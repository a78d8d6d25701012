"""Workers as jobs: of Slurm, or of submitit's local executor.

```
 your process                                    a job, one for each node
   SubmititLauncher --- sbatch: invitation -->     node()  starts its workers, ends with them
   gate  <------------------ dials --------------    | worker, worker ...
```

Whether a job lives is asked of `squeue` only until its workers have come in; from then on their
connections tell. A job ends with its last worker, and a worker with its connection: so no job
outlives your process, however that ends. Jobs that never started are cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from swath.errors import UsageError, WorkerError
from swath.links import forkserver, launch, pack
from swath.workers.remote import Invitation, Started, main

__all__ = ["Executor", "Job", "NodeLauncher", "node"]

_log = logging.getLogger("swath")
_ASK_EVERY = 2.0
_DAY = 24 * 60
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL")
_OVER += ("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_LAST_LINES = 12


def node(invitation: Invitation, numbers: Sequence[int], path: Sequence[str]) -> None:
    """Be a node, in a job: run these workers until the last of them has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit would ignore it
    forkserver.in_worker = os.getpid()  # workers are forks of this process: it has torch already
    add_to_path(path)
    workers = [launch(main, pack((invitation, number), "the invitation")) for number in numbers]
    codes = [worker.exit_code(None) for worker in workers]
    for worker in workers:
        worker.close()
    if any(codes):
        sys.exit(1)  # no exception: the log is to end with what the worker said


def add_to_path(path: Sequence[str]) -> None:
    """Let this process import what the one that submitted it can."""
    sys.path.extend(one for one in path if one not in sys.path)


class Job(Protocol):
    """What runs the workers of one node."""

    def ended(self) -> str | None:
        """Say how it ended, if it has."""
        ...

    def cancel(self) -> None:
        """End it."""
        ...


class NodeLauncher:
    """One job for each node.

    Args:
        submit: Starts a job for some workers.
        per_node: How many workers a node has.
    """

    def __init__(self, submit: Callable[[Invitation, Sequence[int]], Job], per_node: int) -> None:
        self._submit, self._per_node = submit, per_node

    def start(self, invitation: Invitation, numbers: Sequence[int]) -> Mapping[int, Started]:
        """Submit a job for each node that has one of these workers."""
        nodes: dict[int, list[int]] = {}
        for number in numbers:
            nodes.setdefault(number // self._per_node, []).append(number)
        started: dict[int, Started] = {}
        try:
            for workers in nodes.values():
                job, left = self._submit(invitation, workers), set(workers)
                started.update({number: _Seat(number, job, left) for number in workers})
        except BaseException:
            for one in started.values():
                one.cancel()
            raise
        return started

    def close(self) -> None:
        """Nothing: jobs end with their workers."""


class _Seat:
    """One worker of a job; the job is cancelled when all of its workers are."""

    process = None

    def __init__(self, number: int, job: Job, left: set[int]) -> None:
        self._number, self._job, self._left = number, job, left

    def check(self) -> None:
        how = self._job.ended()
        if how is not None:
            raise WorkerError(f"worker {self._number} will not come: {how}", worker=self._number)

    def cancel(self) -> None:
        self._left.discard(self._number)
        if not self._left:
            self._job.cancel()


class Executor:
    """Submits jobs by submitit.

    Args:
        conf: Its parameters; `folder` is where its files go, and `cluster` "slurm" or "local".
    """

    def __init__(self, conf: Mapping[str, Any] | None) -> None:
        try:
            import submitit
        except ImportError as error:
            raise UsageError(
                "launcher='submitit' needs submitit: pip install swath[slurm]."
            ) from error
        conf = {"timeout_min": _DAY, "name": "swath", **(conf or {})}
        cluster = conf.pop("cluster", "slurm")
        if cluster not in ("slurm", "local"):
            raise UsageError(f"cluster must be 'slurm' or 'local'; got {cluster!r}.")
        parent = Path(conf.pop("folder", "swath_jobs")).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))  # private: it has secrets
        self._local = cluster == "local"
        more = conf.pop("slurm_additional_parameters", {})
        # A job that Slurm starts again by itself would come when nobody waits for it.
        conf["slurm_additional_parameters"] = {"no-requeue": True, **more}
        try:
            self._submitit = submitit.AutoExecutor(self.folder, cluster=cluster)
            self._submitit.update_parameters(**conf)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            self.folder.rmdir()
            raise UsageError(
                f"submitit does not take these parameters: {error} Without Slurm, use "
                "cluster='local'."
            ) from error

    def submit(self, invitation: Invitation, numbers: Sequence[int]) -> SubmititJob:
        """Start a job for the workers of one node."""
        return self.run(node, invitation, numbers, sys.path)

    def run(self, function: Callable[..., Any], *arguments: Any) -> SubmititJob:
        """Start a job that calls a function."""
        with _outside_of_jobs():
            try:
                job = self._submitit.submit(function, *arguments)
            except Exception as error:
                raise WorkerError(f"the job was not accepted: {error}") from error
        if self._local:
            threading.Thread(target=_reap, args=[job], name="swath job", daemon=True).start()
        return SubmititJob(job, self._local)


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide that this process is in a job: one that is submitted here would take over its size."""
    from submitit.helpers import clean_env

    kept = os.environ.get("SLURM_CONF")
    with clean_env():
        if kept is not None:
            os.environ["SLURM_CONF"] = kept
        yield


def _reap(job: Any) -> None:
    """Wait for a job that is a child of this process."""
    while not job.done():
        sleep(0.1)


class SubmititJob:
    """A job that was submitted."""

    def __init__(self, job: Any, local: bool) -> None:
        self._job, self._local = job, local
        self._asked, self._state = monotonic(), "PENDING"

    def state(self) -> str:
        """Return what is known of it, in Slurm's words; asked for now and then."""
        if self._local:
            self._state = "COMPLETED" if self._job.done() else "RUNNING"
        elif monotonic() - self._asked >= _ASK_EVERY:
            self._asked = monotonic()
            self._state = _squeue(self._job.job_id) or self._state
        return self._state

    def ended(self) -> str | None:
        """Say how it ended, if it has."""
        state = self.state()
        if state.split(" ")[0] not in _OVER:
            return None
        path = self._job.paths.stderr
        log = path.read_text(errors="replace").splitlines() if path.exists() else []
        last = "\n".join(log[-_LAST_LINES:])
        return f"job {self._job.job_id} has ended ({state}). Its log {path} ends with:\n{last}"

    def result(self) -> Any:
        """Return what the function returned, once the job has ended; raise what it raised."""
        until = monotonic() + 2 * _ASK_EVERY  # a shared file system may be late
        while not self._job.paths.result_pickle.exists():
            if monotonic() > until:
                raise WorkerError(str(self.ended()))
            sleep(0.1)
        return self._job.result()

    def cancel(self) -> None:
        """End it."""
        self._asked = -_ASK_EVERY  # so that it is asked for now
        if self.ended() is None:
            if self._state.startswith("PENDING"):
                _log.warning("job %s never started: %s", self._job.job_id, self._state)
            self._job.cancel(check=False)


def _squeue(job_id: str) -> str | None:
    """Return the state of a job and the reason of it; None if nobody can say."""
    command = ["squeue", "--noheader", "--states=all", "--format=%T (%r)", f"--jobs={job_id}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if told.returncode == 0:
        return told.stdout.strip() or "COMPLETED (long ago)"
    return "COMPLETED (long ago)" if "Invalid job id" in told.stderr else None
