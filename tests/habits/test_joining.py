"""Workers that are started by hand, and the collector that waits for them, say what goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading

import pytest

from swath.links.gate import Gate
from swath.workers import launchers
from swath.workers.launchers import Waiting
from swath.workers.remote import Invitation, join

SECRET = b"a secret"


@pytest.fixture
def gate():
    """Return the gate of a collector with two workers."""
    gate = Gate("127.0.0.1", 0, SECRET, 10.0, 2)
    yield gate
    gate.close()


def invitation(gate: Gate, patience: float = 10.0) -> Invitation:
    return Invitation("127.0.0.1", gate.port, SECRET, patience)


def test_a_number_that_does_not_exist_is_refused_in_words(gate, caplog):
    said: list[str] = []
    assert join(invitation(gate), 7, tell=said.append) is False
    assert said == [f"127.0.0.1 port {gate.port}: there is no worker 7: they are 0 to 1."]
    assert "worker 7 tried to connect from" in caplog.text


def test_a_number_that_is_taken_is_told_and_kept_for_the_loss_of_the_first(gate):
    said, told = [], threading.Event()

    def tell(text):
        said.append(text)
        told.set()

    threads = [threading.Thread(target=join, args=(invitation(gate), 1))]
    threads[0].start()
    first = gate.fetch(1, float("inf"), lambda: None)
    threads.append(threading.Thread(target=join, args=(invitation(gate), 1, False, tell)))
    threads[1].start()
    assert told.wait(10)
    assert "worker 1 is already connected; this one waits" in said[0]
    first.channel.close()  # it is lost: the second one is there
    second = gate.fetch(1, float("inf"), lambda: None)
    second.channel.close()
    for thread in threads:
        thread.join(10)
    assert said[1:] == [f"127.0.0.1 port {gate.port} has ended, or has taken another worker 1."]


def test_a_worker_says_that_nobody_listens_yet():
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"nothing listens on 127.0.0.1 port {port}"):
        join(Invitation("127.0.0.1", port, SECRET, 0.3), 0, tell=said.append)
    assert len(said) == 1
    assert said[0].endswith("Trying again for 0.3 s.")


def test_the_command_says_it_and_fails():
    with contextlib.closing(Gate("127.0.0.1", 0, SECRET, 10.0, 1)) as gate:
        command = [sys.executable, "-m", "swath.workers.join", f"127.0.0.1:{gate.port}", "3"]
        environ = {**os.environ, "SWATH_SECRET": SECRET.decode()}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = f"127.0.0.1 port {gate.port}: there is no worker 3: its only number is 0."
    assert done.stderr == f"swath: {said}\n"


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.1", "10.0.0.1"), ("::1", "[::1]")])
def test_the_collector_logs_a_command_to_paste_for_each_worker(caplog, monkeypatch, host, shown):
    monkeypatch.setattr(launchers, "_TELL_EVERY", 0.0)
    with caplog.at_level(logging.WARNING, "swath"):
        awaited = Waiting().start(Invitation(host, 7000, SECRET, 60.0), [0, 2])
    run = f"SWATH_SECRET=$SWATH_SECRET python -m swath.workers.join {shown}:7000"
    assert caplog.messages == [
        f"waiting for workers; run these commands on their machines:\n  {run} 0\n  {run} 2"
    ]
    awaited[2].check()
    assert caplog.messages[1:] == [f"still waiting for a worker:\n  {run} 2"]
    longer = Waiting().start(Invitation(host, 7000, SECRET, 90.0), [1])
    assert longer[1].command.endswith(":7000 1 --link-timeout 90")
