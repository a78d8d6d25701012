"""Connections with TLS, and somebody between their ends."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from swath.links.channel import Channel
from swath.system import why_no_tls

needs_tls = pytest.mark.skipif(why_no_tls() is not None, reason=str(why_no_tls()))
SECRET = b"known to both"


def tcp_pair():
    """Return the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def sealed_pair():
    """Return channels at both ends of a connection with TLS."""
    if why_no_tls() is not None:
        pytest.skip(str(why_no_tls()))
    from swath.links.sealed import seal

    ours, theirs = tcp_pair()
    ends = []
    gate = threading.Thread(target=lambda: ends.append(seal(theirs, SECRET, is_gate=True)))
    gate.start()
    ours = seal(ours, SECRET, is_gate=False)
    gate.join()
    return Channel(ours), Channel(ends[0])


class Relay:
    """Somebody on the way to a port: hears all, and may change it.

    Args:
        port: Where to.
        change: What is passed on instead of some bytes; True as second argument on the way there.
    """

    def __init__(self, port, change=lambda data, there: [data]):
        self.heard, self._change = bytearray(), change
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._connect, args=(port,))]
        self._threads[0].start()

    def _connect(self, port):
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", port))
        back = threading.Thread(target=self._pass, args=(far, near, False))
        back.start()
        self._pass(near, far, True)
        back.join()
        near.close()
        far.close()

    def _pass(self, one, other, there):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.heard += data
                for part in self._change(data, there):
                    other.sendall(part)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._threads[0].join()
        self._server.close()
