"""One buffer, many processes: whole frames only, whoever is slow, stopped or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_kit as kit
import torch
from replay_kit import check, check_sums, contents, numbered, process

from swath.data import ReplayBuffer, SliceSampler, load_dataset
from swath.errors import EnvError, UsageError, WorkerError


def shared(capacity: int = 10, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, storage="shared", batch_size=8, seed=0, **options)
    buffer.prepare(numbered(0, 1))
    return buffer


@pytest.mark.timeout(240)
@pytest.mark.parametrize("capacity", [300, 20_000])
def test_four_processes_write_and_a_million_samples_are_whole(capacity: int) -> None:
    """The small ring is overwritten many times a second; half a million samples each."""
    with ReplayBuffer(capacity, storage="shared", batch_size=1000, seed=0) as buffer:
        buffer.prepare(kit.summed(0, 0, 1))
        with contextlib.ExitStack() as stack:
            links = [
                stack.enter_context(process(kit.write_for_ever, buffer, worker))
                for worker in range(4)
            ]
            workers: set[int] = set()
            samples = 0
            while samples < 500_000:
                batch = buffer.sample()
                check_sums(batch)
                workers |= set(batch["content"][:, 0].unique().tolist())
                samples += len(batch)
            stats = buffer.stats()
            buffer.close()
            assert [link.receive() for link in links] == ["closed"] * 4
        assert samples == 500_000 == stats["samples"]
        assert workers == {0, 1, 2, 3}
        assert stats["frames"] > 3 * capacity


def test_threads_write_and_read_too() -> None:
    with ReplayBuffer(200, batch_size=100, prefetch=2, seed=0, timeout=30) as buffer:
        stop = threading.Event()

        def write(worker: int) -> None:
            batches = [kit.summed(worker, first, 1 + first) for first in range(60)]
            while not stop.is_set():
                for batch in batches:
                    buffer.extend(batch)

        threads = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                check_sums(buffer.sample())
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("storage", ["shared", "memmap"])
def test_another_process_writes_what_this_one_reads(storage: str, tmp_path: Path) -> None:
    directory = tmp_path / "files" if storage == "memmap" else None
    buffer = ReplayBuffer(10, storage=storage, directory=directory, batch_size=4)
    with pytest.raises(UsageError, match=r"extend\(\) or prepare\(\) it first"):
        buffer.handle()
    buffer.prepare(numbered(0, 1))
    with process(kit.write_once, buffer, (5, 13)) as link:
        assert link.receive() == 10
        assert contents(buffer) == list(range(8, 18))
        buffer.extend(numbered(100, 3))
        assert contents(buffer) == [*range(11, 18), 100, 101, 102]
    buffer.close()
    plain = ReplayBuffer(10)
    plain.extend(numbered(0, 1))
    with pytest.raises(UsageError, match="use 'shared'"):
        plain.handle()


def test_a_killed_writer_holds_nobody_up_and_its_frames_are_never_seen() -> None:
    buffer = shared(10, timeout=20)
    buffer.extend(numbered(0, 10))
    with process(kit.die_while_writing, buffer, 4) as link:
        assert link.exit_code(30) == -9
    assert contents(buffer) == [4, 5, 6, 7, 8, 9]
    assert set(check(buffer.sample(200)).tolist()) == set(range(4, 10))
    buffer.extend(numbered(20, 8))
    assert contents(buffer) == [*range(20, 28)]  # those rows come last in the ring
    buffer.extend(numbered(30, 10))
    assert contents(buffer) == list(range(30, 40))


def test_a_writer_that_is_killed_with_the_lock_is_cleared_up_after() -> None:
    buffer = shared(10, timeout=20)
    buffer.extend(numbered(0, 10))
    with process(kit.die_in_the_ledger, buffer, None) as link:
        assert link.exit_code(30) == -9
    buffer.sample()  # whoever takes the lock next counts
    assert len(buffer) == 7
    assert contents(buffer) == list(range(3, 10))


def test_a_slow_writer_is_not_overtaken_by_a_lap() -> None:
    buffer = shared(10)
    buffer.extend(numbered(0, 10))
    with process(kit.stop_while_writing, buffer, (50, 4)) as link:
        assert link.receive() == "writing"
        assert contents(buffer) == list(range(4, 10))
        buffer.extend(numbered(60, 6))  # the other rows are free
        assert contents(buffer) == list(range(60, 66))
        thread = threading.Thread(target=buffer.extend, args=(numbered(70, 5),))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()  # its rows are still being written
        link.send(None)
        assert link.receive() == "done"
        thread.join(20)
        assert not thread.is_alive()
    assert contents(buffer) == [*range(61, 66), *range(70, 75)]


def hold_while_writing(buffer: ReplayBuffer, act: Callable[[], Any]) -> None:
    """Let something happen once, in the middle of the next write."""
    ring: Any = buffer._ring
    put = ring.put

    def halted(*args: Any) -> Any:
        ring.put = put
        act()
        return put(*args)

    ring.put = halted


def test_rows_stay_the_writers_when_its_process_reads_the_files_meanwhile(tmp_path: Path) -> None:
    """Of POSIX locks all would end with the first descriptor of the file that is closed."""
    files = tmp_path / "files"
    buffer = ReplayBuffer(10, storage="memmap", directory=files, batch_size=4)
    buffer.extend(numbered(0, 10))
    could: list[bool] = []

    def ask() -> None:
        link.send(True)
        could.append(link.receive())

    def act() -> None:
        ask()
        load_dataset(files)
        ask()
        with pytest.raises(UsageError, match="is open in another buffer"):
            ReplayBuffer(10, storage="memmap", directory=files)
        ask()

    with process(kit.claim_when_told, buffer, 8) as link:
        assert link.receive() == "attached"
        hold_while_writing(buffer, act)
        buffer.extend(numbered(20, 6))
        ask()
    assert could == [False, False, False, True]
    buffer.close()


def test_a_fork_is_a_writer_of_its_own() -> None:
    buffer = shared(10)
    buffer.extend(numbered(0, 10))

    def act() -> None:
        pid = os.fork()
        if pid == 0:
            ring: Any = buffer._ring
            os._exit(ring.claim(8, lambda: True) is None)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    ended: list[int] = []
    hold_while_writing(buffer, act)
    buffer.extend(numbered(20, 6))
    assert ended == [1]
    act()
    assert ended == [1, 0]


def test_a_fork_of_a_killed_writer_holds_nobody_up() -> None:
    buffer = shared(10, timeout=20)
    buffer.extend(numbered(0, 10))
    with process(kit.fork_and_die_while_writing, buffer, 4) as link:
        fork = link.receive()
        try:
            assert link.exit_code(30) == -9
            buffer.extend(numbered(20, 10))
        finally:
            os.kill(fork, signal.SIGKILL)
    assert contents(buffer) == list(range(20, 30))


def test_who_is_killed_while_writers_go_free_leaves_them_held_back() -> None:
    buffer = shared(100, samples_per_insert=1.0, tolerance=0.0, timeout=0.3)
    with process(kit.die_while_unpaced, buffer, None) as link:
        assert link.receive() == "unpaced"
        for first in range(0, 30, 10):
            buffer.extend(numbered(first, 10))
        link.send(None)
        assert link.exit_code(30) == -9
    with pytest.raises(WorkerError, match="too few samples were drawn"):
        buffer.extend(numbered(30, 10))
    with buffer.unpaced(), buffer.unpaced():
        buffer.extend(numbered(40, 10))
    with pytest.raises(WorkerError, match="too few samples were drawn"):
        buffer.extend(numbered(50, 10))


def test_empty_takes_what_is_being_written_along() -> None:
    buffer = shared(10)
    with process(kit.stop_while_writing, buffer, (50, 4)) as link:
        assert link.receive() == "writing"
        buffer.empty()
        link.send(None)
        assert link.receive() == "done"
    assert contents(buffer) == []
    buffer.extend(numbered(0, 12))
    assert contents(buffer) == list(range(2, 12))


def test_a_reader_in_another_process_waits_for_frames_and_hears_of_failures() -> None:
    buffer = shared(10)
    with process(kit.sample_once, buffer, None) as link:
        assert link.receive() == "ready"
        buffer.extend(numbered(3, 1))
        assert link.receive() == [3] * 8
    with process(kit.sample_once, shared(10), None) as link, shared(10) as other:
        assert link.receive() == "ready"
        with process(kit.sample_once, other, None) as second:
            assert second.receive() == "ready"
            error = EnvError("env 3 broke", env=3)
            error.__cause__ = ZeroDivisionError("inside")
            other.fail(error)
            assert second.receive() == ("EnvError", "env 3 broke [env 3]", "ZeroDivisionError")
        with pytest.raises(EnvError):
            other.sample()


def test_slices_of_frames_that_other_processes_wrote() -> None:
    sampler = SliceSampler(slice_len=4)
    buffer = ReplayBuffer(40, storage="shared", sampler=sampler, batch_size=40, timeout=20)
    batch = kit.trajectories([1, 2], [0, 0], 3, set())
    buffer.prepare(batch)
    handle, memory = buffer.handle()
    writers = [ReplayBuffer.attached(handle, memory) for _ in range(2)]
    for start in range(0, 9, 3):
        for worker, writer in enumerate(writers):
            writer.extend(kit.trajectories([10 * worker, 10 * worker + 1], [start] * 2, 3, set()))
    for _ in range(10):
        batch = buffer.sample()
        ids, times = batch["collector", "traj_ids"], batch["time"]
        assert (ids == ids[:, :1]).all()
        assert (times.diff(dim=1) == 1).all()
    assert len(torch.unique(ids)) > 1
