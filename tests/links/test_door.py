"""A door lets one process of this user in, and knows which one it is."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from swath.links.door import Door, knock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such doors")

KNOCKS = """
import os, sys
from swath.links.door import knock
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
channel = knock(sys.argv[1])
if channel is None:
    sys.exit(3)
channel.send(os.getpid())
print(channel.receive()[0])
"""


def visit(door, *more):
    command = [sys.executable, "-c", KNOCKS, door.name, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


def opened(door):
    """Wait until somebody has knocked, and open."""
    poller = select.poll()
    poller.register(door._socket, select.POLLIN)
    assert poller.poll(30_000)
    return door.open()


def test_who_knocks_comes_in_and_its_end_is_seen(door):
    visitor = visit(door)
    channel, process = opened(door)
    assert channel.receive()[0] == visitor.pid
    ended = select.poll()
    ended.register(process, select.POLLIN)
    assert not ended.poll(0)
    channel.send("come in")
    assert visitor.communicate(timeout=30)[0] == "come in\n"
    assert ended.poll(30_000)
    channel.close()
    os.close(process)


def test_it_opens_once(door):
    first = knock(door.name)
    channel, process = door.open()
    assert knock(door.name) is None
    with pytest.raises(FileNotFoundError, match="closed"):
        door.open()
    for one in (first, channel):
        one.close()
    os.close(process)


def test_nobody_has_knocked(door):
    with pytest.raises(BlockingIOError):
        door.open()


def test_a_door_that_is_not_there_or_closed():
    door = Door()
    name = door.name
    door.close()
    assert knock(name) is None
    assert knock("swath-" + "0" * 32) is None
    assert knock(None) is None


def test_who_waits_when_it_closes_is_told(door):
    channel = knock(door.name)
    door.close()
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()


def test_a_crowd_before_the_door_keeps_nobody_waiting(door):
    crowd = [knock(door.name) for _ in range(10)]
    assert crowd[-1] is None
    for one in crowd:
        if one is not None:
            one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_not_let_in_and_does_not_come_in(door):
    visitor = visit(door, "65534")
    visitor.communicate(timeout=30)
    assert visitor.returncode == 3  # it sees that the door is not of its own user
    with pytest.raises(PermissionError, match="user 65534"):
        opened(door)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_who_says_nothing_is_not_let_in_either(door):
    code = "import os, socket, sys, time; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
    code += "s.connect(chr(0) + sys.argv[1]); s.recv(1)"
    other = subprocess.Popen([sys.executable, "-c", code, door.name])
    with pytest.raises(PermissionError, match="user 65534"):
        opened(door)
    assert other.wait(30) == 0  # its connection has ended
