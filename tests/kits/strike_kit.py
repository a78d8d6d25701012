"""Signals at exact places: wherever Python looks for signals while it runs given files."""

from __future__ import annotations

import _thread
import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any


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
