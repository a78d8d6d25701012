"""What a worker and a gate say to each other before they trust each other; no sockets in here.

```
 worker                          gate
   | <----- nonce ---------------- |
   | --- proof, own nonce -------> |   a wrong proof: refused without a word
   | <----- proof ---------------- |   or that it has too many others now: come again
   | ===== TLS ==================> |   if both can, which their proofs say (links/sealed.py)
   | --- who I am ---------------> |   JSON, of a bounded length
```

Both sides prove that they know the secret of the run, so neither unpickles a byte of a stranger;
the gate unpickles nothing at all. Each message has a length that is known before it comes or is
at most 64 KiB, so a stranger makes nobody allocate more than that.

Whether a side encrypts is part of what it proves. One that does is never talked out of it by who
changes packets on their way: two sides that differ part, and the worker says why.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Generator
from dataclasses import asdict, dataclass

__all__ = ["BUSY", "SIZE", "Hello", "UnlikeError", "admission", "proof", "worker_proof"]

SIZE = 32
"""Bytes of a nonce, and of a proof."""
BUSY = bytes(SIZE)
"""Said instead of the gate's proof: who hears it may come again.

It proves nothing, so all that it can do is to let a worker try again for as long as it would have
waited anyway."""
_LENGTH = struct.Struct("=H")


class UnlikeError(PermissionError):
    """Of the two sides, one encrypts and the other does not."""

    def __init__(self, text: str, answer: bytes = b"") -> None:
        super().__init__(text)
        self.answer = answer
        """What the worker is to hear, which proves that it comes from the gate."""


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


def admission(secret: bytes, sealed: bool = False) -> Generator[tuple[bytes, int], bytes, Hello]:
    """Be the gate's side: yield what to say and how many bytes to hear then; return who it is.

    PermissionError if it is nobody who may come in. What follows the first yield is proven.

    Args:
        secret: What both sides know.
        sealed: What follows the proofs is encrypted.
    """
    nonce = os.urandom(SIZE)
    answer = yield nonce, 2 * SIZE
    said, theirs = answer[:SIZE], answer[SIZE:]
    if not hmac.compare_digest(said, worker_proof(secret, nonce, sealed)):
        if hmac.compare_digest(said, worker_proof(secret, nonce, not sealed)):
            one, other = ("the worker", "we do") if sealed else ("this Python", "the worker does")
            text = f"{one} cannot encrypt its connections, and {other}"
            raise UnlikeError(text, proof(secret, b"unlike", theirs))
        raise PermissionError("it does not know the secret")
    (length,) = _LENGTH.unpack((yield proof(secret, b"trainer", theirs), _LENGTH.size))
    return Hello.unpacked((yield b"", length) if length else b"")


def worker_proof(secret: bytes, nonce: bytes, sealed: bool = False) -> bytes:
    """Return what a worker answers to the gate's nonce, if it encrypts what follows or does not."""
    return proof(secret, b"worker, sealed" if sealed else b"worker", nonce)


def proof(secret: bytes, who: bytes, nonce: bytes) -> bytes:
    """Return what only one who knows the secret can answer to a nonce."""
    return hmac.digest(secret, who + nonce, hashlib.sha256)
