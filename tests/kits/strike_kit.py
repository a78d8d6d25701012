"""Signals at exact places: wherever Python looks for signals while it runs given files.

And what must be true of frames although collecting was interrupted.
"""

from __future__ import annotations

import _thread
import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swath.testing.envs import episode_plan


class Strikes:
    """Send SIGINT to this process at the n-th place, for each n of `at`, while the block runs.

    Python looks for signals where a function begins and where one in C has returned; each such
    place in a function of these files counts.

    Args:
        within: Tells by the path of a file whether it counts.
        at: The places, from 1 on.
    """

    def __init__(self, within: Callable[[str], bool], at: Iterable[int] = ()) -> None:
        self.places, self._within, self._at = 0, within, set(at)
        # To look up what is not there sends the signal, and is no call: Python does not look for it
        # before it is back in the function that is struck.
        self._send: Any = collections.defaultdict(_thread.interrupt_main)

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and self._within(frame.f_code.co_filename):
            self.places += 1
            if self.places in self._at:
                self._send[self.places]

    def __enter__(self) -> Strikes:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)


def check_cut_transitions(batches: Iterable[Any], longest: int = 9) -> int:
    """Assert that batches hold transitions of `CountingEnv`s, once each, and no episode has holes.

    As `check_transitions`, but episodes may be cut anywhere, and need not come in order.
    """
    episodes: dict[tuple[int, int], dict[int, int]] = collections.defaultdict(dict)
    for batch in batches:
        whole = torch.ones(batch.shape, dtype=torch.bool)
        batch = batch[batch.get(("collector", "mask"), whole)]
        here, there = batch["observation"].long(), batch["next", "observation"].long()
        assert (there == here + torch.tensor([0, 0, 1])).all(), (here, there)
        ids, done = batch["collector", "traj_ids"].tolist(), batch["next", "done"].reshape(-1)
        for (stamp, episode, step), number, ended in zip(
            here.tolist(), ids, done.tolist(), strict=True
        ):
            length, *_ = episode_plan(stamp, episode, longest)
            assert ended == (step + 1 == length), (stamp, episode, step)
            assert step not in episodes[stamp, episode], (stamp, episode, step)
            episodes[stamp, episode][step] = number
    for which, steps in episodes.items():
        assert sorted(steps) == list(range(len(steps))), (which, sorted(steps))
        assert len(set(steps.values())) == 1, (which, steps)
    numbers = [next(iter(steps.values())) for steps in episodes.values()]
    assert len(set(numbers)) == len(numbers)
    return sum(map(len, episodes.values()))
