"""Weights: what fits, who gets them, and that nobody ever sees a mixture."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from weights_kit import Product, count_torn, read_alone

from swath.errors import UsageError
from swath.links import launch, pack
from swath.memory.weights import WeightBlock, WeightSpec, copy_weights, named_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("steps", torch.tensor(0))


def tensors(module):
    return {name: torch.zeros_like(value) for name, value in named_weights(module).items()}


def test_tied_weights_are_published_once_and_buffers_too():
    module = Tied()
    spec = WeightSpec.of(module)
    assert "second.weight" not in spec.shapes
    assert spec.others == {"second.weight"}
    assert spec.optional == {"scratch"}
    assert spec.shapes["steps"] == ((), torch.int64)
    block = WeightBlock(spec, 2)
    for source in (module, module.state_dict(), TensorDict(module.state_dict(), [])):
        version = block.newest(0) + 1
        with torch.no_grad():
            module.first.weight.fill_(version)
            module.steps.fill_(10**15 + version)
        block.publish(source, version, [0, 1])
        into = tensors(module)
        assert block.take(0, into) == version
        assert (into["first.weight"] == version).all()
        assert into["steps"] == 10**15 + version
    module.scratch.fill_(5)
    block.publish(module, 8, [0])
    block.publish(module.state_dict(), 9, [0])  # has no scratch: the last one stays
    block.take(0, into := tensors(module))
    assert (into["scratch"] == 5).all()
    block = WeightBlock(spec, 1)
    block.publish(module.state_dict(), 1, [0])  # never had any: the reader's own stays
    into["scratch"].fill_(7)
    block.take(0, into)
    assert (into["scratch"] == 7).all()


def test_an_older_version_is_whole_even_if_it_is_written_after_a_newer_one():
    module = Tied()
    spec = WeightSpec.of(module)
    block, flat = WeightBlock(spec, 2), np.zeros((2, spec.nbytes), np.uint8)
    for version in (1, 2):
        for view in spec.unflatten(flat[version - 1]).values():
            view.fill_(version)
    block.publish_flat(flat[1], frozenset(), 2, 1)
    block.publish_flat(flat[0], {"scratch"}, 1, 0)  # which was never given then
    for reader, version, scratch in ((0, 1, 7.0), (1, 2, 2.0)):
        into = tensors(module)
        into["scratch"].fill_(7)
        assert block.take(reader, into) == version
        assert (into.pop("scratch") == scratch).all()
        assert all((one == version).all() for one in into.values())


def test_a_reader_follows_another_one():
    module = nn.Linear(2, 2)
    block, into = WeightBlock(WeightSpec.of(module), 3), tensors(module)
    block.publish(module, 1, [0])
    block.follow(2, 0)
    for version in range(2, 9):  # where the two are is not written to
        block.publish(nn.Linear(2, 2), version, [1])
    assert block.take(2, into) == 1
    assert torch.equal(into["weight"], module.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_any_dtype_and_empty_tensors(dtype):
    source = {"a": torch.ones(3, dtype=dtype), "b": torch.zeros(0), "c": torch.tensor(True)}
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in source.items()}
    block = WeightBlock(WeightSpec(shapes, frozenset(), frozenset()), 1)
    block.publish(source, 1, [0])
    into = {name: torch.zeros_like(value) for name, value in source.items()}
    assert block.take(0, into) == 1
    assert all(torch.equal(into[name], value) for name, value in source.items())


def test_what_does_not_fit_is_refused_and_changes_nothing():
    module = nn.Linear(3, 2)
    spec = WeightSpec.of(module)
    whole = module.state_dict()
    block = WeightBlock(spec, 1)
    block.publish(module, 1, [0])
    for wrong, message in (
        ({"weight": whole["weight"]}, r"missing \['bias'\], unknown \[\]"),
        ({**whole, "other": whole["bias"]}, r"missing \[\], unknown \['other'\]"),
        ({**whole, "bias": torch.zeros(3)}, r"bias has shape \(3,\), \(2,\) was expected"),
        (nn.Linear(4, 2), "weight has shape"),
        (3, "must be a module, a state dict or a TensorDict; got int"),
    ):
        with pytest.raises(UsageError, match=message):
            block.publish(wrong, 2, [0])
        with pytest.raises(UsageError, match=message):
            copy_weights(wrong, module)
    assert block.newest(0) == 1
    assert WeightSpec.of(None).fit({}) == {}


def test_the_learner_is_only_read_and_never_aliased():
    learner, policy = nn.Linear(3, 2), nn.Linear(3, 2)
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    block = WeightBlock(WeightSpec.of(learner), 1)
    block.publish(learner, 1, [0])
    block.take(0, named_weights(policy))
    assert all(torch.equal(value, policy.state_dict()[name]) for name, value in before.items())
    with torch.no_grad():
        learner.weight.add_(1)
        policy.bias.add_(1)
    again = nn.Linear(3, 2)
    block.take(0, named_weights(again))
    assert torch.equal(again.weight, before["weight"])
    assert torch.equal(learner.bias, before["bias"])
    assert learner.weight.requires_grad
    assert policy.weight.requires_grad
    assert policy.weight.grad_fn is None


def test_each_reader_has_what_was_meant_for_it_however_often_others_get_more():
    module = nn.Linear(2, 1)
    block = WeightBlock(WeightSpec.of(module), 3)

    def publish(version, readers):
        with torch.no_grad():
            module.weight.fill_(version)
        block.publish(module, version, readers)

    def taken(reader):
        into = tensors(module)
        return block.take(reader, into), into["weight"].flatten().tolist()

    publish(1, [0, 1, 2])
    publish(2, [1])
    for version in range(3, 50):
        publish(version, [2])
    publish(50, [])
    assert taken(0) == (1, [1, 1])
    assert taken(1) == (2, [2, 2])
    assert taken(2) == (49, [49, 49])
    assert [block.newest(reader) for reader in range(3)] == [1, 2, 49]


def test_a_block_is_one_memory_that_other_processes_map():
    module = nn.Linear(3, 2)
    block = WeightBlock(WeightSpec.of(module), 2)
    twin = WeightBlock(WeightSpec.of(module), 2, block.memory)
    block.publish(module, 1, [0, 1])
    assert twin.newest(1) == 1
    twin.take(1, into := tensors(module))
    assert torch.equal(into["weight"], module.weight)


@pytest.mark.timeout(240)  # three processes at work, mostly on fewer cores
def test_no_taker_ever_sees_a_mixture():
    # Two layers, all entries c and 1/c: any product is 1 unless they are of two versions.
    module = Product(8000)
    spec = WeightSpec.of(module)
    block = WeightBlock(spec, 2)
    block.publish(module.become(1.0), 1, [0, 1])
    readers = []
    for number in range(2):
        payload = pack((number, spec, block.memory.nbytes, 50_000), "the job")
        readers.append(launch(count_torn, payload))
        readers[-1].channel.send("block", [block.memory.descriptor])
    version, stop = 1, threading.Event()

    def publish():
        nonlocal version
        while not stop.is_set():
            version += 1
            block.publish(module.become(2.0 ** (version % 20)), version, [0, 1])

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        told = [reader.channel.receive()[0] for reader in readers]
    finally:
        stop.set()
        publisher.join()
        for reader in readers:
            reader.kill()
            reader.close()
    assert sum(one["forwards"] for one in told) == 100_000
    assert [one["torn"] for one in told] == [0, 0]
    assert all(one["versions"] > 50 for one in told)
    assert version > 100


def test_a_reader_that_was_overtaken_does_not_take_new_weights_for_old():
    module = Product(10)
    block = WeightBlock(WeightSpec.of(module), 1)
    block.publish(module.become(1.0), 1, [0])
    reader = WeightBlock(WeightSpec.of(module), 1, block.memory)

    class Late:
        """Stamps that are looked at only after much was published."""

        def __init__(self, stamps):
            self.stamps, self.looks = stamps, 0

        def __getitem__(self, number):
            self.looks += 1
            if self.looks < 6:
                for _ in range(3):
                    version = block.newest(0) + 1
                    block.publish(module.become(float(version)), version, [0])
            return self.stamps[number]

    reader._stamps = Late(reader._stamps)
    version = reader.take(0, into := tensors(module))
    assert version > 6
    assert (into["first"] == version).all()


def test_what_is_published_for_later_is_seen_when_it_is_said():
    module = Product(10)
    block = WeightBlock(WeightSpec.of(module), 2)
    block.publish(module.become(1.0), 1, [0, 1])
    for version in range(2, 9):
        block.publish(module.become(float(version)), version, [version % 2], later=True)
    for reader in (0, 1):
        assert block.take(reader, into := tensors(module)) == 1
        assert (into["first"] == 1).all()
    block.direct()
    for reader, version in ((0, 8), (1, 7)):
        assert block.take(reader, into) == version
        assert (into["first"] == version).all()
    block.publish(module.become(20.0), 20, [0], later=True)
    block.publish(module.become(21.0), 21, [0])
    block.direct()
    assert block.newest(0) == 21


def test_a_reader_that_is_killed_or_stopped_holds_nobody_up():
    module = Product(100)
    spec = WeightSpec.of(module)
    block = WeightBlock(spec, 2)
    block.publish(module.become(1.0), 1, [0, 1])
    reader = launch(read_alone, pack((0, spec, block.memory.nbytes), "the job"))
    reader.channel.send("block", [block.memory.descriptor])
    reader.channel.receive()
    os.kill(reader.pid, 19)  # SIGSTOP, wherever it is
    started = time.monotonic()
    for version in range(2, 500):
        block.publish(module.become(2.0 ** (version % 20)), version, [0, 1])
        assert block.take(1, tensors(module)) == version
    assert time.monotonic() - started < 20
    reader.kill()
    reader.close()


def test_publishing_is_one_copy_whatever_the_number_of_readers():
    module = nn.Linear(1600, 1600)  # 10 MB
    block = WeightBlock(WeightSpec.of(module), 8)
    for version in range(1, 6):
        block.publish(module, version, range(8))
    resident = used(block)
    assert resident <= 3 * 1601 * 1600 * 4 + 100_000  # three buffers in use, not ten


def used(block):
    """Return how much of the memory of a block was ever touched."""
    return os.fstat(block.memory.descriptor).st_blocks * 512
