"""The one loop in which a policy meets envs.

Every mode of swath runs these lines: it does not know who called it, where the slab lives or what
becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from swath.observe.timing import SAMPLE_EVERY, Shares

__all__ = ["run"]


def run(
    steps: int,
    act: Callable[[int], None],
    step: Callable[[int], Sequence[int]],
    settle: Callable[[int, Sequence[int]], bool],
    shares: Shares,
) -> None:
    """Fill rows 0 to `steps` - 1 of a slab, or fewer if `settle` says so.

    Args:
        steps: How many steps to make.
        act: Reads row t of the observations, writes row t of the actions.
        step: Reads row t of the actions, writes what followed; returns the envs that ended.
        settle: Closes row t: next observations, ended episodes, resets. True stops the rollout.
        shares: Where the time of a sample of the steps is added.
    """
    for t in range(steps):
        shares.steps += 1
        if shares.steps % SAMPLE_EVERY:
            act(t)
            ended = step(t)
        else:
            before = perf_counter()
            act(t)
            between = perf_counter()
            ended = step(t)
            shares.env += perf_counter() - between
            shares.policy += between - before
            shares.sampled_steps += 1
        if settle(t, ended):
            return
