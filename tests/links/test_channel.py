"""Messages, open files, and the end of the other side."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import numpy as np
import pytest
from sealed_kit import sealed_pair

from swath.links import channel
from swath.links.channel import Channel, StalledError, close_all

UNIX_ONLY = ("files", "only_a_part", "wait_for_the_end", "its_reader_has_ended")
"""Parts of the names of tests of what TCP connections with TLS do not have, or learn later."""


@pytest.fixture(params=["plain", "sealed"])
def ends(request):
    if request.param == "plain":
        ours, theirs = Channel.pair()
        other = Channel(theirs)
    elif any(part in request.node.name for part in UNIX_ONLY):
        pytest.skip("of sockets without TLS")
    else:
        ours, other = sealed_pair()
    yield ours, other
    ours.close()
    other.close()


def test_messages_arrive_in_order_both_ways(ends):
    one, other = ends
    for number in range(100):
        one.send({"number": number, "array": np.arange(number)})
        other.send(("back", number))
    for number in range(100):
        message, descriptors = other.receive()
        assert message["number"] == len(message["array"]) == number
        assert descriptors == []
        assert one.receive() == (("back", number), [])


def test_who_takes_nothing_of_a_message_for_too_long_is_given_up(ends):
    one, other = ends
    one.limit(0.05)
    with pytest.raises(StalledError):
        one.send(bytes(50_000_000))
    with pytest.raises(EOFError):  # the rest of it does not come any more
        other.receive()
    with pytest.raises(StalledError):
        one.receive()


def test_who_gives_only_a_part_of_a_message_for_too_long_is_given_up(ends):
    one, other = ends
    one.limit(0.05)
    other._socket.sendall(b"\x10\0\0\0\0\0\0\0 and no more"[:12])
    with pytest.raises(StalledError):
        one.receive()
    with pytest.raises(StalledError):
        one.send("anything")


def test_who_takes_a_large_message_piece_by_piece_is_not_given_up(ends):
    one, other = ends
    one.limit(0.5)
    other.limit(None)
    reader = threading.Thread(target=lambda: got.append(other.receive()[0]))
    got: list[bytes] = []
    reader.start()
    one.send(bytes(20_000_000))
    reader.join()
    assert len(got[0]) == 20_000_000


class Through:
    """A socket whose first call of `sendmsg` is another."""

    def __init__(self, end, send):
        self.end, self.sendmsg = end, send

    def __getattr__(self, name):
        return getattr(self.end, name)


def test_a_message_that_was_read_is_sent_though_its_reader_has_ended_since(ends):
    one, other = ends
    plain = one._socket

    def send(*arguments):
        sent = plain.sendmsg(*arguments)
        assert other.receive() == ("end", [])
        other.close()
        return sent

    one._socket = Through(plain, send)
    one.send("end")
    one._socket = plain
    with pytest.raises(EOFError):
        one.send("still there?")


@pytest.mark.parametrize("sent", [1, 7, 8, 9, 100])
def test_a_message_of_which_only_a_part_goes_at_first(ends, sent):
    one, other = ends
    plain, body = one._socket, os.urandom(500)
    one._socket = Through(plain, lambda parts, _: plain.send(b"".join(parts)[:sent]))
    one.send(body)
    one._socket = plain
    one.send("next")
    assert other.receive() == (body, [])
    assert other.receive() == ("next", [])


def test_the_end_is_seen_behind_messages_that_wait(ends):
    one, other = ends
    one.send("last words")
    assert not other.ended()
    one.close()
    assert other.ended()
    assert other.receive() == ("last words", [])


@pytest.mark.parametrize("size", [0, 1, 10_000, 5_000_000])
def test_messages_of_any_size_with_files_beside_them(ends, size):
    one, other = ends
    body = os.urandom(size)
    pipes = [os.pipe() for _ in range(3)]
    sender = threading.Thread(target=one.send, args=(body, [pipe[1] for pipe in pipes]))
    sender.start()
    message, descriptors = other.receive()
    sender.join()
    assert message == body
    assert len(descriptors) == 3
    for number, (descriptor, pipe) in enumerate(zip(descriptors, pipes, strict=True)):
        os.write(descriptor, bytes([number]))
        assert os.read(pipe[0], 1) == bytes([number])
        close_all([descriptor, *pipe])


def test_files_stay_with_their_message(ends):
    one, other = ends
    pipe = os.pipe()
    one.send("without")
    one.send("with", [pipe[1]])
    one.send("without")
    received = [other.receive()[1] for _ in range(3)]
    close_all([*pipe, *received[1]])
    assert [len(files) for files in received] == [0, 1, 0]


def test_the_end_of_the_other_side_is_an_eof_error(ends):
    one, other = ends
    one.send("last words")
    one.close()
    assert other.receive() == ("last words", [])
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(EOFError):
        other.send("anyone?")


def test_an_end_that_did_not_read_all_is_an_eof_error_too(ends):
    one, other = ends
    one.send("unread")
    other.close()
    with pytest.raises(EOFError):
        one.receive()


def test_the_end_in_the_middle_of_a_message_is_an_eof_error(ends):
    one, other = ends
    sender = threading.Thread(target=send_until_gone, args=(one, os.urandom(5_000_000)))
    sender.start()
    other._socket.recv(1000)
    other.close()
    sender.join(10)
    assert not sender.is_alive()
    ours, theirs = Channel.pair()
    theirs.sendall(b"\x40\0\0\0\0\0\0\0half")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def send_until_gone(channel, body):
    with pytest.raises(EOFError):
        channel.send(body)


def test_closing_twice_is_nothing_and_sending_then_is_an_eof_error(ends):
    ends[0].close()
    ends[0].close()
    with pytest.raises(EOFError):
        ends[0].send("too late")


@pytest.mark.parametrize("size", [999, 1000, 1001, 1_000_000])
def test_memory_is_made_for_what_comes_and_not_for_what_is_claimed(ends, size, monkeypatch):
    monkeypatch.setattr(channel, "_AT_ONCE", 1000)
    one, other = ends
    body = os.urandom(size)
    sender = threading.Thread(target=lambda: [one.send(body), one.send("next")])
    sender.start()
    assert other.receive() == (body, [])
    assert other.receive() == ("next", [])
    sender.join()


@pytest.mark.parametrize("length", [1 << 39, 1 << 41, (1 << 64) - 1])
def test_a_length_that_nobody_keeps_is_the_end_of_the_other_side(length):
    ours, theirs = Channel.pair()
    theirs.sendall(length.to_bytes(8, "little") + b"half")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_the_wait_for_the_end_is_bounded_whatever_the_other_side_says(ends):
    one, other = ends
    stop = threading.Event()

    def speak():
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError):
                other._socket.send(b"x", socket.MSG_DONTWAIT)

    speaker = threading.Thread(target=speak)
    speaker.start()
    assert not one.await_end(0.2)
    stop.set()
    speaker.join()
