"""What workers elsewhere and your process say is encrypted, where Python can do so."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
import threading
import time

import pytest
from sealed_kit import SECRET, Relay, needs_tls, sealed_pair, tcp_pair

from swath.links import gate as gates
from swath.links.gate import Gate, dial
from swath.links.handshake import UnlikeError
from swath.system import why_no_tls

PATIENCE = 20.0
WORDS = "these words are in no packet"


@pytest.fixture
def gate():
    gate = Gate("127.0.0.1", 0, SECRET, PATIENCE)
    yield gate
    gate.close()


def come_in(gate, port):
    channel, _ = dial("127.0.0.1", port, SECRET, 0, PATIENCE)
    arrival = gate.fetch(0, time.monotonic() + PATIENCE, lambda: None)
    return channel, arrival.channel


def close(*channels):
    for channel in channels:
        channel.close()


@needs_tls
@pytest.mark.parametrize("pieces", [1 << 16, 1])
def test_who_listens_on_the_way_hears_nothing_of_what_is_said(gate, pieces):
    def cut(data, there):
        return [data[at : at + pieces] for at in range(0, len(data), pieces)]

    with Relay(gate.port, cut) as relay:
        worker, trainer = come_in(gate, relay.port)
        worker.send(WORDS)
        assert trainer.receive() == (WORDS, [])
        trainer.send(WORDS * 1000)
        assert worker.receive() == (WORDS * 1000, [])
        close(worker, trainer)
    assert WORDS.encode() not in relay.heard
    assert b"number" not in relay.heard  # of the hello


def test_without_tls_it_is_said_in_the_clear(monkeypatch, caplog):
    monkeypatch.setattr(gates, "why_no_tls", lambda: "it is old")
    with caplog.at_level("INFO", "swath"):
        gate = Gate("127.0.0.1", 0, SECRET, PATIENCE)
    assert "is not encrypted: it is old" in caplog.text
    with Relay(gate.port) as relay:
        worker, trainer = come_in(gate, relay.port)
        worker.send(WORDS)
        assert trainer.receive() == (WORDS, [])
        close(worker, trainer)
    gate.close()
    assert WORDS.encode() in relay.heard


@pytest.mark.parametrize("gate_seals", [True, False])
def test_two_that_differ_part_and_both_say_why(monkeypatch, caplog, gate_seals):
    """Whoever changes packets cannot make them agree to less: it is part of what they prove."""
    lacks = ["Python 3.9 is older than 3.13", None]
    monkeypatch.setattr(gates, "why_no_tls", lambda: lacks[gate_seals])
    gate = Gate("127.0.0.1", 0, SECRET, PATIENCE)
    monkeypatch.setattr(gates, "why_no_tls", lambda: lacks[not gate_seals])
    says = "encrypts its .* cannot: Python 3.9 is older" if gate_seals else "does not encrypt its"
    with pytest.raises(UnlikeError, match=says):
        dial("127.0.0.1", gate.port, SECRET, 0, PATIENCE)
    gate.close()
    one = "the worker cannot" if gate_seals else "this Python cannot"
    assert f"{one} encrypt its connections" in caplog.text


@needs_tls
def test_what_was_changed_on_the_way_ends_the_connection_in_words(gate):
    changes = threading.Event()

    def change(data, there):
        return [data[:-1] + bytes([data[-1] ^ 1])] if changes.is_set() else [data]

    with Relay(gate.port, change) as relay:
        worker, trainer = come_in(gate, relay.port)
        changes.set()
        worker.send(WORDS)
        with pytest.raises(EOFError) as ended:
            trainer.receive()
        assert "changed on its way" in str(ended.value.__cause__)
        close(worker, trainer)


@needs_tls
def test_a_message_that_was_read_leaves_nothing_behind_that_nobody_would_wait_for():
    one, other = sealed_pair()
    for size in (0, 1, 16_000, 16_384, 16_385, 1_000_000):
        assert not other.waits()
        sender = threading.Thread(target=lambda size=size: [one.send(bytes(size)), one.send("2")])
        sender.start()
        assert len(other.receive()[0]) == size
        sender.join()
        assert other.waits()
        assert other.receive() == ("2", [])
    assert not other.waits()
    close(one, other)


@needs_tls
def test_both_sides_send_at_once_more_than_buffers_hold():
    ends, counts = sealed_pair(), []

    def hear(channel):
        counts.append(sum(len(channel.receive()[0]) for _ in range(5)))

    threads = [threading.Thread(target=hear, args=(end,)) for end in ends]
    threads += [
        threading.Thread(target=lambda end=end: [end.send(bytes(5_000_000)) for _ in range(5)])
        for end in ends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [25_000_000] * 2
    close(*ends)


@needs_tls
def test_the_end_wakes_who_listens_in_another_thread():
    one, other = sealed_pair()
    ended = []

    def listen():
        try:
            one.receive()
        except EOFError:
            ended.append(True)

    thread = threading.Thread(target=listen)
    thread.start()
    one.end()
    one.close()
    thread.join()
    assert ended == [True]
    other.close()


@needs_tls
@pytest.mark.parametrize("with_certificate", [False, True])
def test_a_gate_without_the_secret_is_not_believed(with_certificate, tmp_path):
    """It has got behind the proofs, as one could that passes on what the real one says."""
    from swath.links.sealed import seal

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if with_certificate:
        if shutil.which("openssl") is None:
            pytest.skip("needs the program openssl")
        key, certificate = tmp_path / "key", tmp_path / "certificate"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        context.load_cert_chain(certificate, key)
    else:
        context.set_psk_server_callback(lambda identity: b"another")
    ours, theirs = tcp_pair()

    def pretend():  # and be hung up on, in the handshake or after it
        with contextlib.suppress(OSError), context.wrap_socket(theirs, server_side=True) as end:
            end.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ConnectionError, match=r"does not use the secret|no TLS|is gone"):
        seal(ours, SECRET, is_gate=False)
    thread.join()


def test_a_python_that_could_and_was_built_without_keys_says_so(monkeypatch, caplog):
    monkeypatch.setattr("sys.version_info", (3, 13, 0, "final", 0))
    monkeypatch.setattr(ssl, "HAS_PSK", False, raising=False)
    monkeypatch.setattr(ssl, "OPENSSL_VERSION", "AnotherSSL 4.0")
    assert why_no_tls() == "AnotherSSL 4.0 has no pre-shared keys"
    Gate("127.0.0.1", 0, SECRET, PATIENCE).close()
    assert "not encrypted: AnotherSSL 4.0 has no pre-shared keys" in caplog.text


def test_an_older_python_says_so(monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 12, 1, "final", 0))
    assert why_no_tls() == "Python 3.12 is older than 3.13"
