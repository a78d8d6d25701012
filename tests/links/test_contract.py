"""What every link keeps: order, nothing lost or twice, deaths noticed, a bounded end."""

from __future__ import annotations

import os
import select
import signal
import time

import contract_kit as kit
import pytest

each = pytest.mark.parametrize("kind", kit.KINDS)
remote = pytest.mark.parametrize("kind", [one for one in kit.KINDS if one != "process"])


@pytest.fixture(autouse=True, scope="module")
def torch_keeps_its_last_rpc_agent():
    """It frees most of what one had when the next one starts; that counts as no leak."""
    for _ in range(2 if "rpc" in kit.KINDS else 0):
        with kit.Pair("rpc", kit.echo) as pair:
            pair.link.send(1)
            assert pair.link.receive() == 1


def ready(link, seconds):
    """Wait for a descriptor of the link; False if nothing happens."""
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    if link.sentinel is not None:
        poller.register(link.sentinel, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def ends(calls):
    """Make calls until the link says that it has ended."""
    try:
        for call, *arguments in calls:
            call(*arguments)
    except EOFError:
        return True
    return False


def end_of(link):
    """Read until the link says that it has ended."""
    return ends((link.receive,) for _ in range(10_000))


@each
def test_messages_of_any_size_come_back_whole_and_in_order(kind):
    with kit.Pair(kind, kit.echo) as pair:
        sent = [number if number % 7 else b"x" * number * 1000 for number in range(300)]
        for message in sent:
            pair.link.send(message)
            assert pair.link.receive() == message
        assert not pair.link.waits()


@each
def test_many_messages_wait_in_order_none_lost_none_twice(kind):
    with kit.Pair(kind, kit.talk) as pair:
        pair.link.send(20_000)
        assert ready(pair.link, 20)
        assert [pair.link.receive() for _ in range(20_000)] == list(range(20_000))
        assert not ready(pair.link, 0.05)


@each
def test_a_worker_that_is_not_read_waits_and_loses_nothing(kind):
    with kit.Pair(kind, kit.talk) as pair:
        pair.link.send(100_000)  # more than any socket holds
        time.sleep(0.5)
        assert [pair.link.receive() for _ in range(100_000)][-1] == 99_999


@each
def test_blocks_are_there_when_their_message_is(kind):
    with kit.Pair(kind, kit.fill) as pair:
        for _ in range(2):
            pair.give_memory()
        pair.ask((0, 100), 0)
        pair.ask((1, 101), 1)  # ordered ahead: it fills one while the other travels
        for value in range(100, 160):
            number = value % 2
            assert pair.link.receive() == ("filled", value)
            block = pair.held[number].block
            assert block.min() == block.max() == value
            if value < 158:
                pair.ask((number, value + 2), number)
        if not pair.link.shares_memory:
            assert [held.times for held in pair.held] == [30, 30]


@each
def test_an_interrupt_reaches_a_worker_at_work_and_can_be_taken_back(kind):
    with kit.Pair(kind, kit.work) as pair:
        for number in range(3):
            pair.link.interrupt(False)
            pair.link.send(number)
            assert pair.link.receive() == "began"
            assert not ready(pair.link, 0.05)
            pair.link.interrupt()
            assert pair.link.receive() == ("interrupted", number)


@remote
def test_pushed_blocks_arrive_whole_in_order_and_before_what_is_sent_later(kind):
    with kit.Pair(kind, kit.take) as pair:
        pair.link.send("are you there?")  # it can take what is pushed from now on
        pushed = pair.link.receive()
        for version in range(40):
            block = kit.block_of(version)
            pair.link.push(version, block)
            pushed.append((version, int(block[0])))
            if version % 5 == 0:
                pair.link.send("how many?")
                assert pair.link.receive() == pushed


@each
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_a_worker_is_noticed_at_once_and_told(kind, how):
    with kit.Pair(kind, kit.echo) as pair:
        pair.link.send("you?")
        pair.link.receive()
        os.kill(pair.link.pid, how)
        assert ready(pair.link, 20)
        assert end_of(pair.link)
        told = "closed its connection" if kind == "mpi" else how.name  # only mpirun knows more
        assert told in pair.link.ended()
        assert ends((pair.link.send, "still there?") for _ in range(100_000))


@each
@pytest.mark.parametrize("how", ["SIGKILL", "exit code 5"])
def test_a_worker_that_dies_with_half_a_block_under_way(kind, how):
    """MPI itself notices who is killed, but not who ends with an exit code other than 0."""
    with kit.Pair(kind, kit.fill_half_and_die) as pair:
        pair.give_memory()
        pair.ask(how, 0)
        assert ready(pair.link, 20)
        assert end_of(pair.link)
        assert ("was lost: " if kind == "mpi" else how) in pair.link.ended()
        assert pair.held[0].times == 0


@remote
def test_pushing_to_a_worker_that_dies_ends_too(kind):
    with kit.Pair(kind, kit.take) as pair:
        pair.link.push(0, kit.block_of(0))
        os.kill(pair.link.pid, signal.SIGKILL)
        assert ends((pair.link.push, version, kit.block_of(version)) for version in range(1, 1000))


@each
@pytest.mark.parametrize("body", [kit.echo, kit.work, kit.ignore, kit.take])
def test_shutdown_is_bounded_whatever_the_worker_does(kind, body):
    with kit.Pair(kind, body) as pair:
        pair.link.interrupt()
        pair.link.send("stop")
        pair.link.close(0.5)
        if kind == "mpi":  # a rank goes on, for the next collector
            assert pair.then() == ("dead" if body is kit.ignore else "free")
        else:
            assert not os.path.exists(f"/proc/{pair.link.pid}")


@each
def test_a_worker_ends_when_its_other_end_is_gone(kind):
    for body in (kit.echo, kit.work, kit.ignore):
        pair = kit.Pair(kind, body)
        pair.link.send(1)
        if body is not kit.ignore:
            pair.link.receive()
        channel = pair.link._process.channel if kind == "process" else pair.link._channel
        channel.end()  # as the kernel does when this process is killed
        if kind == "mpi":
            assert pair.then() == ("dead" if body is kit.ignore else "free")
        elif kind != "process" or body is kit.echo:  # there the kernel kills a worker at work
            assert pair.link._process.exit_code(20) is not None
        pair.__exit__()


@each
def test_a_last_message_arrives_and_of_one_that_is_gone_it_is_known(kind):
    with kit.Pair(kind, kit.echo) as pair:
        pair.link.send_last("the last")
        assert pair.link.receive() == "the last"
        pair.link.kill()
        assert ready(pair.link, 20)
        assert end_of(pair.link)
        assert ends((pair.link.send_last, "still there?") for _ in range(1000))
