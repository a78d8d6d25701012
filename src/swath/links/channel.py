"""Messages over a stream socket; over a Unix one file descriptors, too.

```
 | length, 8 bytes, with up to 8 descriptors beside it | pickled message |
```

The end of the other side is an `EOFError`, here and there, at once. One that was stopped has not
ended: `limit` says how long it may take or give nothing in the middle of a message. Nothing can
follow a message of which a part has come, so that the connection ends with that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swath.links.sealed import Sealed

__all__ = ["Channel", "StalledError"]

_LENGTH = struct.Struct("=Q")
_MOST_DESCRIPTORS = 8
_LARGEST = 1 << 40
"""Bytes of a message; a length beyond is none, and the other side speaks of something else."""
_AT_ONCE = 1 << 26
"""Bytes of a message that memory is made for before they come."""
_STALLED = {errno.EAGAIN, errno.EWOULDBLOCK}
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.EBADF}  # the last: closed here
_GONE |= {errno.ENETUNREACH, errno.EHOSTUNREACH}  # cut off for so long that it was given up


class StalledError(EOFError):
    """The other side took or gave nothing for too long, in the middle of a message."""


class Channel:
    """One end of a connection; one thread at a time may send, and one receive."""

    def __init__(self, end: socket.socket | Sealed) -> None:
        self._socket: Any = end
        self._stalled = False

    def limit(self, seconds: float | None) -> None:
        """Give up once the other side has taken or given nothing of a message for so long."""
        if not isinstance(self._socket, socket.socket):
            self._socket.limit = seconds
            return
        # Not by `settimeout`, which would make `send_last` wait, and each call look before it acts.
        whole, part = divmod(seconds or 0.0, 1.0)  # 0 is no limit
        value = struct.pack("ll", int(whole), int(part * 1e6))
        with contextlib.suppress(OSError):  # it has ended
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def _ended(self, error: OSError | None = None) -> EOFError:
        """Return what to raise where a call has found the end, or has failed for want of it."""
        if error is not None and error.errno in _STALLED:
            self._stalled = True
            self.end()
        elif error is not None and error.errno not in _GONE:
            raise error
        return (StalledError if self._stalled else EOFError)("the other side is gone")

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel and the socket for its other end."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return self._socket.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and open files beside it."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            # In one call, mostly: then Ctrl-C cannot come in between.
            head = _LENGTH.pack(len(body))
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
            sent = self._socket.sendmsg([head, body], beside if descriptors else [])
            for part in (head, body):
                if sent < len(part):  # nothing is not sent: who has all of it may be gone by now
                    self._socket.sendall(memoryview(part)[sent:])
                sent = max(0, sent - len(part))
        except OSError as error:
            raise self._ended(error) from error

    def send_last(self, message: Any) -> None:
        """Send a small message that nothing follows, if the other side reads what came before."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendmsg([_LENGTH.pack(len(body)), body], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise EOFError("the other side is gone") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message and return it with the files that came beside it."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MOST_DESCRIPTORS)
        except OSError as error:  # reset: it was killed before it had read all that we sent
            raise self._ended(error) from error
        if not head:
            raise self._ended()
        head += self._exactly(_LENGTH.size - len(head))
        return pickle.loads(self._exactly(_LENGTH.unpack(head)[0])), descriptors

    def _exactly(self, count: int) -> bytearray:
        """Return so many bytes; beyond `_AT_ONCE` memory is made for what comes, not for claims."""
        if count > _LARGEST:
            raise EOFError("the other side sent something that is not a message")
        body, filled = bytearray(min(count, _AT_ONCE)), 0
        while filled < count:
            if filled == len(body):
                body += bytes(min(filled, count - filled))
            try:
                got = self._socket.recv_into(memoryview(body)[filled:])
            except OSError as error:
                raise self._ended(error) from error
            if not got:
                raise self._ended()
            filled += got
        return body

    def waits(self) -> bool:
        """Tell whether there is a message, or the end of the other side, to receive."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def ended(self) -> bool:
        """Tell whether the other side has ended, also if there is something to receive."""
        poller = select.poll()
        poller.register(self._socket, getattr(select, "POLLRDHUP", 0))
        return bool(poller.poll(0))

    def end(self) -> None:
        """End the connection; whoever waits here or there sees an EOFError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def await_end(self, timeout: float | None) -> bool:
        """Wait until the other side has closed, whatever it says before; False if it has not."""
        until = None if timeout is None else monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            while self._socket.recv(1 << 16):
                if until is not None:  # for all of it: it may have much to say
                    self._socket.settimeout(max(0.0, until - monotonic()))
        except OSError as error:
            return not isinstance(error, (TimeoutError, BlockingIOError))
        return True

    def close(self) -> None:
        """Close this end; the other side sees an EOFError."""
        with contextlib.suppress(OSError):
            self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors, whether they are open or not."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
