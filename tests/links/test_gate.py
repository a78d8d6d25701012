"""Both ends of a connection prove that they know the secret, before anything is unpickled."""

import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from wait_kit import comes_true

from swath.links.gate import Gate, dial, new_secret
from swath.links.handshake import BUSY, SIZE, Hello, proof

PATIENCE = 20.0


@pytest.fixture
def gate():
    secret = new_secret()
    gate = Gate("127.0.0.1", 0, secret, PATIENCE)
    yield gate, secret
    gate.close()


@pytest.fixture
def in_clear(monkeypatch):
    """Let this process encrypt nothing, whatever its Python can: tests speak byte by byte."""
    monkeypatch.setattr("swath.links.gate.why_no_tls", lambda: "not in this test")


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
    with pytest.raises(
        PermissionError, match="refused the connection; perhaps it has another secret"
    ):
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
        with pytest.raises(
            PermissionError, match="refused the connection; perhaps it has another secret"
        ):
            dial("127.0.0.1", server.getsockname()[1], new_secret(), 0, PATIENCE)
        thread.join()
    assert heard == [b""]


def test_a_gate_that_was_open_and_refuses_is_not_tried_again():
    gate = Gate("127.0.0.1", 0, new_secret(), PATIENCE)
    gate.close()
    with pytest.raises(ConnectionError, match="nothing listens"):
        dial("127.0.0.1", gate.port, new_secret(), 0, 600.0, is_open=True)


def connected(gate):
    """Return a connection of a stranger, and the nonce that the gate has sent."""
    end = socket.create_connection(("127.0.0.1", gate.port), PATIENCE)
    return end, end.recv(SIZE, socket.MSG_WAITALL)


def closed(end):
    """Wait until the other side has closed a connection."""
    with end:
        try:
            while end.recv(1000):
                pass
        except ConnectionResetError:
            pass
    return True


def comes_in(gate, secret, number):
    channel, _ = dial("127.0.0.1", gate.port, secret, number, PATIENCE)
    arrival = gate.fetch(number, time.monotonic() + PATIENCE, lambda: None)
    channel.close()
    arrival.channel.close()
    return arrival.hello.number == number


@pytest.mark.usefixtures("in_clear")
def test_a_handshake_in_pieces_of_one_byte_among_others(gate):
    gate, secret = gate
    (one, nonce), (two, other) = connected(gate), connected(gate)
    texts = [proof(secret, b"worker", nonce), proof(secret, b"worker", other)]
    hellos = [Hello(number, "here", 5).packed() for number in (0, 1)]
    for parts in zip(*(text + bytes(SIZE) for text in texts), strict=True):
        for end, part in zip((one, two), parts, strict=True):
            end.sendall(bytes([part]))
    assert one.recv(SIZE, socket.MSG_WAITALL) == proof(secret, b"trainer", bytes(SIZE))
    for end, hello in zip((one, two), hellos, strict=True):
        for part in hello + (3).to_bytes(8, "little") + b"...":  # the last is the channel's
            end.sendall(bytes([part]))
    for number, end in enumerate((one, two)):
        arrival = gate.fetch(number, time.monotonic() + PATIENCE, lambda: None)
        assert arrival.hello == Hello(number, "here", 5)
        assert arrival.channel._exactly(8) == (3).to_bytes(8, "little")
        arrival.channel.close()
        end.close()


@pytest.mark.usefixtures("in_clear")
def test_who_knows_the_secret_and_says_garbage_is_refused_in_the_log(gate, caplog, capfd):
    gate, secret = gate
    for garbage in (b"\0\0", b"\x08\0garbage!", pickle.dumps(time.sleep).ljust(70_000)):
        end, nonce = connected(gate)
        end.sendall(proof(secret, b"worker", nonce) + bytes(SIZE) + garbage)
        assert closed(end)
    assert comes_in(gate, secret, 4)
    assert caplog.text.count("it knows the secret, but") == 3
    assert "Traceback" not in capfd.readouterr().err


def test_a_stranger_has_a_time_for_the_whole_handshake(caplog):
    gate = Gate("127.0.0.1", 0, new_secret(), 0.3)
    end, _ = connected(gate)
    said = 0
    with end:
        try:
            while said < 2 * SIZE and not select.select([end], [], [], 0.05)[0]:
                end.sendall(b"x")
                said += 1
        except OSError:  # it was closed in between
            pass
    gate.close()
    assert said < 2 * SIZE  # which took it longer than it had
    assert "it took longer than 0.3 s (link_timeout)" in caplog.text


def test_a_crowd_of_workers_comes_in_though_there_is_no_room_for_all_at_once(gate):
    gate, secret = gate
    gate._most = 4
    came = []
    threads = [
        threading.Thread(target=lambda n=number: came.append(comes_in(gate, secret, n)))
        for number in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [True] * 12


@pytest.mark.usefixtures("in_clear")
def test_of_too_many_the_oldest_that_has_proved_nothing_is_told_to_come_again(gate, caplog):
    gate, secret = gate
    gate._most = 2
    proved, nonce = connected(gate)
    proved.sendall(proof(secret, b"worker", nonce) + bytes(SIZE))
    assert proved.recv(SIZE, socket.MSG_WAITALL) == proof(secret, b"trainer", bytes(SIZE))
    oldest, _ = connected(gate)
    newest, nonce = connected(gate)
    assert oldest.recv(1000, socket.MSG_WAITALL) == BUSY
    newest.sendall(proof(secret, b"worker", nonce) + bytes(SIZE))
    assert newest.recv(SIZE, socket.MSG_WAITALL) == proof(secret, b"trainer", bytes(SIZE))
    assert "too many connections to port" in caplog.text
    for end in (proved, oldest, newest):
        end.close()


@pytest.mark.usefixtures("in_clear")
@pytest.mark.parametrize("said", [None, b"", bytes(5), bytes(SIZE) + BUSY])
def test_a_worker_tries_again_if_it_was_not_refused(gate, said):
    """It was dropped: before the nonce, or later with the word that it may come again."""
    gate, secret = gate
    with socket.create_server(("127.0.0.1", 0)) as false:
        port, result = false.getsockname()[1], []
        coming = threading.Thread(
            target=lambda: result.append(dial("127.0.0.1", port, secret, 7, PATIENCE))
        )
        coming.start()
        first, _ = false.accept()
        with first:
            if said is None:  # a reset
                first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                first.sendall(said)
        second, _ = false.accept()
        with second, socket.create_connection(("127.0.0.1", gate.port), PATIENCE) as real:
            real.settimeout(PATIENCE)
            second.settimeout(PATIENCE)
            second.sendall(real.recv(SIZE, socket.MSG_WAITALL))
            real.sendall(second.recv(2 * SIZE, socket.MSG_WAITALL))
            second.sendall(real.recv(SIZE, socket.MSG_WAITALL))
            real.sendall(second.recv(1000))
            arrival = gate.fetch(7, time.monotonic() + PATIENCE, lambda: None)
        coming.join()
    assert arrival.hello.number == 7
    arrival.channel.close()
    result[0][0].close()


def test_closing_a_gate_ends_newcomers_and_those_who_were_not_fetched(gate):
    gate, secret = gate
    end, _ = connected(gate)
    channel, _ = dial("127.0.0.1", gate.port, secret, 0, PATIENCE)
    gate.close()
    gate.close()
    assert closed(end)
    assert channel.await_end(PATIENCE)
    channel.close()


FEW = """
import os, resource, sys, threading, time
from swath.links.gate import Gate
resource.setrlimit(resource.RLIMIT_NOFILE, (48, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
gate, held = Gate("127.0.0.1", 0, b"s3", 60.0), []
print(gate.port, flush=True)
for line in sys.stdin:
    if line == "use up\\n":
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
    elif line == "free\\n":
        while held:
            os.close(held.pop())
    elif line == "fetch\\n":
        gate.fetch(0, time.monotonic() + 60.0, lambda: None).channel.close()
    descriptors = 48 if held else len(os.listdir("/proc/self/fd"))
    print(threading.active_count(), descriptors, flush=True)
gate.close()
"""


class FewDescriptors:
    """A gate in a process that may have 48 descriptors."""

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", FEW],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.process.stdout.readline())
        return self

    def __exit__(self, *_):
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def do(self, what):
        """Let it do something; return how many threads and descriptors it has then."""
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return tuple(map(int, self.process.stdout.readline().split()))


def test_a_flood_costs_few_descriptors_and_no_thread_and_workers_come_in_meanwhile():
    with FewDescriptors() as gate:
        threads, before = gate.do("look")
        strangers = [socket.create_connection(("127.0.0.1", gate.port), 60) for _ in range(200)]
        channel, _ = dial("127.0.0.1", gate.port, b"s3", 0, 60.0)
        assert gate.do("fetch")[0] == threads == 2
        assert gate.do("look")[1] <= before + 48 // 8
        channel.close()
        for one in strangers:
            one.close()
        assert comes_true(lambda: gate.do("look") == (threads, before))


def test_a_gate_for_which_no_descriptor_is_left_lets_workers_in_once_there_is_one():
    with FewDescriptors() as gate:
        assert gate.do("use up")[0] == 2
        coming = threading.Thread(
            target=lambda: dial("127.0.0.1", gate.port, b"s3", 0, 60.0)[0].close()
        )
        coming.start()
        assert "Too many open files" in gate.process.stderr.readline()
        gate.do("free")
        coming.join()
        assert gate.do("fetch")[0] == 2
