"""Frames whose parts can be checked against one another."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.data import ReplayBuffer
from swath.errors import ClosedError
from swath.links import Channel, ProcessLink, ProcessPort


def numbered(first: int, *size: int) -> TensorDict:
    """Return frames that count from `first`, in keys of several depths, shapes and dtypes."""
    count = torch.arange(first, first + torch.Size(size).numel()).reshape(size)
    return TensorDict(
        {
            "observation": torch.stack([count, -count, 2 * count], -1).float(),
            "pixels": (count % 251).to(torch.uint8)[..., None, None].expand(*size, 2, 3),
            "half": (count % 128)[..., None].bfloat16(),
            "next": {"reward": count[..., None].double(), "done": (count % 7 == 0)[..., None]},
            "collector": {"policy_version": count // 10},
        },
        size,
    )


def check(batch: TensorDict) -> torch.Tensor:
    """Return the counts of frames after checking that their parts belong together."""
    count = batch["next", "reward"].squeeze(-1).long()
    expected = torch.stack([numbered(int(one), 1)[0] for one in count.flatten()])
    for key, value in expected.items(True, True):
        assert batch[key].dtype == value.dtype, key
        assert torch.equal(batch[key].reshape(value.shape), value), key
    return count


def contents(buffer: ReplayBuffer) -> list[int]:
    """Return the counts of all frames, the oldest first."""
    batches = list(buffer)
    if not batches:
        return []
    data = torch.cat(batches)
    return check(data[data["index"].argsort()]).tolist()


def trajectories(ids: list[int], start: list[int], steps: int, ends: set[int]) -> TensorDict:
    """Return steps of as many envs as there are ids; `ends` are those that end with the last."""
    time = torch.tensor(start)[:, None] + torch.arange(steps)
    done = torch.zeros(len(ids), steps, 1, dtype=torch.bool)
    for row, one in enumerate(ids):
        done[row, -1] = one in ends
    which = torch.tensor(ids)[:, None].expand(-1, steps)
    return TensorDict(
        {"time": time, "next": {"done": done}, "collector": {"traj_ids": which}},
        [len(ids), steps],
    )


# -- other processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def process(target: Callable[..., None], buffer: ReplayBuffer, message: Any) -> Iterator[Any]:
    """Run a function in another process, and send it the buffer's handle with a message."""
    link = ProcessLink(target, b"")
    try:
        handle, memory = buffer.handle()
        link.send((handle, message), [memory])
        yield link
    finally:
        link.kill()
        link.close()


# -- what other processes run ----------------------------------------------------------------------


def attach(channel: Channel) -> tuple[ReplayBuffer, Any, ProcessPort]:
    """Return the buffer of the process at the other end, and what came beside it."""
    port = ProcessPort(channel)
    (handle, message), (memory,) = port.receive()
    return ReplayBuffer.attached(handle, memory), message, port


def summed(worker: int, first: int, frames: int) -> TensorDict:
    """Return frames that end with the sum of what is in them."""
    content = np.random.default_rng([worker, first]).integers(0, 2**31, (frames, 60))
    content[:, 0], content[:, 1] = worker, np.arange(first, first + frames)
    batch = {"content": content, "sum": content.sum(1), "wide": content.repeat(4, 1)}
    return TensorDict({name: torch.from_numpy(value) for name, value in batch.items()}, [frames])


def check_sums(batch: TensorDict) -> None:
    """Fail if the parts of a frame do not belong together."""
    content = batch["content"]
    assert torch.equal(content.sum(-1), batch["sum"])
    assert torch.equal(batch["wide"], content.repeat_interleave(4, -1))


def write_for_ever(channel: Channel, payload: bytes) -> None:
    """Write frames with sums until the buffer is closed."""
    buffer, worker, _ = attach(channel)
    batches = [summed(worker, first, 1 + first % 90) for first in range(40)]
    try:
        while True:
            for batch in batches:
                buffer.extend(batch)
    except ClosedError:
        channel.send("closed")


def write_once(channel: Channel, payload: bytes) -> None:
    """Write numbered frames, say so, and end when told."""
    buffer, (first, frames), port = attach(channel)
    buffer.extend(numbered(first, frames))
    channel.send(len(buffer))
    port.receive()


def die_while_writing(channel: Channel, payload: bytes) -> None:
    """Be killed with half of the rows copied."""
    buffer, frames, _ = attach(channel)
    ring = buffer._ring
    last = list(ring.columns)[-1]
    ring.columns[last].frames = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    buffer.extend(numbered(1000, frames))


def die_in_the_ledger(channel: Channel, payload: bytes) -> None:
    """Be killed with the lock held and counts half changed."""
    buffer, _, _ = attach(channel)
    with buffer._ring as ring:
        ring.stamps[:3] = -1
        os.kill(os.getpid(), signal.SIGKILL)


def stop_while_writing(channel: Channel, payload: bytes) -> None:
    """Write one batch slowly: half, a message, and the rest when told."""
    buffer, (first, frames), port = attach(channel)
    ring = buffer._ring
    column = ring.columns["observation",]
    frames_of = column.frames

    def slow(*args: Any) -> Any:
        channel.send("writing")
        port.receive()
        return frames_of(*args)

    column.frames = slow
    buffer.extend(numbered(first, frames))
    channel.send("done")


def claim_when_told(channel: Channel, payload: bytes) -> None:
    """Tell, each time when told, whether so many rows could be had."""
    buffer, frames, port = attach(channel)
    ring = buffer._ring
    channel.send("attached")
    while port.receive()[0]:
        with ring.writing:
            first = ring.claim(frames, lambda: True)
            if first is not None:
                ring.abandon(first, frames)
        channel.send(first is not None)


def fork_and_die_while_writing(channel: Channel, payload: bytes) -> None:
    """Be killed with half of the rows copied, and leave a fork behind."""
    buffer, frames, _ = attach(channel)
    ring = buffer._ring

    def fork_and_die(*_: Any) -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        channel.send(pid)
        os.kill(os.getpid(), signal.SIGKILL)

    ring.columns[next(reversed(ring.columns))].frames = fork_and_die
    buffer.extend(numbered(1000, frames))


def die_while_unpaced(channel: Channel, payload: bytes) -> None:
    """Be killed while no writer is to be held back."""
    buffer, _, port = attach(channel)
    with buffer.unpaced():
        channel.send("unpaced")
        port.receive()
        os.kill(os.getpid(), signal.SIGKILL)


def sample_once(channel: Channel, payload: bytes) -> None:
    """Wait for a batch, and tell what came or what was raised."""
    buffer, _, _ = attach(channel)
    channel.send("ready")
    try:
        channel.send(check(buffer.sample(8)).tolist())
    except Exception as error:
        channel.send((type(error).__name__, str(error), type(error.__cause__).__name__))


def save_for_ever(channel: Channel, payload: bytes) -> None:
    """Save a buffer of 5,000 frames again and again, telling the first after each time."""
    buffer = ReplayBuffer(5000)
    for first in range(0, 10**9, 5000):
        buffer.extend(numbered(first, 5000))
        buffer.save(payload.decode())
        channel.send(first)
