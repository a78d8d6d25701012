"""Ctrl-C is held back, never lost, and its handler is what it was."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

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
