"""The link to a Ray actor keeps what every link keeps; see tests/links/test_contract.py."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

import contract_kit as kit
import pytest
from wait_kit import comes_true

from swath.links import calls, pack, unpack
from swath.links import ray as module
from swath.links.door import Door
from swath.links.ray import RayLink
from swath.memory import HeapMemory
from swath.workers.host import Host
from swath.workers.messages import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


class Held:
    """Memory that blocks come into; counts how often."""

    def __init__(self):
        self.block, self.times = HeapMemory(kit.SIZE).array, 0

    def arrived(self):
        raise AssertionError("a block of Ray's is lent, not received")

    def came(self, block):
        assert not block.flags.writeable
        self.block[:] = block
        self.times += 1


@pytest.fixture
def link_to(cluster):
    links = []

    def make(function, **options):
        class Runs(Host):
            def run(self, job):
                unpack(job)(self._entered())

        kind = cluster.remote(max_concurrency=8, num_cpus=1, **options)(Runs)
        door = Door()
        actor = kind.remote(sys.path, door.name)
        link = RayLink(actor, pack(function, "it"), lambda: "no place", lambda: None, door)
        links.append(link)
        link.ask("first")  # the link expects a first word of every worker
        assert link.receive() is not None
        assert link.near == (door.name is not None)
        return link

    yield make
    for link in links:
        link.kill()
        link.close(5.0)
        assert not cluster.is_initialized() or link.pid is None or gone(link.pid)


def gone(pid):
    return comes_true(lambda: not os.path.exists(f"/proc/{pid}"), 30.0)


def ready(link, seconds):
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def echo(port):
    port.send("hello")
    kit.echo(port)


def fill(port):
    port.send("hello")
    port.receive()
    port.send("first")
    kit.fill(port)


def take(port):
    port.send("hello")
    kit.take(port)


def work(port):
    port.send("hello")
    port.receive()
    port.send("first")
    while True:
        message, _ = port.receive()
        while not port.interrupted():
            time.sleep(0.001)
        port.send(("interrupted", message))


@pytest.mark.usefixtures("anywhere")
def test_messages_of_any_size_in_order_and_one_answer_for_each(link_to):
    link = link_to(echo)
    assert link.receive() == "first"
    sent = [number if number % 7 else b"x" * number * 10_000 for number in range(60)]
    for start in range(0, 60, 3):
        for message in sent[start : start + 3]:
            link.ask(message)
        assert [link.receive() for _ in range(3)] == sent[start : start + 3]
    assert not link.waits()
    assert not ready(link, 0.05)


def test_what_it_says_while_it_is_let_in_is_heard(link_to, monkeypatch):
    """It may speak as soon as it has a connection, before this side knows that it has."""
    let_in = RayLink._let_in

    def slowly(link):
        wire = let_in(link)
        time.sleep(0.3)
        return wire

    monkeypatch.setattr(RayLink, "_let_in", slowly)
    assert link_to(echo).receive() == "first"


@pytest.mark.usefixtures("anywhere")
def test_what_it_says_before_it_ends_is_heard_however_soon_that_is(cluster, monkeypatch):
    """Ray may tell of the end before it tells where the actor is."""

    def in_another_order(call, then):
        def later(*what):
            delay = 1.0 if then.__name__ == "_placed" else 0.0
            threading.Timer(delay, then, what).start()

        calls.when_done(call, later)

    monkeypatch.setattr(module, "when_done", in_another_order)
    door = Door()
    actor = cluster.remote(max_concurrency=8)(Host).remote(sys.path, door.name)
    job = pack("no job at all", "it")
    link = RayLink(actor, job, lambda: "no place", lambda: None, door)
    assert ready(link, 30)
    assert isinstance(link.receive(), Failed)
    with pytest.raises(EOFError):
        link.receive()
    assert link.ended() == "has ended."
    link.kill()
    link.close(5.0)


def test_an_end_is_bounded_whoever_waits_for_the_worker_to_read(link_to):
    def deaf(port):
        port.send("hello")
        while not port.interrupted():
            time.sleep(0.01)
        time.sleep(60)

    def speak():
        with contextlib.suppress(EOFError):
            while True:
                link.send(b"x" * 100_000)

    link = link_to(deaf)
    speaker = threading.Thread(target=speak)
    speaker.start()
    time.sleep(0.5)
    link.interrupt()
    link.send_last("stop")
    link.close(0.5)
    speaker.join(30)
    assert not speaker.is_alive()
    assert gone(link.pid)


@pytest.mark.usefixtures("far")
def test_blocks_are_there_when_their_message_is(link_to):
    link, held = link_to(fill), [Held(), Held()]
    assert link.receive() == "first"
    for _ in held:
        link.send("memory", [kit.SIZE])
    for number in (0, 1):  # ordered ahead: it fills one while the other travels
        link.ask((number, 100 + number), (), held[number])
    for value in range(100, 130):
        number = value % 2
        assert link.receive() == ("filled", value)
        assert held[number].block.min() == held[number].block.max() == value
        if value < 128:
            link.ask((number, value + 2), (), held[number])
    assert [one.times for one in held] == [15, 15]


@pytest.mark.usefixtures("anywhere")
def test_an_interrupt_reaches_a_worker_at_work_and_can_be_taken_back(link_to):
    link = link_to(work)
    assert link.receive() == "first"
    for number in range(3):
        link.interrupt(False)
        link.ask(number)
        assert not ready(link, 0.1)
        link.interrupt()
        assert link.receive() == ("interrupted", number)


@pytest.mark.usefixtures("far")
def test_the_newest_block_arrives_whole_and_with_what_is_asked_next(link_to, cluster):
    link, pushed = link_to(take), []
    assert link.receive() == []
    for version in range(20):
        block = kit.block_of(version)
        link.push(version, cluster.put(block) if version % 2 else block)
        if version % 4 == 0:
            pushed.append((version, int(block[0])))  # the others are old when it is asked
            link.ask("which?")
            assert link.receive() == pushed


@pytest.mark.usefixtures("far")
def test_blocks_reach_a_worker_at_work_the_newest_last(link_to):
    def until_the_last(port):
        seen, last = [], threading.Event()

        def on_push(version, block):
            assert block.min() == block.max() == version % 251
            seen.append(version)
            if version == 99:
                last.set()

        port.on_push = on_push
        port.send("hello")
        port.send(port.receive()[0])
        port.receive()
        last.wait()
        port.send(seen)

    link = link_to(until_the_last)
    assert link.receive() == "first"
    link.ask("work")
    for version in range(100):
        link.push(version, kit.block_of(version))
    seen = link.receive()
    assert seen == sorted(set(seen))
    assert seen[-1] == 99


@pytest.mark.usefixtures("far")
def test_where_orders_are_near_blocks_go_with_them_and_cost_no_call(link_to, monkeypatch):
    def tell_the_newest(port):
        newest = []
        port.on_push = lambda version, block: newest.append(version)
        port.send("hello")
        while True:
            port.receive()
            port.send(newest[-1:])

    class Counted:
        def __init__(self, actor):
            self.actor, self.names = actor, []

        def __getattr__(self, name):
            self.names.append(name)
            return getattr(self.actor, name)

    link = link_to(tell_the_newest)
    assert link.receive() == []
    monkeypatch.setattr(calls, "_NEAR", 1000.0)
    counted = link._talk._actor = Counted(link._actor)
    for _ in range(2):
        link.ask("roll", (), Held())
    told = []
    for version in range(30):
        told.append(link.receive())
        link.push(version, kit.block_of(version))
        link.ask("roll", (), Held())
    told += [link.receive(), link.receive()]
    link._talk._actor = counted.actor
    assert counted.names.count("push") <= 1  # before it was known how near they are
    assert all(newest[0] >= version for version, newest in enumerate(told[2:]))


@pytest.mark.usefixtures("anywhere")
def test_the_death_of_a_worker_is_noticed_at_once_and_told(link_to):
    link = link_to(echo)
    assert link.receive() == "first"
    os.kill(link.pid, signal.SIGKILL)
    assert ready(link, 30)
    for _ in range(3):
        with pytest.raises(EOFError):
            link.receive()
    assert "crashed or was killed" in link.ended()
    for call in (link.send, link.ask):
        with pytest.raises(EOFError):
            call("still there?")
    if not link.near:
        with pytest.raises(EOFError):
            link.push(0, kit.block_of(0))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("body", [echo, kit.ignore])
def test_shutdown_is_bounded_whatever_the_worker_does(link_to, body):
    def hello_then(port):
        if body is kit.ignore:
            port.send("hello")
            port.receive()
            port.send("first")
        body(port)

    link = link_to(hello_then)
    assert link.receive() == "first"
    link.interrupt()
    link.send("stop")
    link.close(0.5)
    assert gone(link.pid)
    link.close()


def test_an_actor_without_a_place_says_so(link_to, cluster):
    kind = cluster.remote(resources={"unicorn": 1})(Host)
    link = RayLink(kind.remote(), b"", lambda: "has no place", lambda: None, Door())
    assert not ready(link, 0.2)
    assert (link.pid, link.host, link.ended()) == (None, None, "has no place")
    link.kill()
    assert link._ended.wait(30)
    assert link.ended() == "has no place"  # not: was killed, which we did since it had none
    link.close(5.0)
