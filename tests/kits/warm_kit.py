"""Ray's workers in tests, forked from a process that has imported Ray and torch already.

Ray starts Python anew for each actor. Its imports take longer than most tests do with the actor.
Here Ray starts this file instead, which asks a server for a fork that is the worker:

```
 raylet --starts--> this file, as `setup_worker.py` --asks--> server (a child of the tests)
                      ends when the worker has ended            forks: the worker
```

Clusters that scripts start, as users do, have workers as Ray makes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
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
    """Fork a worker for each that asks, until the process that started this one has ended."""
    import select

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave nothing
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(64)
        own, sys.path[:] = sys.path[1:], paths
        from swath.preload import preload

        preload()
        sys.path[:] = own
        cluster: dict[str, str] = {}
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            asked, _ = listener.accept()
            with asked:
                _answer(asked, listener, cluster)


def _answer(asked: socket.socket, listener: socket.socket, cluster: dict[str, str]) -> None:
    size = int.from_bytes(asked.recv(4, socket.MSG_WAITALL), "little")
    request = json.loads(asked.recv(size, socket.MSG_WAITALL))
    _, descriptors, _, _ = socket.recv_fds(asked, 1, 3)
    told = {name: one for name, one in request["environ"].items() if name.startswith("RAY_")}
    if not cluster:  # Ray's imports read which cluster and which job they are for
        cluster.update(told)
        os.environ.update(told)
        import ray._private.workers.default_worker  # noqa: F401

        import swath.links.calls  # noqa: F401
    if os.fork() == 0:
        listener.close()
        _be_the_worker(request, descriptors, told == cluster)
    for one in descriptors:
        os.close(one)


def _be_the_worker(request: dict[str, Any], descriptors: list[int], warm: bool) -> None:
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
        if not warm:  # it is for another driver's job
            os.execve(sys.executable, [sys.executable, *request["argv"]], request["environ"])
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
    request = {"argv": worker, "environ": dict(os.environ), "cwd": os.getcwd()}
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(ConnectionError):
        _connect(server)
        server.sendall(len(body).to_bytes(4, "little") + body)
        socket.send_fds(server, [b"x"], [0, 1, 2])
        server.recv(1)


def _connect(end: socket.socket) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return end.connect("\0" + os.environ[NAME])
        except ConnectionRefusedError:  # the server has hardly begun
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# What Ray tells whoever sets a worker up, and not the worker.
_NOT_FOR_THE_WORKER = ("--language", "--serialized-runtime-env-context", "-S", "-s")

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask([one for one in sys.argv[1:] if one.partition("=")[0] not in _NOT_FOR_THE_WORKER])
