"""Worker processes: how they start, what they inherit, how they end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import link_kit as kit
import pytest
from multi_kit import ended_by_ctrl_c
from wait_kit import comes_true

from swath.errors import WorkerError
from swath.links import ProcessLink, ProcessPort, launch, pack, process
from swath.links.launch import server_pid, stop_server
from swath.memory import SharedMemory

launching: Any = sys.modules[launch.__module__]  # the function has the name of its module


@pytest.fixture
def worker():
    worker = launch(kit.answer, b"payload")
    yield worker
    worker.close(0.0)


def ask(worker, function, *arguments, descriptors=()):
    worker.channel.send((pack(function, "it"), arguments), descriptors)
    return worker.channel.receive()[0]


def test_a_worker_runs_a_function_with_a_channel_and_a_payload(worker):
    assert worker.channel.receive()[0] == ("up", worker.pid, b"payload")
    assert worker.pid != os.getpid()
    assert ask(worker, lambda a, b: a + b, 3, 4) == 7
    assert worker.exit_code() is None
    reading, writing = os.pipe()
    assert ask(worker, lambda fd: os.write(fd, b"hello"), descriptors=[writing]) == 5
    assert os.read(reading, 10) == b"hello"
    os.close(reading), os.close(writing)
    worker.channel.close()
    assert worker.exit_code(30) == 0


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("return", 0),
        ("exit", 3),
        ("_exit", 4),
        ("raise", 1),
        ("message", 1),
        ("SIGKILL", -9),
        ("SIGSEGV", -11),
        ("SIGTERM", -15),
    ],
)
def test_how_a_worker_ended_is_told(how, code, capfd):
    worker = launch(kit.end, how.encode())
    assert worker.exit_code(30) == code
    assert worker.exit_code() == code
    with pytest.raises(EOFError):
        worker.channel.receive()
    worker.kill()
    worker.close()
    worker.close()
    worker.kill()
    assert ("KeyError: 'as asked'" in capfd.readouterr().err) == (how == "raise")


def test_a_worker_is_killed_whatever_it_does():
    workers = [launch(kit.nap, b"") for _ in range(2)]
    for worker in workers:
        assert worker.channel.receive()[0] == "up"
        assert worker.exit_code(0.02) is None
    workers[0].kill()
    assert workers[0].exit_code(30) == -signal.SIGKILL
    workers[1].close(timeout=0.1)
    assert workers[1].exit_code() == -signal.SIGKILL
    workers[0].close()


def test_a_worker_has_our_surroundings_and_a_random_state_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWATH_TEST", "here")
    monkeypatch.syspath_prepend("/some/where")
    worker = launch(kit.surroundings, b"")
    assert worker.channel.receive()[0] == (str(tmp_path), "here", sys.path, sys.argv)
    worker.close()
    workers = [launch(kit.draw, b"") for _ in range(2)]
    draws = [worker.channel.receive()[0] for worker in workers]
    for worker in workers:
        worker.close()
    assert all(a != b for a, b in zip(*draws, strict=True))


def test_what_a_worker_writes_goes_where_we_write(capfd):
    worker = launch(kit.speak, b"this")
    assert worker.exit_code(30) == 0
    worker.close()
    out, err = capfd.readouterr()
    assert out == "said this\n"
    assert err == "written this\n"


def test_a_worker_inherits_no_descriptors_of_ours_or_of_other_workers(worker):
    worker.channel.receive()
    others = [launch(kit.nap, b"") for _ in range(3)]
    last = launch(kit.answer, b"")
    last.channel.receive()
    listed = ask(last, lambda: sorted(map(int, os.listdir("/proc/self/fd"))))
    for one in (*others, last):
        one.kill()
        one.close()
    assert len(listed) == 5  # three streams, the channel, and the folder that is listed


def test_workers_ignore_ctrl_c(worker):
    worker.channel.receive()
    os.kill(worker.pid, signal.SIGINT)
    assert ask(worker, lambda: 5) == 5
    assert ask(worker, lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    assert ask(worker, lambda: signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)


def test_a_worker_can_have_workers():
    worker = launch(kit.nest, b"")
    outer, inner, hello = worker.channel.receive()[0]
    assert outer == worker.pid
    assert hello == ("up", inner, b"inner")
    assert worker.channel.receive()[0] == 42
    worker.channel.send("go on")
    assert worker.channel.receive()[0] == 0
    assert worker.exit_code(30) == 0
    worker.close()
    assert kit.gone([inner])


def test_workers_of_a_worker_end_with_it():
    worker = launch(kit.nest_and_nap, b"")
    inner, _ = worker.channel.receive()
    assert kit.alive(inner)
    worker.kill()
    worker.close()
    assert kit.gone([inner], 3.0)


def test_when_the_fork_server_is_killed_its_workers_end_and_the_next_launch_works(worker):
    worker.channel.receive()
    server = server_pid()
    os.kill(server, signal.SIGKILL)
    assert worker.exit_code(30) == -signal.SIGKILL
    other = launch(kit.answer, b"again")
    assert other.channel.receive()[0] == ("up", other.pid, b"again")
    assert server_pid() != server
    other.close(0.0)


def killed_at_start(monkeypatch, times):
    """Let the next fork servers be killed as soon as they are started, so many times."""
    stop_server()
    start, started = launching._start_program, []

    def start_and_kill(theirs, ours):
        server = start(theirs, ours)
        started.append(server[0])
        if len(started) <= times:
            os.kill(server[0], signal.SIGKILL)
        return server

    monkeypatch.setattr(launching, "_start_program", start_and_kill)
    return started


def test_a_fork_server_that_is_killed_while_it_starts_is_started_again(monkeypatch):
    started = killed_at_start(monkeypatch, 2)
    worker = launch(kit.answer, b"after all")
    assert worker.channel.receive()[0] == ("up", worker.pid, b"after all")
    worker.close(0.0)
    assert len(started) == 3


def test_a_fork_server_that_is_killed_again_and_again_is_told_in_words(monkeypatch):
    started = killed_at_start(monkeypatch, 1000)
    with pytest.raises(WorkerError, match=r"fork server.*ended 5 times.*was killed by SIGKILL"):
        launch(kit.answer, b"")
    assert len(started) == 5
    assert server_pid() is None
    monkeypatch.undo()
    worker = launch(kit.answer, b"at last")
    assert worker.channel.receive()[0] == ("up", worker.pid, b"at last")
    worker.close(0.0)


def test_a_fork_server_that_is_stopped_does_not_hold_up_our_end(worker, monkeypatch):
    monkeypatch.setattr(launching, "_ENDING", 0.1)
    worker.channel.receive()
    server = server_pid()
    os.kill(server, signal.SIGSTOP)
    worker.kill()
    worker.close()  # nobody tells how it ended
    stop_server()
    assert kit.gone([server, worker.pid])


def test_a_fork_server_outlives_a_worker_that_it_cannot_start(worker):
    worker.channel.receive()
    server = server_pid()
    soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{server}/fd"))
    resource.prlimit(server, resource.RLIMIT_NOFILE, (open_now + 2, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            launch(kit.answer, b"")
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, (soft, hard))
    another = launch(kit.answer, b"")
    another.close(0.0)
    assert server_pid() == server
    assert ask(worker, lambda: 5) == 5


def test_after_ctrl_c_in_a_launch_workers_go_by_their_own_process_ids(worker, monkeypatch):
    plain = launching.socket.send_fds

    def interrupted(*request):
        plain(*request)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(launching.socket, "send_fds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch(kit.answer, b"")
    another = launch(kit.answer, b"")
    assert another.channel.receive()[0][1] == another.pid
    another.close(0.0)


def test_the_server_can_be_stopped_and_comes_back(worker):
    worker.channel.receive()
    server = server_pid()
    stop_server()
    assert server_pid() is None
    assert kit.gone([server, worker.pid])
    stop_server()


def test_memory_and_the_flag_of_a_link():
    link = ProcessLink(serve_link, b"")
    memory = SharedMemory(1000)
    link.send("fill", [memory])
    assert link.receive() == (1000, False)
    assert (memory.array == 7).all()
    link.interrupt()
    link.send("fill", [memory])
    assert link.receive() == (1000, True)
    link.interrupt(False)
    link.send("fill", [memory])
    assert link.receive() == (1000, False)
    link.send("end")
    assert link.exit_code(30) == 0
    with pytest.raises(EOFError):
        link.receive()
    link.close()


def test_a_worker_that_closes_its_connection_and_lives_on_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(process, "_LAST_WORDS", 0.1)
    link = ProcessLink(kit.hang_up, b"")
    assert link._channel.receive()[0] == "bye"
    with pytest.raises(EOFError):
        link.receive()
    assert "did not end" in link.ended()
    link.kill()
    link.close()
    assert kit.gone([link.pid])


def serve_link(channel, payload):
    port = ProcessPort(channel)
    while True:
        message, memories = port.receive()
        if message == "end":
            return
        memories[0].array[:] = 7
        port.send((memories[0].nbytes, port.interrupted()))


PARENT = """
import sys
sys.path[:] = {path!r}
import link_kit as kit
from swath.links import launch
from swath.links.launch import server_pid
workers = [launch(kit.nap, b""), launch(kit.nest_and_nap, b"")]
inner = [worker.channel.receive()[0] for worker in workers][1]
print(*[worker.pid for worker in workers], inner, server_pid(), flush=True)
sys.stdin.read()
"""


def test_when_we_are_killed_everything_ends_within_seconds():
    program = PARENT.format(path=sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 4
        assert all(map(kit.alive, pids))
        parent.kill()
        parent.wait()
        assert kit.gone(pids, 3.0)


def test_the_answer_to_who_was_interrupted_is_nobody_elses():
    stop_server()  # so that it begins to import torch when it is asked
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(kit.answer, b"nobody's")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    worker = launch(kit.answer, b"mine")
    assert worker.channel.receive()[0] == ("up", worker.pid, b"mine")
    worker.close(0.0)


STARTING = """
from swath.collectors import MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import ParallelEnv
from swath.testing import CountingEnv
print("now", flush=True)
one = {make}
print("made", flush=True)
input()
"""
MAKE = {
    "sync": "MultiSyncCollector([CountingEnv] * 2, frames_per_batch=4)",
    "parallel": "ParallelEnv(2, CountingEnv)",
    "mp": "DistributedCollector([CountingEnv] * 2, frames_per_batch=4, launcher='mp')",
}


def members(group):
    """Return the processes of a group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of, *_ = path.read_text().rpartition(")")[2].split()
            found += [path.parent.name] if int(of) == group and state != "Z" else []
    return found


@pytest.mark.parametrize(("make", "after"), [("sync", 0.02), ("parallel", 0.4), ("mp", 1.2)])
def test_ctrl_c_while_workers_start_shows_one_traceback_and_leaves_nobody(make, after):
    command = [sys.executable, "-W", "ignore", "-c", STARTING.format(make=MAKE[make])]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
        assert script.stdout.readline() == "now\n"
        time.sleep(after)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        _, errors = script.communicate(timeout=50)
        comes_true(lambda: not members(script.pid), every=0.05)
        left = members(script.pid)
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
    assert ended_by_ctrl_c(script.returncode), errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == errors.count("\nKeyboardInterrupt") == 1, errors
    assert not left
