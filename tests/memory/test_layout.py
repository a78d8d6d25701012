from __future__ import annotations

import numpy as np
import pytest
import torch

from swath.errors import UsageError
from swath.memory import Field, HeapMemory, Layout, Slab

FIELDS = [
    Field(("observation",), (3, 2), torch.float32, carried=True),
    Field(("action",), (), torch.int64),
    Field(("next", "done"), (1,), torch.bool),
    Field(("next", "image"), (2, 5, 5), torch.uint8),
    Field(("half",), (3,), torch.bfloat16),
    Field(("hidden",), (7,), torch.float64, delivered=False),
]


@pytest.mark.parametrize("order", ["time", "batch"])
@pytest.mark.parametrize("envs", [1, 5])
def test_fields_neither_overlap_nor_leave_the_block(order, envs):
    layout = Layout(FIELDS, steps=4, envs=envs, order=order)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    for number, array in enumerate(slab.arrays.values()):
        array[...] = number + 1
    for number, (key, array) in enumerate(slab.arrays.items()):
        assert (array == array.dtype.type(number + 1)).all(), key
    used = sum(array.nbytes for array in slab.arrays.values())
    assert used <= layout.nbytes < used + 64 * len(FIELDS)


@pytest.mark.parametrize("order", ["time", "batch"])
def test_numpy_and_torch_views_are_the_same_memory_in_the_same_shape(order):
    layout = Layout(FIELDS, steps=4, envs=3, order=order)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    for key, place in layout.places.items():
        assert slab.arrays[key].shape == (place.rows, 3, *place.field.shape)
        assert slab.tensors[key].shape == slab.arrays[key].shape
        assert slab.tensors[key].dtype == place.field.dtype
        assert slab.tensors[key].data_ptr() == slab.arrays[key].ctypes.data
        assert slab.tensors[key].data_ptr() % 8 == 0
        itemsize = place.field.dtype.itemsize
        strides = tuple(s * itemsize for s in slab.tensors[key].stride())
        assert strides == slab.arrays[key].strides


@pytest.mark.parametrize("order", ["time", "batch"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_batch_holds_the_delivered_fields_with_time_last(order, batched):
    layout = Layout(FIELDS, steps=4, envs=3 if batched else 1, order=order)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    slab.arrays[("action",)][...] = np.arange(4)[:, None] * 10 + np.arange(layout.envs)
    batch = slab.lend(2, (3,) if batched else (), lambda _: None)
    assert batch.batch_size == ((3, 2) if batched else (2,))
    assert batch.names[-1] == "time"
    assert "hidden" not in batch.keys()
    expected = [[0, 10], [1, 11], [2, 12]] if batched else [0, 10]
    assert batch["action"].tolist() == expected
    assert batch["action"].is_contiguous() == (not batched)


@pytest.mark.parametrize("order", ["time", "batch"])
def test_envs_can_be_arranged_in_two_dimensions(order):
    layout = Layout(FIELDS, steps=4, envs=6, order=order)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    slab.arrays[("action",)][...] = np.arange(4)[:, None] * 10 + np.arange(6)
    batch = slab.lend(3, (2, 3), lambda _: None)
    assert batch.batch_size == (2, 3, 3)
    assert batch["action"][1, 2].tolist() == [5, 15, 25]


def test_a_row_is_contiguous_in_time_order():
    layout = Layout(FIELDS, steps=4, envs=3)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    assert all(array[1].flags["C_CONTIGUOUS"] for array in slab.arrays.values())


def test_a_key_that_two_fields_want_is_refused_by_name():
    with pytest.raises(UsageError, match=r"two entries have the key \('next', 'done'\)"):
        Layout([FIELDS[2], FIELDS[2]], steps=1, envs=1)


def test_a_part_of_a_slab_writes_into_the_whole():
    layout = Layout(FIELDS, steps=2, envs=4)
    slab = Slab(layout, HeapMemory(layout.nbytes))
    slab.arrays[("action",)][...] = 0
    slab.part(1, 3).tensors[("action",)].fill_(7)
    assert slab.arrays[("action",)].tolist() == [[0, 7, 7, 0]] * 2
