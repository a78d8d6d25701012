"""Contestants take turns; ratios are taken within a round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Turn = Callable[[], int]
"""Collects one batch, uses it on the device without waiting, and returns its frames."""


def race(
    contestants: Mapping[str, Callable[[], Turn]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Return frames per second of each contestant in each round; the first round is dropped."""
    turns = {name: make() for name, make in contestants.items()}
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            speed = _timed(turns[name], seconds)
            if number:
                speeds[name].append(speed)
    for turn in turns.values():
        close = getattr(turn, "close", None)
        if close:
            close()
    del turns
    gc.collect()
    torch.cuda.empty_cache()
    return speeds


def _timed(turn: Turn, seconds: float) -> float:
    frames = 0
    torch.cuda.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or not frames:
        for _ in range(8):
            frames += turn()
        torch.cuda.synchronize()  # so that the host runs ahead by a few batches, not by many
    return frames / (time.perf_counter() - started)


def summary(speeds: Mapping[str, list[float]], against: Mapping[str, str]) -> dict[str, float]:
    """Return the median speed of each, and the median of ratios `"ours / theirs"`."""
    out = {name: statistics.median(values) for name, values in speeds.items() if values}
    for ours, theirs in against.items():
        if speeds.get(ours) and speeds.get(theirs):
            pairs = zip(speeds[ours], speeds[theirs], strict=True)
            out[f"{ours} / {theirs}"] = statistics.median(a / b for a, b in pairs)
    return out
