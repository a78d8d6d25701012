"""A delivered batch is never overwritten, in whatever way and however long it is held."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swath.memory import Field, HeapMemory, Layout, Slab, SlabPool

LAYOUT = Layout(
    [
        Field(("x",), (3,), torch.float32, carried=True),
        Field(("next", "n"), (), torch.int64),
        Field(("flag",), (1,), torch.bool),
    ],
    steps=5,
    envs=4,
)


def make_pool(keep: int = 4) -> SlabPool:
    return SlabPool(lambda: Slab(LAYOUT, HeapMemory(LAYOUT.nbytes)), keep=keep)


def fill(slab: Slab, stamp: int) -> None:
    slab.arrays[("x",)][...] = stamp
    slab.arrays[("next", "n")][...] = stamp
    slab.arrays[("flag",)][...] = stamp % 2


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
}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(HOLDS)), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_held_keeps_its_values(orders):
    pool = make_pool()
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


def test_an_autograd_graph_holds_its_batch():
    pool = make_pool()
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


def test_a_dropped_batch_gives_its_memory_back():
    pool = make_pool()
    for stamp in range(50):
        slab = pool.take()
        fill(slab, stamp)
        batch = pool.lend(slab, 5, (4,))
        assert batch["x"].unique().item() == stamp
        del batch, slab
    assert pool.made == 1


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
