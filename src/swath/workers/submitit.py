"""Workers as jobs: of Slurm, or of submitit's local executor.

```
 your process                                    a job, one for each node
   NodeLauncher --- sbatch: invitation ------->    node()  starts its workers, ends with them
   gate  <------------------ dials --------------    | worker, worker ...
```

Whether a job lives is asked of `squeue` only until its workers have come in; from then on their
connections tell. A job ends with its last worker, and a worker with its connection: so no job
outlives your process, however that ends. Jobs that never started are cancelled.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from swath.errors import UsageError, WorkerError
from swath.links import pack
from swath.shield import Shield
from swath.workers.join import node
from swath.workers.remote import Invitation, Started

__all__ = ["Executor", "NodeLauncher", "SubmititJob"]

_log = logging.getLogger("swath")
_ASK_EVERY = 2.0
_DEFAULTS = {"timeout_min": 24 * 60, "name": "swath"}
_OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
_OVER |= {"OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


class NodeLauncher:
    """One job for each node.

    Args:
        submit: Starts a job for some workers; it can be asked whether it has `ended()`.
        per_node: How many workers a node has.
    """

    def __init__(self, submit: Callable[[Invitation, Sequence[int]], Any], per_node: int) -> None:
        self._submit, self._per_node = submit, per_node

    def start(
        self, invitation: Invitation, numbers: Sequence[int], shield: Shield | None = None
    ) -> Mapping[int, Started]:
        """Submit a job for each node that has one of these workers."""
        nodes: dict[int, set[int]] = {}
        for number in numbers:
            nodes.setdefault(number // self._per_node, set()).add(number)
        started: dict[int, Started] = {}
        try:
            for workers in nodes.values():
                job = self._submit(invitation, sorted(workers))
                started.update({number: _Seat(number, job, workers) for number in sorted(workers)})
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

    def __init__(self, number: int, job: Any, left: set[int]) -> None:
        self._number, self._job, self._left = number, job, left

    def check(self) -> None:
        how = self._job.ended()
        if how is not None:
            raise WorkerError(f"worker {self._number} will not connect: {how}", worker=self._number)

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
            raise UsageError("jobs need submitit: pip install 'swath[slurm]'.") from error
        conf = {**_DEFAULTS, **(conf or {})}
        self.cluster = conf.pop("cluster", "slurm")
        if self.cluster not in ("slurm", "local"):
            raise UsageError(f"cluster must be 'slurm' or 'local'; got {self.cluster!r}.")
        parent = Path(conf.pop("folder", "swath_jobs")).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="run-", dir=parent))  # private: it has secrets
        # A job that Slurm starts again by itself would come when nobody waits for it.
        more = {"no-requeue": True, **conf.pop("slurm_additional_parameters", {})}
        try:
            self._submitit = submitit.AutoExecutor(self.folder, cluster=self.cluster)
            self._submitit.update_parameters(**conf, slurm_additional_parameters=more)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            self.folder.rmdir()
            raise UsageError(
                f"submitit does not take this: {error} Without Slurm, use cluster='local'."
            ) from error

    def submit(self, invitation: Invitation, numbers: Sequence[int]) -> SubmititJob:
        """Start a job for the workers of one node."""
        payloads = [pack((invitation, number), "the invitation") for number in numbers]
        return self.run(node, payloads, sys.path)

    def run(self, function: Callable[..., Any], *arguments: Any) -> SubmititJob:
        """Start a job that calls a function."""
        from submitit.helpers import clean_env

        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
        with clean_env():  # in a job, another one would take over what this one asked for
            os.environ.update(kept)
            try:
                job = self._submitit.submit(function, *arguments)
            except Exception as error:
                raise WorkerError(f"the job was not accepted: {error}") from error
        return SubmititJob(job, self.cluster == "local")


class SubmititJob:
    """A job that was submitted."""

    def __init__(self, job: Any, local: bool) -> None:
        self._job, self._local = job, local
        self._asked, self._state = monotonic(), "PENDING"
        if local:  # it is a child of this process
            threading.Thread(target=self._reap, name="swath job", daemon=True).start()

    def _reap(self) -> None:
        while not self._job.done():
            sleep(0.1)

    def ended(self) -> str | None:
        """Say how it ended, if it has; Slurm is asked now and then only."""
        if self._local:
            self._state = "COMPLETED" if self._job.done() else "RUNNING"
        elif monotonic() - self._asked >= _ASK_EVERY:
            self._asked = monotonic()
            self._state = _squeue(self._job.job_id) or self._state
        if self._state.split(" ")[0] not in _OVER:
            return None
        path = self._job.paths.stderr
        log = path.read_text(errors="replace").splitlines() if path.exists() else []
        last = "\n".join(log[-12:])
        return f"job {self._job.job_id} has ended ({self._state}). Its log {path} ends:\n{last}"

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
        self._asked = -_ASK_EVERY  # so that Slurm is asked now
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
    if told.returncode == 0 or "Invalid job id" in told.stderr:
        return told.stdout.strip() or "COMPLETED (long ago)"
    return None
