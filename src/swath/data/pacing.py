"""Who waits for whom: learner and collectors held to a ratio, batches drawn ahead by threads."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swath.data.storage import Word
from swath.errors import UsageError, WorkerError
from swath.helpers import Helper
from swath.owner import Owner

__all__ = ["Feeders", "Pace", "Prefetcher", "Stopped"]


@dataclass(frozen=True)
class Pace:
    """When samples may be drawn and frames written: decisions over the words of a ledger, no I/O.

    No writer is held back while a sampler waits: who cannot draw, for whatever reason, says so in
    the word `STARVED`, together with the number of frames that were written until then. It stands
    for as long as that number does: the next write ends it, and whoever still cannot draw says so
    again. So a sampler that is killed while it waits leaves nothing behind but leave for one write.
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

    def ahead(self, words: Sequence[int]) -> float:
        """Return how many samples fewer have been drawn than the ratio asks for."""
        assert self.samples_per_insert is not None
        frames = words[Word.WRITTEN] - self.min_size
        return self.samples_per_insert * frames - words[Word.DRAWN]

    def may_draw(self, words: Sequence[int], under_way: int = 0) -> bool:
        """Tell whether a sample may be drawn now; of a tie, the other side goes first.

        Args:
            words: Of the ledger.
            under_way: Samples that other threads are drawing, and that are not counted yet.
        """
        free = self.samples_per_insert is None
        return self._is_stocked(words) and (free or self.ahead(words) - under_way > -self.tolerance)

    def may_write(self, words: Sequence[int]) -> bool:
        """Tell whether frames may be written now."""
        if self.samples_per_insert is None or words[Word.FREE] > 0 or not self._is_stocked(words):
            return True
        return words[Word.STARVED] == words[Word.WRITTEN] + 1 or self.ahead(words) <= self.tolerance

    @staticmethod
    def starve(words: MutableSequence[int] | memoryview[int], written: int) -> None:
        """Note that somebody could not draw from the first `written` frames, if there are no more.

        If there are more by now, it is not known, and they try again.
        """
        if words[Word.WRITTEN] == written:
            words[Word.STARVED] = written + 1

    def _is_stocked(self, words: Sequence[int]) -> bool:
        """Tell whether there are frames enough, those from before it was emptied left out."""
        frames = words[Word.WRITTEN] - words[Word.CLEARED]
        return words[Word.HELD] > 0 and frames >= self.min_size

    def until(
        self, attempt: Callable[[], Any], check: Callable[[], None], what: Callable[[], str]
    ) -> Any:
        """Return what `attempt` returns once that is not None.

        Args:
            attempt: Is called again and again.
            check: Is called in between, and raises if it is in vain.
            what: Says what is waited for, when that took too long.
        """
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        pause = 1e-5
        while (answer := attempt()) is None:
            check()
            if deadline is not None and time.monotonic() > deadline:
                raise WorkerError(f"waited {self.timeout} s (timeout) {what()}.")
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        return answer


class Feeders:
    """Those who fill a buffer in the background, each by a name that no other has."""

    def __init__(self) -> None:
        self._watches: dict[str, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._watches)

    def note(self, who: str, watch: Callable[[], object] | None) -> None:
        """Note that somebody begins, with what is to be called while others wait; None: ends."""
        if watch is None:
            self._watches.pop(who, None)
        else:
            self._watches[who] = watch

    def check(self) -> None:
        """Let each of them raise what the caller is to hear while it waits."""
        for watch in tuple(self._watches.values()):
            watch()


class Stopped(Exception):
    """The prefetcher was closed while a thread was waiting for a batch."""


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
