"""`progress=True` says how far a collection is, wherever it runs, and captures nothing."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios
import types

import pytest

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.errors import ClosedError
from swath.observe import progress
from swath.observe.progress import Bar
from swath.testing import CountingEnv

STATS = {"frames": 134_000, "episodes": 671, "return": {"last_100": 21.34}}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "perf_counter", clock)
    return clock


class Cell:
    """What one cell of a notebook shows: outputs that can be changed in place."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, *, raw: self._set(data["text/plain"]))

    def _set(self, text):
        self.outputs[-1] = text


@pytest.fixture
def cell(monkeypatch):
    cell = Cell()
    shell = types.SimpleNamespace(kernel=object())
    modules = {"IPython": {"get_ipython": lambda: shell}, "IPython.display": vars(cell)}
    modules["IPython.display"] = {"display": cell.display}
    for name, names in modules.items():
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return cell


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes stderr a terminal, and one that reads what it shows."""
    leader, follower = pty.openpty()
    stderr = os.fdopen(follower, "w")

    def begin(columns):
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(follower, termios.TIOCSWINSZ, size)
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")

    def read():
        parts = []
        while select.select([leader], [], [], 0.05)[0]:
            parts.append(os.read(leader, 1 << 16))
        return b"".join(parts).decode()

    yield begin, read
    stderr.close()
    os.close(leader)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_off_a_terminal_the_last_state_is_a_line_on_stderr(capsys, kind):
    makers = CountingEnv if kind is Collector else [CountingEnv] * 2
    with kind(makers, frames_per_batch=50, total_frames=200, progress=True) as collector:
        for batch in collector:
            sys.stdout.write(f"{batch.numel()}\n")
    shown = capsys.readouterr()
    assert shown.out == "50\n" * 4  # the script's own, as it was printed
    line = shown.err.splitlines()[-1]
    assert line.startswith("swath: 100% [####")
    assert "200/200 frames" in line
    assert "episodes" in line
    assert "return" in line


def test_off_a_terminal_there_is_a_line_every_five_seconds(clock, capsys):
    bar = Bar(200_000)
    for frames in range(0, 134_000, 1000):
        clock.now = 100 + frames / 10_000
        bar.update(lambda frames=frames: {**STATS, "frames": frames})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "50,000/200,000 frames  10,000/s  0:00:15 left  671 episodes" in lines[0]
    bar.close()
    assert "133,000/200,000 frames" in capsys.readouterr().err
    bar.close()
    assert capsys.readouterr().err == ""


def test_without_a_total_there_is_neither_a_share_nor_an_end(clock, capsys):
    bar = Bar(-1)
    bar.update(lambda: {**STATS, "frames": 0, "return": None})
    clock.now += 6
    bar.update(lambda: {**STATS, "frames": 600, "return": None})
    assert capsys.readouterr().err == "swath: 600 frames  100/s  671 episodes\n"


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 80, 200])
def test_a_terminal_shows_what_fits_in_one_line(clock, terminal, columns):
    begin, read = terminal
    begin(columns)
    bar = Bar(200_000)
    bar.update(lambda: {**STATS, "frames": 0})
    clock.now += 10
    bar.update(lambda: STATS)
    bar.close()
    drawn = read().replace("\x1b[K", "").replace("\r\n", "\n").rstrip("\n").split("\r")
    assert max(map(len, drawn)) < columns
    assert drawn[-1].startswith("67%")
    if columns >= 40:
        assert "134,000/200,000 frames  13,400/s" in drawn[-1]
    if columns >= 80:
        assert drawn[-1].endswith("0:00:05 left  671 episodes  return 21.3")
        assert ("[" in drawn[-1]) == (columns > 80)


def test_a_notebook_shows_one_output_per_loop_and_captures_nothing(cell, capsys):
    out, err = sys.stdout, sys.stderr
    with Collector(CountingEnv, frames_per_batch=50, total_frames=400, progress=True) as collector:
        for i, _ in enumerate(collector):
            assert (sys.stdout, sys.stderr) == (out, err)
            sys.stdout.write(".")
            if i == 2:
                break
        assert len(cell.outputs) == 1  # the loop was left, and its last state is there
        assert cell.outputs[0].startswith("37%")
        assert "150/400 frames" in cell.outputs[0]
        for _ in collector:  # in another cell
            pass
        assert len(cell.outputs) == 2
        assert "400/400 frames" in cell.outputs[1]
    assert capsys.readouterr() == ("...", "")


def test_an_interrupt_draws_the_last_state_and_ends_the_line(terminal):
    class Interrupted(CountingEnv):
        steps = 0

        def step(self, action):
            Interrupted.steps += 1
            if Interrupted.steps == 70:
                raise KeyboardInterrupt
            return super().step(action)

    begin, read = terminal
    begin(100)
    with Collector(Interrupted, frames_per_batch=50, total_frames=400, progress=True) as collector:
        collector.next()
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        shown = read()
        assert shown.endswith("\r\n")
        assert "/400 frames" in shown.split("\r")[-2]
        while collector.next() is not None:
            pass
        assert "400/400 frames" in read()


def test_a_pipe_that_is_gone_keeps_no_collector_from_its_end(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    collector = Collector(CountingEnv, frames_per_batch=50, progress=True)
    collector.next()
    monkeypatch.setattr(sys, "stderr", Gone())
    collector.shutdown()
    with pytest.raises(ClosedError):
        collector.next()


def test_a_line_may_be_ended_by_another_thread_while_it_is_drawn(clock, monkeypatch):
    lines, enders = [], []
    monkeypatch.setattr(progress, "_write", lines.append)
    bar = Bar(200_000)

    def stats():
        if enders:
            enders.pop()()  # stands for shutdown() in the trainer's thread
        return STATS

    bar.update(stats)
    enders.append(bar.close)
    clock.now += 100
    bar.update(stats)
    assert lines
    assert not enders
