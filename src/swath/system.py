"""What this system can do. Everything that differs between platforms is asked for here, when used.

```
 asked for                         Linux               macOS                   Windows
 memory that workers map           memfd_create        a file without a name   -
 starting a worker                 fork server         a new program           -
 wakeups                           eventfd             pipe                    -
 locks between processes           fcntl               fcntl                   -
 CPUs that may be used             affinity, cgroup    all                     all
 TLS between machines              Python 3.13         Python 3.13             -
```

Nothing here is looked up when swath is imported, so that importing it works everywhere. What has no
way at all on a platform raises a `UsageError` that names the platform and what to use instead.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from swath.errors import UsageError

__all__ = [
    "after_fork_in_child",
    "anonymous_file",
    "can_fork_workers",
    "check_can_share_files",
    "check_can_start_workers",
    "cpu_quota",
    "fcntl",
    "free_bytes",
    "lock_directory",
    "open_again",
    "path_of_descriptor",
    "platform_name",
    "usable_cpus",
    "why_no_tls",
    "yield_core",
]

_INSTEAD = (
    "Use Collector with a SerialEnv or a vector env, which run in this process, or run swath on "
    "Linux (on Windows: under WSL 2)."
)


def platform_name() -> str:
    """Return the platform as its users call it."""
    return {"Darwin": "macOS"}.get(platform.system(), platform.system() or "this platform")


# -- CPUs -----------------------------------------------------------------------------------------


def usable_cpus(root: str | Path = "/") -> int:
    """Return how many CPUs this process may keep busy: by its affinity and its cgroup's quota.

    A container with a quota of two CPUs on a machine with 64 cores sees all 64 of them. Processes
    that spin on more than two would use up the quota and then all be halted together.

    Args:
        root: Where the file system begins.
    """
    if hasattr(os, "process_cpu_count"):  # Python 3.13 and newer
        allowed = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count()
    quota = cpu_quota(root)
    count = allowed or 1
    return count if quota is None else max(1, min(count, int(quota)))


def cpu_quota(root: str | Path = "/") -> float | None:
    """Return how many CPUs the cgroups of this process may use; None without a limit.

    Each ancestor of a cgroup may set a limit, and the least of them counts. In a container the path
    may be the host's, of which the container sees the end only: then that of the root counts.

    Args:
        root: Where the file system begins.
    """
    try:
        lines = (Path(root) / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux, or a sandbox without /proc
        return None
    mounts, limits = Path(root) / "sys/fs/cgroup", []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            tops, read = [mounts, mounts / "unified"], _limit_v2
        elif "cpu" in controllers.split(","):
            tops, read = [mounts / controllers, mounts / "cpu"], _limit_v1
        else:
            continue
        below = Path(path.lstrip("/"))
        for top in tops:
            limits += [read(top / part) for part in (below, *below.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _sleep_zero() -> None:
    time.sleep(0)


# Called in loops that spin, so it is looked up once.
yield_core: Callable[[], None] = getattr(os, "sched_yield", _sleep_zero)
"""Let another process have this core, if one wants it."""


# -- processes ------------------------------------------------------------------------------------


def can_fork_workers() -> bool:
    """Tell whether a process that has imported torch may be forked.

    On macOS a fork inherits system libraries in a state that they do not support, and may crash in
    them. There each worker is a program of its own, which imports torch again.
    """
    return hasattr(os, "fork") and platform.system() != "Darwin"


def check_can_start_workers() -> None:
    """Raise if no worker process can be started here, and be given memory."""
    needed = hasattr(select, "poll") and hasattr(socket, "AF_UNIX")
    if not (needed and hasattr(socket, "send_fds") and platform.system() != "Windows"):
        raise UsageError(
            f"worker processes cannot be started on {platform_name()}: they need Unix sockets that "
            f"carry file descriptors. {_INSTEAD}"
        )


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call a function in each fork of this process, where processes can be forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def why_no_tls() -> str | None:
    """Return why connections cannot be encrypted with a key that both sides know; None if they can.

    The words are to stand after "because".
    """
    if sys.version_info < (3, 13):
        return f"Python {sys.version_info[0]}.{sys.version_info[1]} is older than 3.13"
    try:
        import ssl
    except ImportError:
        return "this Python was built without the module ssl"
    return None if ssl.HAS_PSK else f"{ssl.OPENSSL_VERSION} has no pre-shared keys"


# -- memory, files and locks ----------------------------------------------------------------------


def fcntl() -> ModuleType:
    """Return the module `fcntl`; UsageError where there is none."""
    check_can_share_files()
    import fcntl

    return fcntl


def check_can_share_files() -> None:
    """Raise if processes cannot lock parts of a file against each other here."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UsageError(
            f"storage='shared' and storage='memmap' do not work on {platform_name()}: they need "
            "file locks that end with their process (fcntl). Use storage='memory'."
        ) from None


def lock_directory(directory: Path) -> Callable[[], None]:
    """Lock a directory until what is returned is called; BlockingIOError if another has done so.

    The kernel lets go of it when this process ends. Where directories cannot be locked (Windows,
    some network file systems) nobody is kept out.
    """
    try:
        import fcntl
    except ImportError:
        return lambda: None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return lambda: os.close(descriptor)


def anonymous_file(nbytes: int) -> int:
    """Return the descriptor of a file without a name, in memory where that is possible."""
    check_can_start_workers()
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("swath", os.MFD_CLOEXEC)
    else:  # a file that is deleted at once: it goes with the last process that has it open
        descriptor, path = tempfile.mkstemp(prefix="swath-")
        os.unlink(path)
    try:
        os.ftruncate(descriptor, max(nbytes, 1))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def path_of_descriptor(descriptor: int) -> str:
    """Return a name by which an open file can be opened again."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return f"{folder}/{descriptor}"


def open_again(descriptor: int) -> int:
    """Return a further descriptor of an open file, with an offset and locks of its own."""
    return os.open(path_of_descriptor(descriptor), os.O_RDWR | getattr(os, "O_CLOEXEC", 0))


def free_bytes(directory: Path) -> int:
    """Return how many bytes may still be written to the file system of a directory."""
    if hasattr(os, "statvfs"):
        status = os.statvfs(directory)
        return status.f_bfree * status.f_frsize
    import shutil

    return shutil.disk_usage(directory).free
