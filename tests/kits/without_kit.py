"""Programs that run without what another platform lacks, and so do their children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MACOS = [
    *("os.memfd_create", "os.eventfd", "os.pidfd_open", "os.posix_fallocate"),
    *("os.process_cpu_count", "os.sched_getaffinity", "select.epoll", "socket.SO_PEERCRED"),
]
WINDOWS = [
    *("os.memfd_create", "os.eventfd", "os.pidfd_open", "os.posix_fallocate", "os.fork"),
    *("os.process_cpu_count", "os.sched_getaffinity", "os.sched_yield"),
    *("os.register_at_fork", "os.statvfs", "os.sysconf", "os.geteuid", "os.getuid", "os.O_CLOEXEC"),
    *("os.WNOHANG", "os.waitpid", "os.closerange"),
    *("select.poll", "select.epoll", "socket.AF_UNIX", "socket.send_fds", "socket.recv_fds"),
    *("socket.SO_PEERCRED", "socket.MSG_DONTWAIT", "socket.MSG_WAITALL", "socket.SCM_RIGHTS"),
    *("signal.SIGKILL", "signal.SIGCHLD", "signal.SIGUSR1", "signal.SIGUSR2", "signal.SIGCONT"),
    *("signal.pthread_sigmask", "signal.SIG_BLOCK", "signal.SIG_UNBLOCK", "signal.SIG_SETMASK"),
    *("fcntl", "resource", "termios", "pwd", "grp"),
]

# What is imported here uses what is missing while it is imported, and has other code where it is
# missing; on Linux it is enough that it has been imported before.
_SITE = """
import sys, subprocess, selectors, tempfile, random, threading, logging, asyncio, shutil, socket
import multiprocessing.connection, concurrent.futures.thread, platform
import numpy, torch, torch.distributed, torch.multiprocessing, gymnasium, cloudpickle
import tensordict
for name in {names!r}:
    module, _, attribute = name.partition(".")
    if attribute:
        vars(sys.modules[module] if module in sys.modules else __import__(module)).pop(attribute)
    else:
        sys.modules[name] = None
platform.system = lambda: {system!r}
"""


def run_without(
    names: Iterable[str], program: str, folder: Path, system: str = "Linux", timeout: float = 120
) -> str:
    """Return what a program prints that runs without these names, on a platform of that name."""
    names = [name for name in names if _is_here(name)]
    (folder / "sitecustomize.py").write_text(_SITE.format(names=names, system=system))
    path = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def _is_here(name: str) -> bool:
    module, _, attribute = name.partition(".")
    return not attribute or hasattr(__import__(module), attribute)
