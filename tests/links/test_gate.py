"""Both ends of a connection prove that they know the secret, before anything is unpickled."""

import os
import socket
import threading
import time

import pytest

from swath.links.gate import Gate, dial, new_secret

PATIENCE = 20.0


@pytest.fixture
def gate():
    secret = new_secret()
    gate = Gate("127.0.0.1", 0, secret, PATIENCE)
    yield gate, secret
    gate.close()


def test_who_knows_the_secret_comes_in(gate):
    gate, secret = gate
    channel, own_host = dial("127.0.0.1", gate.port, secret, 3, PATIENCE)
    arrival = gate.fetch(3, time.monotonic() + PATIENCE, lambda: None)
    assert (arrival.hello.number, arrival.hello.pid, own_host) == (3, os.getpid(), "127.0.0.1")
    arrival.channel.send("welcome")
    assert channel.receive()[0] == "welcome"
    channel.close()
    arrival.channel.close()


def test_another_secret_does_not(gate, caplog):
    gate, _ = gate
    with pytest.raises(PermissionError, match="refused us, or has another secret"):
        dial("127.0.0.1", gate.port, new_secret(), 3, PATIENCE)
    assert gate.fetch(3, 0.0, lambda: None) is None
    assert "does not know the secret" in caplog.text


@pytest.mark.parametrize("answer", ["noise", "echo"])
def test_a_worker_tells_a_false_trainer_nothing(answer):
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            end, _ = server.accept()
            with end:
                end.sendall(bytes(32))
                proof = end.recv(64, socket.MSG_WAITALL)
                end.sendall(os.urandom(32) if answer == "noise" else proof[:32])
                heard.append(end.recv(1))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(PermissionError, match="refused us, or has another secret"):
            dial("127.0.0.1", server.getsockname()[1], new_secret(), 0, PATIENCE)
        thread.join()
    assert heard == [b""]


def test_a_gate_that_was_open_and_refuses_is_not_tried_again():
    gate = Gate("127.0.0.1", 0, new_secret(), PATIENCE)
    gate.close()
    with pytest.raises(ConnectionError, match="nobody listens"):
        dial("127.0.0.1", gate.port, new_secret(), 0, 600.0, is_open=True)
