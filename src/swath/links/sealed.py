"""A TCP connection whose both ends know the secret of the run, encrypted with TLS.

```
 Channel -- plain bytes --> Sealed -- TLS 1.3, the secret is the pre-shared key --> the other end
```

A `Sealed` has the methods of a socket that gates and channels call. It is made after the handshake
(`links/handshake.py`), so TLS never hears a stranger.

Nothing is read ahead: OpenSSL takes one record at a time from the connection, and each message
begins a record. So where all of a message was read nothing is left in here, and waiting for the
descriptor is waiting for a message, as without TLS.

One thread may send while another receives. OpenSSL allows neither to enter while the other is
inside, so its descriptor never blocks and nobody waits with the lock held.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

__all__ = ["Sealed", "seal"]

_PIECE = 1 << 18
"""Bytes that are encrypted at once; in between the other thread may receive."""
_IDENTITY = "swath"


def seal(end: socket.socket, secret: bytes, is_gate: bool) -> Sealed:
    """Return a connected socket with TLS; the socket itself is used up.

    Args:
        end: The socket. If it blocks, the TLS handshake is done on return; if not, it is done
            when the first bytes have been received.
        secret: What both sides know.
        is_gate: Be the side that was connected to.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_gate else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    key = hmac.digest(secret, b"tls", hashlib.sha256)  # the secret itself only signs proofs
    psk: Any = context  # what mypy knows of it depends on the Python that runs mypy
    if is_gate:
        psk.set_psk_server_callback(lambda identity: key)
        context.num_tickets = 0  # nothing is to come that is no message
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # there is none
        psk.set_psk_client_callback(lambda hint: (_IDENTITY, key))
    return Sealed(
        context.wrap_socket(end, server_side=is_gate, do_handshake_on_connect=False), is_gate
    )


class Sealed:
    """One end of a connection with TLS; one thread at a time may send, and one receive."""

    def __init__(self, end: ssl.SSLSocket, is_gate: bool) -> None:
        self._end, self._is_gate = end, is_gate
        self._timeout = end.gettimeout()
        end.setblocking(False)
        self.limit: float | None = None
        """Seconds that the other side may take or give nothing; see `Channel.limit`."""
        self._lock = threading.Lock()
        self._waiting, self._closed, self._shaken = 0, False, False
        if self._timeout != 0.0:
            try:
                self._do(self._shake, self._timeout)
            except BaseException:
                self.close()
                raise

    # -- what sockets have ------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return -1 if self._closed else self._end.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """Set how many seconds the receiving of something may take; 0 not to wait."""
        self._timeout = seconds

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket."""
        self._end.setsockopt(level, option, value)

    def getsockname(self) -> Any:
        """Return the address of this end."""
        return self._end.getsockname()

    def sendall(self, data: Any) -> None:
        """Send all of what is given."""
        self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any], beside: Sequence[Any] = (), flags: int = 0) -> int:
        """Send all, unless it is not to wait (`MSG_DONTWAIT`); return how much was sent."""
        assert not beside, "descriptors travel over Unix sockets only"
        timeout = 0.0 if flags & getattr(socket, "MSG_DONTWAIT", 0) else None
        whole = memoryview(b"".join(buffers))
        for start in range(0, len(whole), _PIECE):
            piece = whole[start : start + _PIECE]
            self._do(partial(self._end.send, piece), timeout)
        return len(whole)

    def recvmsg(self, count: int, *_: Any) -> tuple[bytes, list[Any], int, None]:
        """Receive at most so many bytes; there is never anything beside them."""
        return self.recv(count), [], 0, None

    def recv(self, count: int) -> bytes:
        """Receive at most so many bytes; none where the other side has ended."""
        got = bytearray(count)
        return bytes(memoryview(got)[: self.recv_into(got)])

    def recv_into(self, buffer: Any) -> int:
        """Receive into a buffer; return how many bytes."""
        if not self._shaken:
            self._do(self._shake, self._timeout)
        return self._do(lambda: self._end.recv_into(buffer), self._timeout)

    def shutdown(self, how: int) -> None:
        """End the connection; whoever waits here or there hears of it."""
        socket.socket.shutdown(self._end, how)  # that of TLS would go on without encryption

    def close(self) -> None:
        """Close this end; the descriptor goes when nobody waits for it any more."""
        with self._lock:
            self._closed = True
            if not self._waiting:
                self._end.close()

    # -- TLS --------------------------------------------------------------------------------------

    def _shake(self) -> int:
        self._end.do_handshake()
        # Without this one who knows nothing could offer a certificate, of which none is asked.
        if not (self._is_gate or self._end.session_reused):
            raise ConnectionResetError(errno.ECONNRESET, "TLS does not use the secret of the run")
        self._shaken = True
        return 0

    def _do(self, call: Callable[[], int], timeout: float | None) -> int:
        """Do a call of TLS, as often as it says that the connection is not ready for it.

        BlockingIOError if it may not wait any longer, as sockets have it.
        """
        until = None if timeout is None else monotonic() + timeout
        while True:
            try:
                with self._lock:
                    if self._closed:
                        raise OSError(errno.EBADF, "it is closed")
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLEOFError as error:
                raise BrokenPipeError(errno.EPIPE, "the other side is gone") from error
            except ssl.SSLError as error:
                words = f"what came was changed on its way, or is no TLS: {error}"
                raise ConnectionResetError(errno.ECONNRESET, words) from error
            self._wait(event, until)

    def _wait(self, event: int, until: float | None) -> None:
        left = [] if until is None else [max(0.0, until - monotonic())]
        left += [self.limit] if self.limit else []
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "it is closed")
            self._waiting += 1
        try:
            poller = select.poll()
            poller.register(self._end, event)
            ready = bool(poller.poll(min(left) * 1000 if left else None))
        finally:
            with self._lock:
                self._waiting -= 1
                if self._closed and not self._waiting:
                    self._end.close()
        if not ready:
            raise BlockingIOError(errno.EAGAIN, "the other side takes or gives nothing")
