"""What both sides say before they trust each other, byte by byte."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from swath.links.handshake import SIZE, Hello, admission, proof

SECRET = b"known to both"
HELLO = Hello(3, "there", 77)


def proven(steps):
    """Bring the gate's side to where it trusts us."""
    nonce, wanted = next(steps)
    said, wanted = steps.send((proof(SECRET, b"worker", nonce) + bytes(SIZE)).ljust(wanted))
    assert said == proof(SECRET, b"trainer", bytes(SIZE))
    assert wanted == 2
    return steps


def test_who_knows_the_secret_is_admitted_and_the_gate_proves_itself_first():
    steps, hello = proven(admission(SECRET)), HELLO.packed()
    said, wanted = steps.send(hello[:2])
    assert (said, wanted) == (b"", len(hello) - 2)
    with pytest.raises(StopIteration) as admitted:
        steps.send(hello[2:])
    assert admitted.value.value == HELLO


def test_a_wrong_proof_is_answered_with_nothing():
    steps = admission(SECRET)
    nonce, _ = next(steps)
    with pytest.raises(PermissionError, match="does not know the secret"):
        steps.send(proof(b"another", b"worker", nonce) + bytes(SIZE))
    again = admission(SECRET)
    next(again)
    with pytest.raises(PermissionError, match="does not know the secret"):  # nonces differ
        again.send(proof(SECRET, b"worker", nonce) + bytes(SIZE))


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xfe",
        b"[" * 60_000,
        b"[1, 2, 3]",
        b"null",
        b'{"number": 1}',
        b'{"number": true, "host": "x", "pid": 1}',
        b'{"number": "1", "host": "x", "pid": 1}',
        b'{"number": 1, "host": "x", "pid": 1, "more": 2}',
        pickle.dumps(HELLO),
        os.urandom(100),
    ],
    ids=range(10),  # random bytes in a name would make each process collect other tests
)
def test_garbage_after_the_proof_is_refused_in_words(said):
    steps = proven(admission(SECRET))
    assert steps.send(len(said).to_bytes(2, "little")) == (b"", len(said))
    with pytest.raises(PermissionError, match="not that of a worker"):
        steps.send(said)


def test_nothing_after_the_proof_is_garbage_too():
    steps = proven(admission(SECRET))
    with pytest.raises(PermissionError, match="not that of a worker"):
        steps.send(b"\0\0")


def test_a_hello_is_as_short_as_a_name_allows():
    packed = Hello(1 << 40, "h" * 255, 1 << 22).packed()
    assert Hello.unpacked(packed[2:]) == Hello(1 << 40, "h" * 255, 1 << 22)
    assert json.loads(packed[2:])["pid"] == 1 << 22
