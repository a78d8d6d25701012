"""Ray's workers in tests, forked from a process that has imported Ray and torch already.

Ray starts Python anew for each actor. Its imports take longer than most tests do with the actor.
Here Ray starts this file instead, which asks for a fork that is the worker:

```
 raylet --starts--> this file, as `setup_worker.py`      server: has imported torch
                      |  (ends when the worker has)        | forks, for each job on each node
                      +------------asks----------------> its server: has imported Ray
                                                           | forks: the worker
```

Clusters that scripts start, as users do, have workers as Ray makes them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

NAME = "SWATH_TESTS_WARM_WORKERS"
"""What is in the environment: the name of the server's socket."""


class Server:
    """This process's server; it ends with it."""

    def __init__(self) -> None:
        import subprocess

        os.environ[NAME] = name = f"swath-tests-{os.getpid()}"
        # A fork has one thread: none of a library's may hold a lock in the server.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", name, *sys.path],
            stdin=subprocess.PIPE,
            env={**os.environ, **threads},
            start_new_session=True,
        )

    def close(self) -> None:
        os.environ.pop(NAME, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(name: str, paths: list[str]) -> None:
    """Fork a server for each job, until the process that started this one has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends leaves nothing
    with _listening(name) as listener:
        own, sys.path[:] = sys.path[1:], paths
        from swath.preload import preload

        preload()
        sys.path[:] = own
        _leave_to_forks()
        known = set()
        for asked in _all_who_ask(listener):
            job = _message(asked)
            if (which := _name_of(name, job)) not in known:
                known.add(which)
                if os.fork() == 0:
                    listener.close()
                    asked.close()
                    _serve_job(which, job)


def _serve_job(name: str, job: dict[str, str]) -> None:
    """Fork workers; Ray reads once, while it is imported, whose they are."""
    try:
        with _listening(name) as listener:
            os.environ.update(job)
            import ray._private.workers.default_worker  # noqa: F401

            import swath.links.calls  # noqa: F401

            _leave_to_forks()
            for asked in _all_who_ask(listener):
                request = _message(asked)
                _, descriptors, _, _ = socket.recv_fds(asked, 1, 3)
                if os.fork() == 0:
                    listener.close()
                    _be_the_worker(request, descriptors)
                for one in descriptors:
                    os.close(one)
    finally:
        os._exit(0)


def _leave_to_forks() -> None:
    """Let collections of garbage in forks not look at, and so copy, what was imported here."""
    gc.collect()
    gc.freeze()


def _listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen(64)
    return listener


def _all_who_ask(listener: socket.socket) -> Iterator[socket.socket]:
    """Return one connection after the other; a worker holds its own until it ends."""
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        asked, _ = listener.accept()
        with asked:
            yield asked


def _message(asked: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(asked.recv(4, socket.MSG_WAITALL), "little")
    return json.loads(asked.recv(size, socket.MSG_WAITALL))


def _name_of(name: str, job: dict[str, str]) -> str:
    """Return the name of the server for workers of a job on a node."""
    return f"{name}-{job.get('RAY_RAYLET_PID')}-{job.get('RAY_JOB_ID')}"


def _be_the_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    import runpy

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, one in enumerate(descriptors):
            os.dup2(one, number)
            os.close(one)
        os.setpgid(0, 0)  # Ray ends what is left of a worker's group with it
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv[:] = request["argv"]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        _draw_entropy()
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _draw_entropy() -> None:
    """Give this fork random numbers of its own."""
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


def ask(worker: list[str]) -> None:
    """Ask for a worker, and end when it has ended."""
    environ, name = dict(os.environ), os.environ[NAME]
    job = {name: value for name, value in environ.items() if name.startswith("RAY_")}
    with contextlib.suppress(ConnectionError):
        _asked(name, job).close()
        request = {"argv": worker, "environ": environ, "cwd": os.getcwd()}
        with _asked(_name_of(name, job), request) as server:
            socket.send_fds(server, [b"x"], [0, 1, 2])
            server.recv(1)


def _asked(name: str, request: dict[str, Any]) -> socket.socket:
    """Return a connection to a server, which may have hardly begun."""
    body = json.dumps(request).encode()
    deadline = time.monotonic() + 30
    while True:
        try:
            (server := socket.socket(socket.AF_UNIX)).connect("\0" + name)
        except ConnectionRefusedError:
            server.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            server.sendall(len(body).to_bytes(4, "little") + body)
            return server


# What Ray tells whoever sets a worker up, and not the worker.
_NOT_FOR_THE_WORKER = ("--language", "--serialized-runtime-env-context", "-S", "-s")

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask([one for one in sys.argv[1:] if one.partition("=")[0] not in _NOT_FOR_THE_WORKER])
