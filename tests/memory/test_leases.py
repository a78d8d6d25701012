"""A delivered batch is never overwritten, in whatever way and however long it is held."""

from __future__ import annotations

import gc
import io
import pickle
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.memory import DeviceMemory, Field, HeapMemory, Layout, SharedMemory, Slab, SlabPool

LAYOUT = Layout(
    [
        Field(("x",), (3,), torch.float32, carried=True),
        Field(("next", "n"), (), torch.int64),
        Field(("flag",), (1,), torch.bool),
    ],
    steps=5,
    envs=4,
)


def on_device(nbytes: int) -> DeviceMemory:
    """Return memory as that of a GPU is kept, here beside the host's."""
    return DeviceMemory(nbytes, torch.device("cpu"))


MEMORIES = {"heap": HeapMemory, "shared": SharedMemory, "device": on_device}
of_every_memory = pytest.mark.parametrize(
    "memory", ["heap", pytest.param("shared", marks=pytest.mark.processes), "device"]
)


def make_pool(keep: int = 4, memory: str = "heap") -> SlabPool:
    return SlabPool(lambda: Slab(LAYOUT, MEMORIES[memory](LAYOUT.nbytes)), keep=keep)


def fill(slab: Slab, stamp: int) -> None:
    slab.tensors[("x",)].fill_(stamp)
    slab.tensors[("next", "n")].fill_(stamp)
    slab.tensors[("flag",)].fill_(stamp % 2)


def grad_graph(batch):
    weight = torch.full((3,), 2.0, requires_grad=True)
    return (batch["x"] * weight).sum(), weight, batch["x"].numel() / 3


HOLDS = {
    "whole": (lambda b: b, lambda h: h["next", "n"].unique().item()),
    "leaf": (lambda b: b["x"], lambda h: h.unique().item()),
    "slice": (lambda b: b["x"][1:3, 2], lambda h: h.unique().item()),
    "td slice": (lambda b: b[1:, 2:4], lambda h: h["next", "n"].unique().item()),
    "detach": (lambda b: b["x"].detach(), lambda h: h.unique().item()),
    "reshape view": (lambda b: b["x"].transpose(0, 1).view(-1), lambda h: h.unique().item()),
    "numpy": (lambda b: b["x"].numpy(), lambda h: torch.from_numpy(h).unique().item()),
    "numpy slice": (lambda b: b["x"].numpy()[2:, 1], lambda h: float(h.min())),
    "storage": (lambda b: b["next", "n"].untyped_storage(), lambda h: None),
    "stack": (lambda b: list(b.unbind(0)), lambda h: h[2]["next", "n"].unique().item()),
    "flags": (lambda b: b["flag"], lambda h: None if h.any() == h.all() else -1),
    "other dtype": (
        lambda b: b["x"].view(torch.int32),
        lambda h: h.view(torch.float32).unique().item(),
    ),
    "dlpack": (lambda b: torch.from_dlpack(b["x"]), lambda h: h.unique().item()),
    "iterator": (lambda b: iter(b["next", "n"]), lambda h: None),
    "moved to shared memory": (lambda b: b["x"].share_memory_(), lambda h: h.unique().item()),
}


@of_every_memory
@given(
    orders=st.lists(
        st.tuples(st.sampled_from(sorted(HOLDS)), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_held_keeps_its_values(memory, orders):
    pool = make_pool(memory=memory)
    held: list[tuple[int, str, object]] = []
    thing: object = None
    for stamp, (how, drop, keep) in enumerate(orders):
        slab = pool.take()
        fill(slab, stamp)
        batch = pool.lend(slab, 5, (4,))
        if keep:
            held.append((stamp, how, HOLDS[how][0](batch)))
        del batch, slab
        if drop < len(held):
            held.pop(drop)
        for stamped, kind, thing in held:
            assert HOLDS[kind][1](thing) in (stamped, None)
    held.clear()
    thing = None  # the loop's last one
    made = pool.made
    for _ in range(10):  # all of it came back: nothing more has to be made
        pool.give_back(pool.take())
    assert pool.made == made


@of_every_memory
def test_an_autograd_graph_holds_its_batch(memory):
    pool = make_pool(memory=memory)
    slab = pool.take()
    fill(slab, 3)
    loss, weight, rows = grad_graph(pool.lend(slab, 5, (4,)))
    for stamp in range(10, 20):
        other = pool.take()
        assert other is not slab
        fill(other, stamp)
        pool.give_back(other)
    loss.backward()
    assert weight.grad.tolist() == [3 * rows] * 3
    del loss
    gc.collect()
    assert slab in (pool.take(), pool.take())


@of_every_memory
def test_a_dropped_batch_gives_its_memory_back(memory):
    pool = make_pool(memory=memory)
    for stamp in range(50):
        slab = pool.take()
        fill(slab, stamp)
        batch = pool.lend(slab, 5, (4,))
        assert batch["x"].unique().item() == stamp
        del batch, slab
    assert pool.made == 1


@of_every_memory
def test_any_one_field_holds_the_whole_slab_and_the_last_gives_it_back(memory):
    pool = make_pool(memory=memory)
    keys = ["x", ("next", "n"), "flag"]
    for last in keys:
        slab = pool.take()
        fill(slab, 6)
        batch = pool.lend(slab, 5, (4,))
        field = batch[last]
        del batch
        gc.collect()
        others = [pool.take() for _ in range(3)]
        assert slab not in others
        for other in others:
            fill(other, 9)
            pool.give_back(other)
        assert field.unique().item() in (6, False)
        del field, other, others
        assert pool.take() is slab
        pool.give_back(slab)


@of_every_memory
def test_every_field_has_a_storage_of_its_own_which_holds_its_values_and_no_more(memory):
    pool = make_pool(memory=memory)
    slab = pool.take()
    fill(slab, 1)
    batch = pool.lend(slab, 5, (4,))
    for key, value in batch.items(True, True):
        storage = value.untyped_storage()
        assert storage.nbytes() == value.numel() * value.itemsize
        assert storage.data_ptr() == value.data_ptr() == slab.tensors[_path(key)].data_ptr()
    assert len({v.untyped_storage()._cdata for v in batch.values(True, True)}) == 3


def _path(key):
    return (key,) if isinstance(key, str) else key


WAYS = {
    "torch.save": (lambda b: _saved(b), lambda d: torch.load(io.BytesIO(d), weights_only=False)),
    "pickle": (pickle.dumps, pickle.loads),
    "to a process": (lambda b: ForkingPickler.dumps(b), lambda d: _received(d)),
}


def _saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def _received(data):
    again = pickle.loads(data)
    resource_sharer.stop()  # the thread that hands over descriptors
    return again


@of_every_memory
@pytest.mark.parametrize(
    "way", [*list(WAYS)[:2], pytest.param("to a process", marks=pytest.mark.processes)]
)
def test_what_was_saved_or_sent_is_the_same_and_holds_nothing(memory, way):
    pool, (write, read) = make_pool(memory=memory), WAYS[way]
    slab = pool.take()
    fill(slab, 3)
    batch = pool.lend(slab, 5, (4,))
    data = write(batch)
    again = read(data)
    del batch
    gc.collect()  # pickling leaves a cycle in tensordict 0.10
    assert pool.take() is slab
    fill(slab, 4)
    assert again.batch_size == (4, 5)
    assert again["next", "n"].unique().item() == again["x"].unique().item() == 3
    assert again["flag"].all()


def test_who_keeps_every_batch_gets_new_memory_and_the_pool_does_not_hoard_it():
    pool, batches = make_pool(keep=3), []
    for stamp in range(30):
        slab = pool.take()
        fill(slab, stamp)
        batches.append(pool.lend(slab, 5, (4,)))
    assert pool.made == 30
    assert [b["next", "n"].unique().item() for b in batches] == list(range(30))
    batches.clear()
    del slab
    gc.collect()
    pool.give_back(pool.take())  # slabs are taken back with the next rollout
    assert len(pool._free) == 3
    assert not pool._lent


def test_the_last_view_may_die_in_another_thread():
    import threading

    pool = make_pool()
    slab = pool.take()
    fill(slab, 1)
    box = [pool.lend(slab, 5, (4,))]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pool.take() is slab
