"""What a worker and a gate say to each other before they trust each other; no sockets in here.

```
 worker                          gate
   | <----- nonce ---------------- |
   | --- proof, own nonce -------> |   a wrong proof: refused without a word
   | <----- proof ---------------- |   or that it has too many others now: come again
   | --- who I am ---------------> |   JSON, of a bounded length
```

Both sides prove that they know the secret of the run, so neither unpickles a byte of a stranger;
the gate unpickles nothing at all. Each message has a length that is known before it comes or is
at most 64 KiB, so a stranger makes nobody allocate more than that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Generator
from dataclasses import asdict, dataclass

__all__ = ["BUSY", "SIZE", "Hello", "admission", "proof"]

SIZE = 32
"""Bytes of a nonce, and of a proof."""
BUSY = bytes(SIZE)
"""Said instead of the gate's proof: who hears it may come again.

It proves nothing, so all that it can do is to let a worker try again for as long as it would have
waited anyway."""
_LENGTH = struct.Struct("=H")


@dataclass(frozen=True)
class Hello:
    """Who comes in."""

    number: int
    host: str
    pid: int

    def packed(self) -> bytes:
        """Return this as bytes, with their number in front."""
        body = json.dumps(asdict(self)).encode()
        return _LENGTH.pack(len(body)) + body

    @classmethod
    def unpacked(cls, body: bytes) -> Hello:
        """Return what was said; PermissionError if no worker says such a thing."""
        try:
            hello = cls(**json.loads(body))
        except (ValueError, TypeError, RecursionError):
            hello = None
        if hello is None or [type(one) for one in vars(hello).values()] != [int, str, int]:
            raise PermissionError(
                "it knows the secret, but its message is not that of a worker of this version"
            )
        return hello


def admission(secret: bytes) -> Generator[tuple[bytes, int], bytes, Hello]:
    """Be the gate's side: yield what to say and how many bytes to hear then; return who it is.

    PermissionError if it is nobody who may come in. What follows the first yield is proven.
    """
    nonce = os.urandom(SIZE)
    answer = yield nonce, 2 * SIZE
    if not hmac.compare_digest(answer[:SIZE], proof(secret, b"worker", nonce)):
        raise PermissionError("it does not know the secret")
    (length,) = _LENGTH.unpack((yield proof(secret, b"trainer", answer[SIZE:]), _LENGTH.size))
    return Hello.unpacked((yield b"", length) if length else b"")


def proof(secret: bytes, who: bytes, nonce: bytes) -> bytes:
    """Return what only one who knows the secret can answer to a nonce."""
    return hmac.digest(secret, who + nonce, hashlib.sha256)
