"""Batches are saved, pickled and sent as any tensors are, at the size of their values."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing import resource_sharer

import pytest
import torch
import torch.multiprocessing as mp

from swath.collectors import Collector
from swath.data import ReplayBuffer
from swath.envs import SerialEnv
from swath.testing import CountingEnv, check_transitions

FORMS = {
    "views": {},
    "batch first": {"memory_order": "batch"},
    "compact": {"compact_obs": True},
    "split": {"split_trajs": True},
    "whole trajectories": {"trajs_per_batch": 2},
    "random frames": {"init_random_frames": 8},
}
MANY = 2000
"""Frames of a batch: enough for its values to outweigh what is written around them."""


def saved(thing) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def loaded(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def assert_written_once(data: bytes, thing) -> None:
    assert len(data) < thing.bytes() + 1000 * len(list(thing.keys(True, True))) + 5000


def assert_same(one, other) -> None:
    assert one.batch_size == other.batch_size
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key, value in one.items(True, True):
        assert value.dtype == other[key].dtype
        assert torch.equal(value, other[key]), key


def check(batch) -> None:
    """Write a batch in the ways that people do, and read it."""
    for write, read in ((saved, loaded), (pickle.dumps, pickle.loads)):
        data = write(batch)
        assert_written_once(data, batch)
        assert_same(read(data), batch)
    one = batch["observation"]
    assert len(saved(one)) < one.numel() * one.itemsize + 3000
    some = {"o": one, "a": batch["action"], "d": batch["next", "done"]}
    again = loaded(saved(some))
    assert all(torch.equal(value, again[name]) for name, value in some.items())
    assert_same(copy.deepcopy(batch), batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("envs", [lambda: CountingEnv(), lambda: SerialEnv(4, CountingEnv)])
def test_a_batch_is_saved_at_its_size(envs, form):
    with Collector(envs(), frames_per_batch=MANY, **FORMS[form]) as collector:
        for _ in range(2):
            check(collector.next())


@pytest.mark.parametrize("kind", ["sync", "async", "beside"])
def test_a_batch_of_workers_is_saved_at_its_size(backend, kind):
    with backend.make(kind, [CountingEnv] * 2, frames_per_batch=MANY) as collector:
        check(collector.next())


def test_a_shorter_rollout_is_saved_at_its_size():
    envs = SerialEnv(4, CountingEnv)
    check(envs.rollout(MANY))  # stops when the first episode ends
    envs.close()


def test_what_a_buffer_draws_is_saved():
    buffer = ReplayBuffer(MANY, batch_size=256)
    with Collector(SerialEnv(4, CountingEnv), frames_per_batch=MANY) as collector:
        buffer.extend(collector.next())
    assert_same(loaded(saved(drawn := buffer.sample())), drawn)


def _add_up(batches, sums) -> None:
    for batch in iter(batches.get, None):
        check_transitions(batch)
        sums.put(int(batch["observation"].sum()))
        del batch


def test_a_queue_of_processes_takes_batches():
    context = mp.get_context("spawn")
    batches, sums = context.Queue(), context.Queue()
    reader = context.Process(target=_add_up, args=(batches, sums))
    reader.start()
    expected = []
    with Collector(SerialEnv(4, CountingEnv), frames_per_batch=200, total_frames=2000) as collector:
        for batch in collector:
            expected.append(int(batch["observation"].sum()))
            batches.put(batch)
            del batch
        assert [sums.get(timeout=60) for _ in expected] == expected
    batches.put(None)
    reader.join(60)
    assert reader.exitcode == 0
    for queue in (batches, sums):
        queue.close()
        queue.join_thread()
    resource_sharer.stop()  # the thread that hands over descriptors
