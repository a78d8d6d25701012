"""Starting a worker as a program of its own, where a process with torch may not be forked.

```
 your process --Popen--> worker: ignores Ctrl-C, imports torch, runs what the channel says
      |  <-- exit status --- a thread of your process that waits for the worker
      '---------- channel -----------'
```

It takes as long as importing torch does. All else is as for workers of the fork server: the same
descriptors, the same messages, and the exit status comes by the same pipe. No kernel ends such a
worker when your process is killed, so it looks once a second whether that is still its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from swath.links.forkserver import STATUS
from swath.shield import Shield

__all__ = ["quiet_start", "spawn"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for your process, which tells us
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # so that no child inherits that
sys.path[:] = {path!r}
from swath.preload import preload
preload()
"""
_WORK = """
from swath.links.forkserver import be_worker
be_worker({channel}, {parent})
"""


def spawn(request: bytes, descriptors: Sequence[int], shield: Shield) -> int:
    """Return the process id of a new worker that holds these descriptors; see `launch`."""
    channel, output, errors, status = descriptors
    program = _WORK.format(channel=channel, parent=os.getpid())
    with shield:
        told = os.dup(status)
        try:
            process = quiet_start(program, channel, stdout=output, stderr=errors)
            waiter = threading.Thread(
                target=_tell_end, args=(process, told), name="swath worker end", daemon=True
            )
            waiter.start()
        except BaseException:
            os.close(told)
            raise
    return process.pid


def quiet_start(program: str, descriptor: int, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a Python program with swath and a descriptor, which Ctrl-C in a terminal leaves alone.

    Args:
        program: What it does once swath can be imported.
        descriptor: What it is to have open.
        streams: Where it writes.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # Ctrl-C in a terminal is for all processes there: this one starts with it blocked, or it would
    # end with a traceback of its own before it comes to ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", _BEGIN.format(path=sys.path) + program],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env={**dict.fromkeys(_THREADS, "1"), **os.environ},
            **streams,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell_end(process: subprocess.Popen[bytes], told: int) -> None:
    code = process.wait()
    with contextlib.suppress(OSError):  # nobody wants to know
        os.write(told, STATUS.pack(code))
    os.close(told)
