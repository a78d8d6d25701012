"""Does memory on the device stay flat, and how many bytes move for a frame?"""

from __future__ import annotations

import math

import torch

from bench.gpu.native import STEPS, Swath
from swath.memory import Field


def flat(envs: int = 4096, rollouts: int = 1000) -> dict[str, float]:
    """Return what is allocated after 10 rollouts, and after many more."""
    collected = Swath(envs, True)
    before = after = 0
    for number in range(rollouts):
        collected()
        if number == 9:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    made = collected.collector.stats()["slabs"]
    collected.close()
    return {"bytes after 10": before, f"bytes after {rollouts}": after, "slabs": made}


def moved(envs: int = 4096) -> dict[str, float]:
    """Return the bytes of a frame in a batch, and those written for it in a rollout."""
    collected = Swath(envs, True)
    collected()
    layout = collected.collector._runner.layout
    collected.close()
    frames = envs * STEPS
    delivered = sum(
        math.prod(place.field.shape) * place.field.dtype.itemsize
        for place in layout.places.values()
        if _counts(place.field)
    )
    # Written once into the static slab; read there and written again into the one that is lent.
    return {"least": delivered, "slab": layout.nbytes / frames, "moved": 3 * layout.nbytes / frames}


def _counts(field: Field) -> bool:
    return field.delivered
