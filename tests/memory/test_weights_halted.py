"""Published weights: whoever is halted or broken off, wherever it is, no reader takes a mixture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from preempt_kit import Copied, Halts, Words, halted_everywhere
from weights_kit import Product

from swath.memory.weights import WeightBlock, WeightSpec, named_weights

SIZE, READERS = 6, 2
SPEC = WeightSpec.of(Product(SIZE))


class Reader:
    """What another process has of a block; each time it takes the newest version, and checks it."""

    def __init__(self, block: WeightBlock, number: int = 0) -> None:
        self.block, self.number = WeightBlock(SPEC, READERS, block.memory), number
        self.module = Product(SIZE)
        self.into = named_weights(self.module)
        self.taken = [0]

    def take(self) -> None:
        version = self.block.take(self.number, self.into)
        assert version >= self.taken[-1]
        self.taken.append(version)
        with torch.no_grad():
            assert (self.module.first == version).all()
            assert torch.allclose(self.module(), torch.ones(SIZE)), f"a mixture in {version}"

    def halt(self, halts: Halts) -> None:
        """Be halted at each look at a word, and in the middle of each tensor."""
        self.block._words = Words(self.block._words, halts, reads=True)
        self.block._stamps = Words(self.block._stamps, halts, reads=True)
        self.into = {name: Copied(value, halts) for name, value in self.into.items()}


def halt_publisher(block: WeightBlock, halts: Halts) -> None:
    block._words, block._stamps = Words(block._words, halts), Words(block._stamps, halts)
    block._present = Words(block._present, halts)
    for number, views in enumerate(block._buffers):
        block._buffers[number] = {name: Copied(view, halts) for name, view in views.items()}


def published(block, version, readers=(0, 1), later=False):
    block.publish(Product(SIZE).become(float(version)), version, readers, later)


@pytest.fixture
def block():
    block = WeightBlock(SPEC, READERS)
    published(block, 1)
    return block


def test_a_reader_takes_a_whole_version_between_any_two_stores_of_the_publisher(block):
    readers = Reader(block, 0), Reader(block, 1)
    halts = Halts(lambda: [reader.take() for reader in readers])
    halt_publisher(block, halts)
    for version in range(2, 12):
        published(block, version, ([0, 1], [0], [1], [])[version % 4], later=version % 3 == 0)
        block.direct()
    flat = np.zeros(SPEC.nbytes, np.uint8)
    for name, view in SPEC.unflatten(flat).items():
        view.fill_(12.0 if name == "first" else 1 / 12)
    block._flat = [Copied(one, halts) for one in block._flat]
    block.publish_flat(flat, frozenset(), 12, 0)
    readers[0].take()
    assert readers[0].taken[-1] == 12
    assert halts.count > 60


@pytest.mark.parametrize("publications", [1, 2, 3, 7])
def test_a_reader_that_is_halted_anywhere_takes_a_whole_version(block, publications):
    newest = 1

    def publish():
        nonlocal newest
        for _ in range(publications):
            newest += 1
            published(block, newest, [0] if newest % 3 else [0, 1])

    def read(halts):
        reader = Reader(block)
        reader.halt(halts)
        reader.take()
        reader.take()
        last = Reader(block)
        last.take()
        assert last.taken[-1] == newest

    assert len([*halted_everywhere(read, publish)]) >= 10


def test_a_publication_that_is_broken_off_anywhere_leaves_whole_versions(block):
    newest, reader = 1, Reader(block)

    def broken_off():
        raise KeyboardInterrupt

    def publish(halts):
        nonlocal newest
        other = WeightBlock(SPEC, READERS, block.memory)
        other._order, other._later = list(block._order), dict(block._later)
        halt_publisher(other, halts)
        newest += 1
        try:
            published(other, newest, [0, 1])
        except KeyboardInterrupt:
            reader.take()
        block._order, block._later = other._order, other._later
        newest += 1
        published(block, newest)
        reader.take()
        assert reader.taken[-1] == newest

    assert len([*halted_everywhere(publish, broken_off)]) >= 6
