"""Ctrl-C is held back, never lost, and its handler is what it was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading

import pytest
from strike_kit import Strikes

from swath import shield as shield_module
from swath.shield import Shield


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def same_handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with Shield():
            ctrl_c()
            done.append("all of it")
    assert done == ["all of it"]


def test_an_interrupt_comes_when_something_is_waited_for():
    shield, done = Shield(), []
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        ctrl_c()
        done.append("before")
        with shield.lifted():
            done.append("never")
    assert done == ["before"]
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        with shield.lifted():
            ctrl_c()
            done.append("never")
    assert done == ["before"]


def test_after_a_wait_it_is_held_back_again():
    shield, done = Shield(), []
    with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
        with shield.lifted():
            pass
        ctrl_c()
        done.append("after")
    assert done == ["after"]


def test_one_in_another_and_used_again():
    shield, done = Shield(), []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), shield:  # noqa: PT012
            with shield:
                ctrl_c()
            done.append("outer")
    assert done == ["outer"] * 2
    with shield, shield.lifted():
        pass
    with shield.lifted():
        pass


def test_the_users_own_handler_is_called_once_and_stays():
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with Shield():
            ctrl_c()
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Shield():
            ctrl_c()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_an_exception_goes_through():
    with pytest.raises(KeyError), Shield():
        raise KeyError


def test_in_another_thread_it_does_nothing():
    shield, seen = Shield(), []

    def use():
        with shield, shield.lifted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def interrupted_before_a_wait(shield):
    with shield:
        signal.raise_signal(signal.SIGINT)  # noted
        with shield.lifted():  # passed on here, before the block begins
            raise AssertionError


def test_an_interrupt_just_before_a_wait_leaves_nothing_behind():
    own = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted_before_a_wait(Shield())
    gc.collect()
    assert signal.getsignal(signal.SIGINT) is own


class Books:
    """Bookkeeping that would be wrong if a signal came in the middle of it."""

    def __init__(self):
        self.shield, self.other = Shield(), Shield()
        self.entries, self.sums, self.at_work, self.noticed = [], [], 0, []

    def write(self, what):
        self.at_work += 1
        self.entries.append(what)
        self.sums.append(len(self.entries))
        self.at_work -= 1

    def keep(self):
        with self.shield:
            self.write("begun")
            try:
                with self.shield.lifted():
                    self.wait()
            except KeyboardInterrupt:
                self.write("broken")
                self.write("kept")
                raise
            with self.shield, self.other:
                self.write("inner")
                with self.other.lifted():  # the outer one is up
                    self.write("and more")
            self.write("done")
            with contextlib.suppress(KeyboardInterrupt), self.shield.lifted():
                self.wait()
            self.write("over")

    def wait(self):
        self.noticed.append(len(self.entries))

    def handler(self, *signal_and_frame):
        assert not self.at_work
        self.noticed.append("signal")
        if self.raises:
            raise KeyboardInterrupt

    def struck(self, at, raises):
        """Keep the books once with signals there; return how many places there were."""
        self.raises = raises
        strikes = Strikes(lambda path: path in (__file__, shield_module.__file__), at)
        with contextlib.suppress(KeyboardInterrupt), strikes:
            try:
                self.keep()
            finally:
                assert signal.getsignal(signal.SIGINT) == self.handler
        sys.setprofile(None)
        return strikes.places

    def check(self, at, told):
        assert self.sums == list(range(1, len(self.entries) + 1)), at
        assert told[0] <= self.noticed.count("signal") <= told[1], at
        assert signal.getsignal(signal.SIGINT) == self.handler
        before = self.noticed.count("signal")
        with contextlib.suppress(KeyboardInterrupt):
            self.keep()  # nothing is left over of it, and it can be interrupted as before
        assert self.noticed.count("signal") == before, at
        self.raises = True
        with pytest.raises(KeyboardInterrupt), self.shield, self.shield.lifted():
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def own_handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("apart", [None, *range(1, 25)])
def test_signals_anywhere_find_no_bookkeeping_and_arrive_once(own_handler, raises, apart):
    for first in itertools.count(1):
        at = [first] if apart is None else [first, first + apart]
        books = Books()
        signal.signal(signal.SIGINT, books.handler)
        if books.struck(at, raises) < first:
            break
        books.check(at, (1, len(at)))  # the second may be merged with the first
    assert first > 50


def test_a_handler_that_is_put_in_place_where_it_is_lifted_is_the_users(own_handler):
    calls, shield = [], Shield()

    def second(*signal_and_frame):
        calls.append("second")

    def first(*signal_and_frame):
        calls.append("first")
        signal.signal(signal.SIGINT, second)

    signal.signal(signal.SIGINT, first)
    with shield:
        with shield.lifted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert calls == ["first", "second"]
    assert calls == ["first", "second", "second"]
    assert signal.getsignal(signal.SIGINT) is second
    with shield, shield.lifted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_what_was_found_where_it_is_lifted_can_be_put_back_later(own_handler):
    calls, shield = [], Shield()
    signal.signal(signal.SIGINT, lambda *signal_and_frame: calls.append("own"))
    with shield, shield.lifted():
        found = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, found)
    signal.raise_signal(signal.SIGINT)
    with shield:
        signal.raise_signal(signal.SIGINT)
        assert calls == ["own"]
        with shield.lifted():
            assert calls == ["own"] * 2
    assert calls == ["own"] * 2
