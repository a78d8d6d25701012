"""Who waits for whom: never both sides, never for the dead, and as long as somebody else writes."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import replay_kit as kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import check, contents, numbered, process

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import PrioritizedSampler, ReplayBuffer, Sampler, SliceSampler, UniformSampler
from swath.data.pacing import Pace
from swath.data.storage import Word
from swath.envs import SerialEnv
from swath.errors import UsageError, WorkerError
from swath.testing import CountingEnv

AT_ONCE = 1e-9
"""A time limit with which a call does what it may do at once, or raises."""


def goes(call: Any, *arguments: Any) -> bool:
    """Tell whether a call did what it does, or waited for too long."""
    try:
        call(*arguments)
    except WorkerError:
        return False
    return True


# -- never both sides ------------------------------------------------------------------------------


class Written:
    """Steps of a few envs whose episodes are of one length, batch after batch."""

    def __init__(self, envs: int, steps: int, length: int) -> None:
        self.envs, self.steps, self.length, self.step = envs, steps, length, 0

    def next(self) -> Any:
        at = self.step + torch.arange(self.steps)
        self.step += self.steps
        ids = at // self.length * self.envs + torch.arange(self.envs)[:, None]
        batch = kit.trajectories([0] * self.envs, [0] * self.envs, self.steps, set())
        batch["collector", "traj_ids"] = ids
        batch["time"] = (at % self.length).expand(self.envs, -1).clone()
        done = (at % self.length == self.length - 1).expand(self.envs, -1)
        batch["next", "done"] = done[..., None].clone()
        return batch


SAMPLERS = st.one_of(
    st.builds(UniformSampler, replacement=st.booleans()),
    st.builds(PrioritizedSampler),
    st.sampled_from([1, 2, 4, 8]).map(lambda steps: SliceSampler(slice_len=steps)),
    st.integers(1, 4).map(lambda slices: SliceSampler(num_slices=slices)),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_of_a_writer_and_those_who_sample_somebody_may_always_go_on(data: Any) -> None:
    """Whatever the samplers, whatever each asks for, and even if each keeps a ratio of its own."""
    capacity = data.draw(st.integers(24, 200))
    frames = st.integers(1, 8)
    written = Written(data.draw(frames), data.draw(frames), data.draw(st.integers(1, 20)))

    def pace() -> dict[str, Any]:
        return {
            "min_size": data.draw(st.integers(1, capacity)),
            "samples_per_insert": data.draw(st.sampled_from([0.1, 1, 4, 30])),
            "tolerance": data.draw(st.sampled_from([0, 1, 20])),
            "timeout": AT_ONCE,
        }

    writer = ReplayBuffer(capacity, storage="shared", **pace())
    writer.prepare(written.next())
    readers = [
        (
            ReplayBuffer.attached(*writer.handle(), sampler=data.draw(SAMPLERS), seed=0, **pace()),
            24 * data.draw(st.integers(1, capacity // 24)),
        )
        for _ in range(2)
    ]
    for _ in range(25):
        what = data.draw(st.sampled_from(["write", "empty", 0, 1]))
        if what == "write":
            goes(lambda: writer.extend(written.next()))
        elif what == "empty":
            writer.empty()
        else:
            buffer, size = readers[what]
            if not goes(buffer.sample, size):
                writer.extend(written.next())


def test_a_writer_may_go_on_once_for_a_sampler_that_could_not_draw_and_is_gone() -> None:
    options: dict[str, Any] = {"samples_per_insert": 1, "tolerance": 0, "timeout": AT_ONCE}
    buffer = ReplayBuffer(100, **options, sampler=UniformSampler(replacement=False))
    buffer.extend(numbered(0, 10))
    assert not goes(buffer.extend, numbered(10, 10))
    assert not goes(buffer.sample, 15)
    assert goes(buffer.extend, numbered(10, 10))
    assert not goes(buffer.extend, numbered(20, 10))  # 15 could be drawn now
    assert goes(buffer.sample, 15)
    assert buffer.stats()["samples"] == 15


@given(
    written=st.integers(0, 1000),
    drawn=st.integers(0, 1000),
    held=st.integers(0, 100),
    ratio=st.none() | st.sampled_from([0.1, 1.0, 4.0]),
    tolerance=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_decisions_are_made_of_the_words_of_the_ledger_alone(
    written: int, drawn: int, held: int, ratio: float | None, tolerance: float
) -> None:
    pace = Pace(5, ratio, tolerance)
    words = [0] * 16
    words[Word.WRITTEN], words[Word.DRAWN], words[Word.HELD] = written, drawn, held
    assert pace.may_draw(words) or pace.may_write(words)
    pace.starve(words, written - 1)  # more was written meanwhile
    assert words[Word.STARVED] == 0
    pace.starve(words, written)
    assert pace.may_write(words)
    words[Word.WRITTEN] += 1
    if tolerance == 0 and ratio is not None:
        assert pace.may_draw(words) != pace.may_write(words)


class Scripted(Sampler):
    """Does in a draw what a test wants, and returns as many of the first frames, or None."""

    def __init__(self, script: Any) -> None:
        self.script, self.draws = script, 0

    def draw(self, ring: Any, shape: Any, rng: Any) -> Any:
        self.draws += 1
        return np.arange(*shape) if self.script() is not None else None

    def update(self, ring: Any, index: Any, priority: Any) -> None:
        pass


def test_without_tolerance_nothing_is_written_while_frames_are_drawn() -> None:
    sampler = Scripted(lambda: seen.append(goes(buffer.extend, numbered(8, 4))) or True)
    seen: list[bool] = []
    options: dict[str, Any] = {"samples_per_insert": 1, "tolerance": 0, "timeout": AT_ONCE}
    buffer = ReplayBuffer(100, sampler=sampler, **options)
    buffer.extend(numbered(0, 8))
    buffer.sample(8)
    assert seen == [False]
    assert goes(buffer.extend, numbered(8, 4))
    assert buffer.stats()["samples"] == 8


def test_a_draw_that_is_interrupted_counts_for_nothing() -> None:
    interrupts = iter([KeyboardInterrupt, None])

    def script() -> bool:
        if (error := next(interrupts)) is not None:
            raise error
        return True

    options: dict[str, Any] = {"samples_per_insert": 1, "tolerance": 0, "timeout": AT_ONCE}
    buffer = ReplayBuffer(100, sampler=Scripted(script), **options)
    buffer.extend(numbered(0, 8))
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(7)
    assert buffer.stats()["samples"] == 0
    buffer.sample(7)
    assert buffer.stats()["samples"] == 7


def test_a_draw_that_failed_is_tried_again_when_there_is_something_new_and_only_then() -> None:
    """So the random numbers that a wait uses up do not depend on how long it takes."""
    sampler = Scripted(lambda: None)
    buffer = ReplayBuffer(100, sampler=sampler, timeout=0.05)
    buffer.extend(numbered(0, 4))
    assert not goes(buffer.sample, 2)
    assert sampler.draws == 1

    def write_once() -> None:
        sampler.script = lambda: None
        buffer.extend(numbered(4, 4))  # in the middle of a draw that does not see it

    sampler.script = write_once
    assert not goes(buffer.sample, 2)
    assert sampler.draws == 3
    sampler.script = lambda: None

    def prioritize() -> None:
        sampler.script = lambda: True
        buffer.update_priority([0], 1.0)

    thread = threading.Timer(0.0, prioritize)
    patient = buffer._pace
    buffer._pace = Pace(timeout=20.0)
    thread.start()
    assert check(buffer.sample(2)).tolist() == [0, 1]
    thread.join()
    buffer._pace = patient


SLOW_TO_SERVE: list[tuple[int, int, dict[str, Any]]] = [
    (64, 64, {"sampler": SliceSampler(slice_len=16), "batch_size": 64}),
    (8, 8, {"sampler": SliceSampler(slice_len=10), "batch_size": 40, "tolerance": 64}),
    (1, 16, {"sampler": UniformSampler(replacement=False), "batch_size": 256, "tolerance": 0}),
]


@pytest.mark.parametrize(("envs", "frames", "options"), SLOW_TO_SERVE)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_collector_writes_on_until_a_sampler_has_what_it_needs(
    envs: int, frames: int, options: dict[str, Any], prefetch: int
) -> None:
    with (
        ReplayBuffer(
            10_000, samples_per_insert=4, timeout=30, prefetch=prefetch, **options
        ) as buffer,
        Collector(
            SerialEnv(envs, "CartPole-v1"), frames_per_batch=frames, replay_buffer=buffer, seed=0
        ) as collector,
    ):
        collector.start()
        for _ in range(5):
            assert buffer.sample().numel() == options["batch_size"]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("options", [one[2] for one in SLOW_TO_SERVE[1:]])
def test_workers_write_on_until_a_sampler_has_what_it_needs(kind: Any, options: Any) -> None:
    makers = [["CartPole-v1"] * 8] * 2
    shared = ReplayBuffer(10_000, storage="shared", samples_per_insert=4, timeout=30, **options)
    with (
        shared as buffer,
        kind(makers, frames_per_batch=16, replay_buffer=buffer, seed=0) as collector,
    ):
        collector.start()
        for _ in range(5):
            assert buffer.sample().numel() == options["batch_size"]
        assert collector.stats()["replay"]["writer"] == "workers"


def test_a_writer_in_another_process_writes_on_until_a_sampler_has_what_it_needs() -> None:
    pace: dict[str, Any] = {"samples_per_insert": 1, "tolerance": 0, "timeout": 30}
    buffer = ReplayBuffer(1000, storage="shared", sampler=UniformSampler(replacement=False), **pace)
    buffer.prepare(kit.summed(0, 0, 1))
    with buffer, process(kit.write_for_ever, buffer, 0) as link:
        for _ in range(5):
            kit.check_sums(buffer.sample(700))
        buffer.close()
        assert link.receive() == "closed"


@pytest.mark.parametrize(
    ("sampler", "size"),
    [(UniformSampler(replacement=False), 101), (SliceSampler(slice_len=101), 202)],
)
def test_what_no_number_of_frames_can_give_is_refused_rather_than_waited_for(
    sampler: Sampler, size: int
) -> None:
    buffer = ReplayBuffer(100, sampler=sampler, samples_per_insert=1)
    with pytest.raises(UsageError, match="capacity=100"):
        buffer.sample(size)


def test_a_wait_that_took_too_long_tells_the_numbers_of_its_end() -> None:
    sampler = UniformSampler(replacement=False)
    buffer = ReplayBuffer(100, sampler=sampler, timeout=0.3)
    buffer.extend(numbered(0, 10))

    def write() -> None:
        buffer.watch = None
        buffer.extend(numbered(10, 10))

    def begin() -> None:
        buffer.watch = write

    buffer.watch = begin
    with pytest.raises(WorkerError, match="'size': 20"):
        buffer.sample(50)


# -- never for the dead ----------------------------------------------------------------------------


def test_who_samples_does_not_wait_for_a_writer_that_was_killed() -> None:
    buffer = ReplayBuffer(10, storage="shared", batch_size=5, seed=0)
    buffer.extend(numbered(0, 1))
    buffer.fed = False
    with process(kit.die_while_writing, buffer, 4) as link:
        assert link.exit_code(30) == -9
    more_than_there_are(buffer)
    with pytest.raises(UsageError, match="no writer is registered that would add more"):
        buffer.sample(1)
    assert not (buffer._ring.stamps < 0).any()
    assert contents(buffer) == [0]


def test_who_samples_waits_for_a_writer_that_lives_beside_a_dead_one() -> None:
    buffer = ReplayBuffer(20, storage="shared", seed=0)
    buffer.extend(numbered(0, 1))
    buffer.fed = False
    with process(kit.die_while_writing, buffer, 4) as link:
        assert link.exit_code(30) == -9
    with process(kit.stop_while_writing, buffer, (50, 4)) as link:
        assert link.receive() == "writing"
        assert buffer._ring.is_being_written()
        more_than_there_are(buffer)
        threading.Timer(0.0, link.send, [None]).start()
        assert set(check(buffer.sample(30)).tolist()) <= {0, 50, 51, 52, 53}
        assert link.receive() == "done"
    assert not buffer._ring.is_being_written()


def test_what_the_last_writer_wrote_while_it_was_asked_for_is_drawn(monkeypatch: Any) -> None:
    """It may end between an attempt that was too early and the look whether somebody writes."""
    buffer = ReplayBuffer(20, storage="shared", seed=0, min_size=4)
    buffer.extend(numbered(0, 1))
    buffer.fed = False
    ring = buffer._ring

    def ends() -> bool:
        monkeypatch.undo()
        buffer.extend(numbered(1, 4))
        return False

    monkeypatch.setattr(ring, "is_being_written", ends)
    assert set(check(buffer.sample(8)).tolist()) <= set(range(5))


@pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])
def test_a_thread_that_writes_is_alive_and_keeps_its_rows(storage: str, tmp_path: Any) -> None:
    directory = tmp_path / "files" if storage == "memmap" else None
    buffer = ReplayBuffer(10, storage=storage, directory=directory, batch_size=5)
    buffer.extend(numbered(0, 2))
    ring, go_on, writing = buffer._ring, threading.Event(), threading.Event()
    put = ring.put

    def slow(*arguments: Any) -> Any:
        writing.set()
        assert go_on.wait(20)
        return put(*arguments)

    ring.put = slow
    thread = threading.Thread(target=buffer.extend, args=(numbered(2, 3),))
    thread.start()
    assert writing.wait(20)
    assert ring.is_being_written()
    assert int((ring.stamps < 0).sum()) == 3
    go_on.set()
    thread.join(20)
    assert not ring.is_being_written()
    assert contents(buffer) == [0, 1, 2, 3, 4]
    buffer.close()


# -- as long as somebody else writes ---------------------------------------------------------------


class Gated(CountingEnv):
    """Makes steps as long as it may."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        assert self.gate.wait(20)
        return super().step(action)


def more_than_there_are(buffer: ReplayBuffer) -> None:
    """Let samples need more frames than were written, from here on."""
    buffer._draws.pace = replace(buffer._pace, min_size=buffer.stats()["frames"] + 1)


def ended(collector: Any) -> None:
    while collector.is_running():
        time.sleep(0.002)


@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_the_first_of_two_collectors_to_end_does_not_end_the_waiting(storage: str) -> None:
    gate, got = threading.Event(), []
    buffer = ReplayBuffer(100, storage=storage, min_size=40)
    first = Collector(CountingEnv, frames_per_batch=10, total_frames=20, replay_buffer=buffer)
    second = Collector(
        lambda: Gated(gate), frames_per_batch=10, total_frames=20, replay_buffer=buffer
    )
    with buffer, first, second:
        second.start()
        first.start()
        ended(first)
        reader = threading.Thread(target=lambda: got.append(buffer.sample(8)))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        gate.set()
        reader.join(20)
        assert got[0].batch_size == (8,)
        ended(second)
        more_than_there_are(buffer)
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample(8)


def test_a_collector_is_shut_down_while_it_is_held_back_beside_another() -> None:
    """Each hears of its own end, though another was started after it."""
    buffer = ReplayBuffer(1000, samples_per_insert=1, tolerance=0, min_size=10)
    makers = [Collector(CountingEnv, frames_per_batch=10, replay_buffer=buffer) for _ in range(2)]
    with buffer:
        for collector in makers:
            collector.start()
        for collector in makers:
            collector.shutdown(timeout=600)  # more than a test may take
            assert not collector.is_running()


def feed_until_told(channel: Any, payload: bytes) -> None:
    """Fill a buffer as a collector does, in another process."""
    buffer, frames, port = kit.attach(channel)
    buffer.note_feeder("there", True)
    channel.send("feeds")
    port.receive()
    buffer.extend(numbered(10, frames))
    buffer.note_feeder("there", False)
    channel.send("ended")
    port.receive()


def test_collectors_of_all_processes_keep_who_samples_waiting() -> None:
    buffer, got = ReplayBuffer(100, storage="shared", min_size=30), []
    buffer.extend(numbered(0, 10))
    with buffer, process(feed_until_told, buffer, 20) as link:
        assert link.receive() == "feeds"
        buffer.note_feeder("here", True)
        buffer.note_feeder("here", False)  # has ended, but the other has not
        reader = threading.Thread(target=lambda: got.append(buffer.sample(8)))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        link.send(None)
        reader.join(20)
        assert got[0].batch_size == (8,)
        assert link.receive() == "ended"
        more_than_there_are(buffer)
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample(8)


def test_a_collector_that_is_killed_in_another_process_keeps_nobody_waiting() -> None:
    buffer = ReplayBuffer(100, storage="shared", min_size=30)
    buffer.extend(numbered(0, 10))
    buffer.fed = False
    with buffer, process(feed_until_told, buffer, 20) as link:
        assert link.receive() == "feeds"
        assert buffer._is_fed()
        link.kill()
        link.exit_code(30)
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample(8)


def test_who_feeds_is_known_to_all_buffers_of_a_process_on_the_same_memory() -> None:
    buffer = ReplayBuffer(100, storage="shared")
    buffer.prepare(numbered(0, 1))
    beside = ReplayBuffer.attached(*buffer.handle())
    buffer.note_feeder("one", True)
    for one in (buffer, beside):
        one.fed = False
        assert one._is_fed()
    beside.note_feeder("two", True)
    beside.note_feeder("two", False)
    assert buffer._ring.is_fed()
    buffer.note_feeder("one", False)
    assert not beside._ring.is_fed()


def test_a_batch_that_can_never_be_drawn_lets_no_writer_go():
    pace = {"samples_per_insert": 1.0, "tolerance": 0.0, "timeout": AT_ONCE}
    with ReplayBuffer(4, sampler=SliceSampler(slice_len=5), **pace) as buffer:
        source = Written(1, 4, 8)
        assert goes(buffer.extend, source.next())
        with pytest.raises(UsageError, match="capacity=4"):
            buffer.sample(5)
        assert not goes(buffer.extend, source.next())
