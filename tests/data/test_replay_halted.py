"""The ring of a replay buffer: whoever is halted, broken off or killed, frames are whole."""

from __future__ import annotations

from typing import Any

import pytest
import replay_kit as kit
import torch
from preempt_kit import Halts, Words, halted_everywhere, killed
from replay_kit import check, contents, numbered

from swath.data import ReplayBuffer
from swath.data.locks import Locks
from swath.links import Channel, ProcessLink

CAPACITY = 6


def shared() -> ReplayBuffer:
    buffer = ReplayBuffer(CAPACITY, storage="shared", batch_size=4, seed=0)
    buffer.prepare(numbered(0, 1))
    return buffer


def other(buffer: ReplayBuffer) -> ReplayBuffer:
    """Return what another process has of a buffer, which knows nothing of our threads' locks."""
    attached = ReplayBuffer.attached(*buffer.handle())
    attached._ring._locks = Locks()
    return attached


def halt_writer(buffer: ReplayBuffer, halts: Halts) -> None:
    ring: Any = buffer._ring
    ring.words, ring.stamps = Words(ring.words, halts), Words(ring.stamps, halts)
    put = ring.put

    def halting(*args: Any) -> Any:
        halts()
        seen = put(*args)
        halts()
        return seen

    ring.put = halting


def look(buffer: ReplayBuffer) -> list[int]:
    """Return all frames that are whole, as a reader sees them that takes no lock."""
    ring: Any = buffer._ring
    numbers = ring.numbers()
    values = buffer._draws.copy(ring, numbers, None) if len(numbers) else None
    if values is None:
        return []
    count = check(values)
    assert torch.equal(count, values["index"])  # each frame is in its own place
    return count.tolist()


def test_a_reader_sees_whole_frames_between_any_two_stores_of_a_writer() -> None:
    buffer = shared()
    reader, seen = other(buffer), []
    halts = Halts(lambda: seen.append(look(reader)))
    halt_writer(buffer, halts)
    written = 0
    for frames in (3, 5, 6, 1, 4, 9):
        buffer.extend(numbered(written, frames))
        written += frames
        kept = list(range(max(0, written - CAPACITY), written))
        assert look(reader) == kept
    assert halts.count > 40
    assert all(one == sorted(set(one)) for one in seen)
    assert any(0 < len(one) < CAPACITY for one in seen)


def test_a_reader_that_is_halted_anywhere_sees_whole_frames() -> None:
    buffer = shared()
    buffer.extend(numbered(0, CAPACITY))
    written = CAPACITY

    def write() -> None:
        nonlocal written
        buffer.extend(numbered(written, 4))
        written += 4

    def read(halts: Halts) -> None:
        reader = other(buffer)
        ring: Any = reader._ring
        plain, fence = ring.take, ring.fence

        def take(rows: Any) -> Any:
            halts()
            half = plain(rows[: len(rows) // 2])
            halts()
            rest = plain(rows[len(rows) // 2 :])
            return {key: torch.cat([half[key], rest[key]]) for key in half}

        ring.take = take
        ring.fence = lambda: (halts(), fence())
        look(reader)
        assert contents(buffer) == list(range(written - CAPACITY, written))

    assert len([*halted_everywhere(read, write)]) >= 3


def die_at(channel: Channel, payload: bytes) -> None:
    """Be killed at one of the places of a write."""
    buffer, (first, frames, at), _ = kit.attach(channel)
    halt_writer(buffer, Halts(killed, at))
    buffer.extend(numbered(first, frames))
    channel.send("done")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("frames", [4, CAPACITY])
def test_a_writer_that_is_killed_between_any_two_stores_is_cleared_up_after(frames: int) -> None:
    at, ended = 0, None
    while ended != 0:
        buffer = shared()
        buffer.extend(numbered(0, CAPACITY))
        link = ProcessLink(die_at, b"")
        try:
            handle, memory = buffer.handle()
            link.send((handle, (CAPACITY, frames, at)), [memory])
            ended = link.exit_code(60)
        finally:
            link.kill()
            link.close()
        seen = contents(buffer)
        assert seen == [one for one in range(CAPACITY + frames) if one in seen]
        claimed = buffer._ring.words[0]  # type: ignore[union-attr]
        buffer.extend(numbered(claimed, 2))
        assert contents(buffer)[-2:] == [claimed, claimed + 1]
        assert len(buffer) == len(contents(buffer))
        buffer.extend(numbered(claimed + 2, CAPACITY))
        assert contents(buffer) == list(range(claimed + 2, claimed + 2 + CAPACITY))
        buffer.close()
        at += 1
    assert at > 8
