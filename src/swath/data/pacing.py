"""Who waits for whom: learner and collectors held to a ratio, batches drawn ahead by threads."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from swath.data.storage import Ring, Word
from swath.errors import UsageError, WorkerError
from swath.helpers import Helper
from swath.owner import Owner

__all__ = ["Pace", "Prefetcher", "Stopped"]


@dataclass(frozen=True)
class Pace:
    """When samples may be drawn and frames written.

    Both are asked before the act and neither for its size, so that they never wait for one another:
    at any time one of them may go on.
    """

    min_size: int = 1
    samples_per_insert: float | None = None
    tolerance: float = 1024.0
    timeout: float | None = None

    def __post_init__(self) -> None:
        ratio = self.samples_per_insert
        if self.min_size < 1 or self.tolerance < 0 or (ratio is not None and not ratio > 0):
            raise UsageError(
                "min_size must be at least 1, samples_per_insert positive or None, and tolerance "
                f"not negative; got {asdict(self)}."
            )

    def ahead(self, ring: Ring) -> float:
        """Return how many samples fewer have been drawn than the ratio asks for."""
        assert self.samples_per_insert is not None
        frames = ring.words[Word.WRITTEN] - self.min_size
        return self.samples_per_insert * frames - ring.words[Word.DRAWN]

    def may_draw(self, ring: Ring) -> bool:
        """Tell whether a sample may be drawn now; of a tie, the other side goes first."""
        ratio = self.samples_per_insert
        return self._is_stocked(ring) and (ratio is None or self.ahead(ring) > -self.tolerance)

    def may_write(self, ring: Ring) -> bool:
        """Tell whether frames may be written now."""
        ratio = self.samples_per_insert
        free = ratio is None or ring.words[Word.FREE] > 0 or not self._is_stocked(ring)
        return free or self.ahead(ring) <= self.tolerance

    def _is_stocked(self, ring: Ring) -> bool:
        """Tell whether there are frames enough, those from before it was emptied left out."""
        frames = ring.words[Word.WRITTEN] - ring.words[Word.CLEARED]
        return ring.words[Word.HELD] > 0 and frames >= self.min_size

    def until(self, attempt: Callable[[], Any], check: Callable[[], None], what: str) -> Any:
        """Return what `attempt` returns once that is not None; `check` raises if it is in vain."""
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        pause = 1e-5
        while (answer := attempt()) is None:
            check()
            if deadline is not None and time.monotonic() > deadline:
                raise WorkerError(f"waited {self.timeout} s (timeout) {what}.")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return answer


class Stopped(Exception):
    """A prefetcher was ended under somebody who waits for it."""


class Prefetcher:
    """Threads that call `make` of a buffer ahead of time; what they raise is raised by `next`."""

    def __init__(self, owner: Any, make: Callable[[Any, threading.Event], Any], count: int) -> None:
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(count)
        self._stop = threading.Event()
        self.process = Owner("replay buffer, from which threads draw ahead (prefetch),")
        owner_of = weakref.ref(owner)  # a buffer that nobody holds any more is not kept by these
        self._threads = [
            Helper(self._run, "prefetch", self._stop.set, (owner_of, make)) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(
        self, owner_of: Callable[[], Any], make: Callable[[Any, threading.Event], Any]
    ) -> None:
        while not self._stop.is_set():
            owner = owner_of()
            answer: tuple[Any, BaseException | None]
            if owner is None:
                return
            try:
                answer = make(owner, self._stop), None
            except BaseException as error:
                answer = None, error
            del owner
            while not self._stop.is_set():
                try:
                    self._ready.put(answer, timeout=0.05)
                    break
                except queue.Full:
                    if owner_of() is None:
                        return

    def next(self, check: Callable[[], None]) -> Any:
        """Return the next batch, in the order in which they became ready, or raise `Stopped`."""
        while True:
            try:
                batch, error = self._ready.get(timeout=0.05)
            except queue.Empty:
                check()
                if self._stop.is_set():
                    raise Stopped from None
                continue
            if error is not None:
                raise error
            return batch

    def close(self) -> None:
        """End the threads; what they had drawn is thrown away."""
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
