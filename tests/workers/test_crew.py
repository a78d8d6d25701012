"""A crew: real workers, started, listened to and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import multi_kit as kit
import pytest

from swath.errors import ClosedError
from swath.links import pack
from swath.links.launch import ending
from swath.memory import Layout, SharedMemory, Slab
from swath.rollout import Plan
from swath.shield import Shield
from swath.testing import CountingEnv, SlowEnv
from swath.workers import launchers, place
from swath.workers.crew import Crew
from swath.workers.messages import (
    Acknowledge,
    Attach,
    Begin,
    Built,
    Call,
    Collect,
    Detach,
    Died,
    Done,
    Failed,
    Job,
    Ready,
    Reset,
    Rolled,
    SetSeed,
    State,
    TakeState,
)
from swath.workers.remote import Invitation


def job(number, maker=CountingEnv):
    nothing = pack(None, "nothing")
    return Job(
        number,
        envs=pack(maker, "envs"),
        copies_envs=False,
        env_kwargs=nothing,
        policy=nothing,
        init_fn=nothing,
        registered=nothing,
        makes_policy=False,
        num_threads=1,
        quiet=True,
        refreshes=False,
    )


class Started:
    """A crew whose workers are ready and have one slab each."""

    def __init__(self, *makers, timeout=None, steps=10):
        self.crew = Crew([job(*pair) for pair in enumerate(makers)], timeout)
        numbers = range(len(makers))
        try:
            self.crew.launch(numbers)
            self.built = self.crew.answers(numbers)
            self.ready = self.crew.call({n: Begin(Plan(steps=steps, worker=n)) for n in numbers})
            for number, ready in self.ready.items():
                layout = Layout(ready.fields, steps, 1)
                slab = Slab(layout, SharedMemory(layout.nbytes))
                message = Attach(0, layout, 0, 1)
                self.crew.tell(number, message, [slab.memory])
        except BaseException:
            self.crew.close(0.0)
            raise

    def __enter__(self):
        return self.crew

    def __exit__(self, *_):
        self.crew.close(2.0)


def test_a_worker_that_stops_in_the_middle_of_a_message_does_not_hold_up_the_end():
    with Started(CountingEnv) as crew:
        crew.order(0, Call(pack(lambda about: bytes(50_000_000), "it")))
        link = crew.links[0]
        while not link.waits():
            time.sleep(0.001)
        os.kill(link.pid, signal.SIGSTOP)

        def listen():
            with contextlib.suppress(ClosedError):
                crew.next()

        listener = threading.Thread(target=listen)
        listener.start()
        while link.waits():  # until it has read what there is of it
            time.sleep(0.001)
        crew.close(0.1)
        listener.join()
        assert kit.gone([link.pid])


@pytest.mark.timeout(60)
def test_a_worker_that_stops_in_the_middle_of_a_message_is_late():
    with Started(CountingEnv, CountingEnv, timeout=4.0) as crew:
        link = crew.links[0]
        crew.order(0, Call(pack(lambda about: bytes(50_000_000), "it")))
        while not link.waits():
            time.sleep(0.001)
        os.kill(link.pid, signal.SIGSTOP)
        assert crew.next() == (0, Died(link.name, ending(-signal.SIGKILL), 4.0))
        assert kit.gone([link.pid])
        assert crew.call({1: Reset()}) == {1: Done()}


@pytest.mark.timeout(60)
def test_a_worker_that_stops_reading_its_messages_is_late():
    with Started(CountingEnv, CountingEnv, timeout=4.0) as crew:
        link = crew.links[0]
        os.kill(link.pid, signal.SIGSTOP)
        crew.tell(0, Call(bytes(50_000_000)))  # more than a socket holds
        assert crew.next() == (0, Died(link.name, ending(-signal.SIGKILL), 4.0))
        crew.tell(0, Reset())
        assert kit.gone([link.pid])
        assert crew.call({1: Reset()}) == {1: Done()}


def test_workers_answer_what_they_are_asked():
    started = Started(CountingEnv, CountingEnv)
    with started as crew:
        assert started.built == {0: Built(1), 1: Built(1)}
        assert all(isinstance(one, Ready) for one in started.ready.values())
        assert len(crew) == len(crew.links) == 2
        assert crew.call({0: SetSeed(3), 1: Reset()}) == {0: Done(), 1: Done()}
        assert isinstance(crew.call({1: TakeState()})[1], State)


def test_reports_of_rollouts_wait_while_something_else_is_answered():
    with Started(CountingEnv, CountingEnv) as crew:
        crew.order(0, Collect(0, 10))
        crew.order(1, Collect(0, 4))
        crew.order(0, Collect(0, 3))
        answers = crew.call({0: Acknowledge(), 1: Acknowledge()})
        assert answers == {0: Done(), 1: Done()}
        reports = [crew.next() for _ in range(3)]
        assert sorted((number, one.steps) for number, one in reports) == [(0, 3), (0, 10), (1, 4)]
        assert [one.steps for number, one in reports if number == 0] == [10, 3]


def interrupted(made, plain):
    """Return what launches as this does, and Ctrl-C comes when nobody has what was launched yet."""

    def launch(*given):
        one = plain(*given)
        made.append(one.pid)
        signal.raise_signal(signal.SIGINT)
        return one

    return launch


def test_ctrl_c_between_two_launches_leaves_no_worker(monkeypatch):
    pids = []
    monkeypatch.setattr(place, "ProcessLink", interrupted(pids, place.ProcessLink))
    crew = Crew([job(0), job(1)], None)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            crew.launch([0, 1])
        assert len(pids) == 1
        assert kit.gone(pids, 5)
        assert caught.tb is not None  # which would hold a link that is in no list
    finally:
        crew.close(0.0)


def test_ctrl_c_between_two_launches_leaves_no_process_that_was_to_dial(monkeypatch):
    pids, shield = [], Shield()
    where = Invitation("127.0.0.1", 1, b"s3", 60.0)  # nobody is there: they try for a minute
    monkeypatch.setattr(launchers, "launch", interrupted(pids, launchers.launch))
    with pytest.raises(KeyboardInterrupt) as caught, shield:
        launchers.LocalLauncher().start(where, [0, 1], shield)
    assert len(pids) == 1
    assert kit.gone(pids, 5)
    assert caught.tb is not None


def test_an_interrupted_rollout_ends_after_a_step():
    with Started(lambda: SlowEnv(0.01), steps=1000) as crew:
        crew.order(0, Collect(0, 1000))
        time.sleep(0.05)
        crew.interrupt(0)
        _, report = crew.next()
        assert isinstance(report, Rolled)
        assert 1 <= report.steps < 1000
        crew.interrupt(0, False)
        crew.order(0, Collect(0, 5))
        assert crew.next()[1].steps == 5


def test_a_slab_that_a_worker_does_not_have():
    with Started(CountingEnv) as crew:
        crew.tell(0, Detach(5))  # of another worker: nothing
        crew.order(0, Collect(5, 5))
        number, report = crew.next()
        assert number == 0
        assert isinstance(report, Failed)
        crew.order(0, Collect(0, 5))
        assert crew.next()[1].steps == 5


def test_a_death_is_the_answer_at_once_and_ever_after():
    with Started(CountingEnv, CountingEnv) as crew:
        victim = crew.links[1].pid
        os.kill(victim, signal.SIGKILL)
        expected = Died(f"process {victim}", ending(-signal.SIGKILL))
        assert crew.call({0: Reset(), 1: Reset()}) == {0: Done(), 1: expected}
        assert crew.call({1: Reset(), 0: Reset()}) == {0: Done(), 1: expected}
        crew.order(1, Collect(0, 5))
        assert crew.next() == (1, expected)
        crew.tell(1, Detach(3))
        crew.interrupt(1)
        assert list(crew.links) == [0]
        crew.launch([1])
        assert crew.answers([1]) == {1: Built(1)}


def test_a_dismissed_worker_is_forgotten():
    with Started(CountingEnv, CountingEnv) as crew:
        for number in (0, 1):
            crew.order(number, Collect(0, 5))
        crew.call({1: Acknowledge()})
        crew.dismiss(1)
        assert crew.next()[0] == 0
        assert list(crew.links) == [0]
        crew.dismiss(1)


def test_who_is_late_is_killed_and_others_are_not():
    with Started(CountingEnv, lambda: SlowEnv(0.02), timeout=2.0, steps=1000) as crew:
        crew.order(0, Collect(0, 100))
        crew.order(1, Collect(0, 1000))
        first, second = crew.next(), crew.next()
        assert first[0] == 0
        assert isinstance(first[1], Rolled)
        assert second[0] == 1
        assert isinstance(second[1], Died)
        assert second[1].late == 2.0
        assert crew.call({0: Reset()}) == {0: Done()}


def test_an_answer_that_waits_to_be_read_is_not_late():
    with Started(CountingEnv, timeout=2.0) as crew:
        crew.order(0, Collect(0, 5))
        crew.order(0, Collect(0, 6))
        time.sleep(2.2)
        assert [crew.next()[1].steps for _ in range(2)] == [5, 6]
        time.sleep(2.2)  # owes nothing
        assert crew.call({0: Reset()}) == {0: Done()}


def test_each_answer_has_the_whole_time():
    with Started(lambda: SlowEnv(0.02), timeout=2.0, steps=20) as crew:
        for _ in range(10):  # a quarter of a second each
            crew.order(0, Collect(0, 12))
        assert [crew.next()[1].steps for _ in range(10)] == [12] * 10


def test_answers_that_nobody_waits_for_any_more_are_not_taken_for_others(tmp_path):
    gate = tmp_path / "gate"
    with Started(lambda: kit.Uneven(str(gate)), CountingEnv, steps=20) as crew:
        gate.touch()  # its rollout lasts until this is gone
        crew.order(0, Collect(0, 20))
        ctrl_c = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            ctrl_c.start()
            crew.call({0: Acknowledge(), 1: Acknowledge()})
        ctrl_c.join()
        gate.unlink()
        answers = crew.call({0: TakeState(), 1: TakeState()})
        assert all(isinstance(one, State) for one in answers.values())
        assert crew.next()[1].steps == 20


def test_closing_wakes_who_listens_and_is_done_once():
    started = Started(lambda: SlowEnv(0.01), steps=1000)
    crew = started.crew
    pids = [link.pid for link in crew.links.values()]
    crew.order(0, Collect(0, 1000))
    closers = [threading.Timer(0.1, crew.close, (600.0,)) for _ in range(3)]
    for closer in closers:
        closer.start()
    with pytest.raises(ClosedError):
        crew.next()
    for closer in closers:
        closer.join()
    crew.close(600.0)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    for ask in (crew.next, lambda: crew.call({0: Reset()}), lambda: crew.launch([0])):
        with pytest.raises(ClosedError):
            ask()
    crew.tell(0, Reset())
    assert crew.links == {}
