"""A policy that shows a mixture of two versions, and readers of its weights in worker processes."""

from __future__ import annotations

import torch
from torch import nn

from swath.links import unpack
from swath.memory import SharedMemory
from swath.memory.weights import WeightBlock, named_weights


class Product(nn.Module):
    """Two vectors that are c and 1/c everywhere: their product is 1 if they are of one version."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(size))
        self.register_buffer("second", torch.ones(size))

    @torch.no_grad()
    def become(self, value: float) -> Product:
        self.first.fill_(value)
        self.second.fill_(1 / value)
        return self

    def forward(self) -> torch.Tensor:
        return self.first * self.second


def _attached(channel, spec, nbytes, readers=2):
    _, (descriptor,) = channel.receive()
    memory = SharedMemory(nbytes, descriptor)
    return WeightBlock(spec, readers, memory)


@torch.no_grad()
def count_torn(channel, payload):
    """Take the newest weights before each of many forward passes, and tell how it went."""
    torch.set_num_threads(1)
    number, spec, nbytes, forwards = unpack(payload)
    block = _attached(channel, spec, nbytes)
    module = Product(spec.shapes["first"][0][0])
    weights = named_weights(module)
    torn, versions = 0, set()
    for _ in range(forwards):
        versions.add(block.take(number, weights))
        torn += int((module() != 1).any())
    channel.send({"forwards": forwards, "torn": torn, "versions": len(versions)})
    channel.receive()


@torch.no_grad()
def read_alone(channel, payload):
    """Take weights for ever."""
    number, spec, nbytes = unpack(payload)
    block = _attached(channel, spec, nbytes)
    weights = named_weights(Product(spec.shapes["first"][0][0]))
    channel.send("up")
    while True:
        block.take(number, weights)
