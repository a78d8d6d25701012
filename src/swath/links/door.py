"""A Unix socket through which a Ray actor on this machine connects, so that it can share memory.

```
  your process: Door -- its name travels with the job --> worker: knock(name) --> Channel
       open(): who is it? this user's, and which process ==> Channel, and its process
```

The name is that of a Unix socket outside of the file system, so nothing is left behind. A worker
on another machine, or in a container of its own, finds no socket of that name and is reached by
calls of Ray.
"""

from __future__ import annotations

import os
import socket
import struct
from secrets import token_hex

from swath.links.channel import Channel

__all__ = ["Door", "knock"]

_ABOUT = struct.Struct("3i")  # process, user and group, as the kernel tells them


class Door:
    """Where a worker can come in, once; it has a `name` on Linux, elsewhere nobody comes."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._socket: socket.socket | None = None
        if hasattr(socket, "SO_PEERCRED") and hasattr(os, "pidfd_open"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.setblocking(False)
            self.name = f"swath-{token_hex(16)}"
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(1)

    def open(self) -> tuple[Channel, int]:
        """Return a channel to who has knocked and a descriptor of its process; OSError if none."""
        if self._socket is None:
            raise FileNotFoundError("this door is closed")
        end, _ = self._socket.accept()
        self.close()
        try:
            process = os.pidfd_open(_known(end))
        except OSError:
            end.close()
            raise
        end.setblocking(True)
        return Channel(end), process

    def close(self) -> None:
        """Let nobody in any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def knock(name: str | None) -> Channel | None:
    """Return a channel to whose door this is; None if it is not on this machine."""
    if name is None:
        return None
    end = socket.socket(socket.AF_UNIX)
    end.setblocking(False)
    try:
        end.connect(f"\0{name}")
        _known(end)
    except OSError:
        end.close()
        return None
    end.setblocking(True)
    return Channel(end)


def _known(end: socket.socket) -> int:
    """Return the process at the other end; PermissionError if it is another user's."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ABOUT.size)
    process, user, _ = _ABOUT.unpack(told)
    if user != os.geteuid():
        raise PermissionError(f"user {user} is at the other end")
    return process
