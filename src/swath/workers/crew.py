"""The workers of one collector: started, listened to, ended.

```
                 orders                          reports
  delivery  --------------> Crew ==links==> workers
            <--------------  |  one wait: all channels, all sentinels, and a bell for shutdown
                reports      '-- answers to calls go to the caller, all else waits in order
```

One thread at a time listens. The crew owns the links; delivery owns slabs and orders. Shutdown,
from any thread: ring the bell (whoever listens leaves with a `ClosedError`), flag and close the
workers, wait for them until the deadline, kill the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from swath.errors import ClosedError
from swath.links import Link, StalledError, in_words, pack
from swath.owner import Owner
from swath.shield import Shield
from swath.workers.messages import (
    Built,
    Close,
    Died,
    Done,
    Failed,
    Job,
    Ready,
    State,
    Value,
)
from swath.workers.place import LocalPlace, Place

__all__ = ["Crew"]

_WAKING = 0.5
"""Seconds for who listens to hear that the crew closes."""
_ANSWERS = (Built, Ready, Done, State, Value)


class Crew:
    """Workers, by number.

    Args:
        jobs: What each worker is to be.
        timeout: The longest time that a worker may take for one answer; None for any time.
        place: Where they run; processes of this machine by default.
    """

    def __init__(
        self, jobs: Sequence[Job], timeout: float | None, place: Place | None = None
    ) -> None:
        self._jobs, self._timeout = list(jobs), timeout
        self.place: Place = LocalPlace() if place is None else place
        self._links: dict[int, Link] = {}
        self._silent: set[int] = set()
        self._owing: dict[int, deque[float]] = {}
        self._reports: deque[tuple[int, Any]] = deque()
        self._unwanted: dict[int, int] = {}
        self._ended: dict[int, Died] = {}
        self._listening = threading.RLock()
        self._closing = threading.Lock()  # taken once, for ever
        try:
            self._bell = os.pipe()
        except OSError:
            self.place.close()
            raise
        self._polled: tuple[tuple[int, Link], ...] | None = None
        self.shield = Shield()
        self._owner = Owner("collector")

    def __len__(self) -> int:
        return len(self._jobs)

    def hire(self, like: int) -> int:
        """Return the number of a further worker, to be launched, with the job of this one."""
        self._jobs.append(replace(self._jobs[like], number=len(self._jobs)))
        return len(self._jobs) - 1

    @property
    def links(self) -> dict[int, Link]:
        """The link to each worker that lives."""
        return self._links

    # -- speaking -------------------------------------------------------------------------------

    def launch(self, numbers: Sequence[int]) -> None:
        """Start workers; each will answer `Built`."""
        with self._listening, self.shield:
            self._check_open()
            jobs = {number: pack(self._jobs[number], "the job") for number in numbers}
            who = f"worker {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} workers"
            with in_words(f"{who} cannot be started"):
                self._links.update(self.place.launch(jobs, self.shield))
            self._silent.update(numbers)
            for number in numbers:
                self._owing[number] = deque([monotonic()])
                self._unwanted[number] = 0
                self._links[number].limit(self._limit(number))

    def dismiss(self, number: int) -> None:
        """End a worker, whatever it is doing, and forget what it has said."""
        link = self._links.pop(number, None)
        if link is not None:
            self._ended[number] = Died(link.name, "was ended and not started again.")
            link.kill()
            link.close()
        self._reports = deque(one for one in self._reports if one[0] != number)

    def retire(self, number: int, timeout: float) -> None:
        """End a worker that is needed no more: asked first, killed after `timeout` seconds."""
        link = self._links.get(number)
        if link is not None:
            link.interrupt()
            with contextlib.suppress(EOFError):
                link.send_last(Close())
            del self._links[number]
            link.close(timeout)
        self.dismiss(number)

    def tell(self, number: int, message: Any, *more: Any) -> None:
        """Send a message that has no answer; if the worker is gone, the next wait says so."""
        link = self._links.get(number)
        if link is not None:
            with contextlib.suppress(EOFError):
                link.send(message, *more)

    def order(self, number: int, message: Any, *more: Any) -> None:
        """Send a message that will be answered; by how it ended, if the worker is gone."""
        link = self._links.get(number)
        if link is not None:
            self._owing[number].append(monotonic())
            with contextlib.suppress(EOFError):
                link.ask(message, *more)
        elif number in self._ended:
            self._reports.append((number, self._ended[number]))

    def interrupt(self, number: int, on: bool = True) -> None:
        """Ask a worker to end its rollout after the step that it is in."""
        if number in self._links:
            self._links[number].interrupt(on)

    # -- listening ------------------------------------------------------------------------------

    def next(self) -> tuple[int, Any]:
        """Wait for the next report of any worker: a rollout, a failure or a death."""
        while not self._reports:
            self._listen()
        return self._reports.popleft()

    def call(self, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Send a message to each of these workers and return their answers.

        A failure or death is the answer, too. Rollouts that are reported meanwhile are kept.
        """
        with self.shield:
            for number, message in messages.items():
                self.order(number, message)
            return self.answers(list(messages))

    def answers(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Wait for one answer from each of these workers."""
        found: dict[int, Any] = {}
        with self.shield:
            try:
                while not self._find(found, numbers):
                    self._listen()
            except KeyboardInterrupt:
                for number in set(numbers) - set(found):
                    self._unwanted[number] += 1
                raise
        return found

    def _find(self, found: dict[int, Any], numbers: Sequence[int]) -> bool:
        """Take answers out of the reports; True when all are there."""
        kept: deque[tuple[int, Any]] = deque()
        for number, report in self._reports:
            final = _is_answer(report) or isinstance(report, Died)
            if number in numbers and number not in found and final:
                found[number] = report
            else:
                kept.append((number, report))
        self._reports = kept
        return len(found) == len(set(numbers))

    def _listen(self) -> None:
        """Wait until there is something new and put it in the queue of reports."""
        with self._listening:
            self._check_open()
            sources = self._watched()
            with self.shield.lifted():
                ready = [descriptor for descriptor, _ in self._poller.poll(self._patience())]
            self._check_open()  # a signal handler of this thread may have closed it meanwhile
            for number in dict.fromkeys(sources[one] for one in ready if one in sources):
                self._hear(number, self._links[number].fileno() in ready)
            self._kill_late()

    def _watched(self) -> dict[int, int]:
        """Return whose each descriptor is that is waited on; they change only with the links."""
        links = tuple(self._links.items())
        if links != self._polled:
            self._polled, self._poller = links, select.poll()
            self._poller.register(self._bell[0], select.POLLIN)
            self._sources = {}
            for number, link in links:
                for descriptor in (link.fileno(), link.sentinel):
                    if descriptor is not None:
                        self._poller.register(descriptor, select.POLLIN)
                        self._sources[descriptor] = number
        return self._sources

    def _check_open(self) -> None:
        if self._closing.locked():
            raise ClosedError("this collector was shut down while a call was waiting for it.")

    def _hear(self, number: int, spoke: bool) -> None:
        link = self._links[number]
        if spoke:
            try:
                report = link.receive()
                if number in self._silent:
                    self._silent.discard(number)
                    link.limit(self._limit(number))
                if self._unwanted[number] and _is_answer(report):  # who asked was interrupted
                    self._unwanted[number] -= 1
                else:
                    self._reports.append((number, report))
                if self._owing[number]:
                    self._owing[number].popleft()
                if self._owing[number]:  # it begins with the next one now
                    self._owing[number][0] = monotonic()
                return
            except StalledError:  # stopped, in a message to us or in one to it: it is late
                self._end_late(number)
                return
            except EOFError:
                pass
        self._bury(number, None)

    def _bury(self, number: int, late: float | None) -> None:
        link = self._links.pop(number)
        unplaced, how = late is not None and link.pid is None, link.ended()
        if late is not None and number in self._silent and self.place.launch_limit is not None:
            if not unplaced:
                how = f"had not made its envs after {late:g} s (launch_timeout) and was killed."
            late = None
        link.kill()
        link.close()
        self._ended[number] = Died(link.name, how, late, unplaced)
        self._reports.append((number, self._ended[number]))

    def _limit(self, number: int) -> float | None:
        """Return how many seconds a worker has for the answer that it owes."""
        first = self.place.launch_limit if number in self._silent else None
        return self._timeout if first is None else first

    def _deadlines(self) -> dict[int, float]:
        limits = {n: self._limit(n) for n in self._links if self._owing[n]}
        return {n: self._owing[n][0] + one for n, one in limits.items() if one is not None}

    def _patience(self) -> int | None:
        """Return how many milliseconds to wait before somebody is too late, or a look is due."""
        waits = [until - monotonic() for until in self._deadlines().values()]
        look = self.place.check()
        if look is not None:
            waits.append(look)
        return max(0, math.ceil(min(waits) * 1000)) if waits else None

    def _kill_late(self) -> None:
        for number, until in self._deadlines().items():
            if monotonic() >= until and not self._links[number].waits():
                self._end_late(number)

    def _end_late(self, number: int) -> None:
        self._links[number].kill()
        self._bury(number, self._limit(number))

    # -- the end --------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """End all workers, once: asked first, killed after `timeout` seconds."""
        with self.shield:  # or what is left would never be ended
            if self._owner.is_here and self._closing.acquire(blocking=False):
                self._close(timeout)

    def _close(self, timeout: float) -> None:
        os.write(self._bell[1], b"!")
        self.place.close()
        with self._listened_no_more(timeout):
            links, self._links = self._links, {}
            for link in links.values():
                link.interrupt()
                with contextlib.suppress(EOFError):
                    link.send_last(Close())
            deadline = monotonic() + timeout
            for link in links.values():
                link.close(max(0.0, deadline - monotonic()))
            for end in self._bell:
                os.close(end)

    @contextlib.contextmanager
    def _listened_no_more(self, timeout: float) -> Iterator[None]:
        """Wait until nobody listens any more.

        The bell does not wake who is in the middle of a message whose rest does not come, from a
        worker that was stopped, say: the end of the worker does.
        """
        if not self._listening.acquire(timeout=min(timeout + _WAKING, threading.TIMEOUT_MAX)):
            for link in list(self._links.values()):
                link.kill()
            self._listening.acquire()
        try:
            yield
        finally:
            self._listening.release()


def _is_answer(report: Any) -> bool:
    return isinstance(report, _ANSWERS) or (isinstance(report, Failed) and report.slab is None)
