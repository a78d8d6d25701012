"""What is said to a Ray actor that shares no machine with your process: calls, and their answers.

```
  your process                                         actor
  Calls  ---- tell(n, message), ask(n, message) ---->  RayPort
     |   <=== the answer of an ask: a report, and one block
     |   ==== weights: with an ask, or by push(n, ...) if it is at work: one object for all ===>
```

Calls may overtake each other, so each has a number, and the port takes them in order; so do
answers. A call that ends rings a bell, in a thread of Ray's. A block comes as one numpy array in
Ray's store, which is read-only: it is copied once, into the slab, and let go. Only the
newest weights are sent: with the next order if orders come at least every 0.1 s, else in a call of
their own, at most twice per rollout.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from swath.links.bell import Bell
from swath.links.cluster import needed
from swath.links.remote import Expected, Inbox, Interrupt
from swath.memory import SharedMemory

__all__ = ["DIED", "Calls", "RayPort", "when_done", "words", "writable"]

DIED = "died: its process crashed or was killed (often because memory ran out)."
_END = object()
_NEAR = 0.05
"""Seconds that weights may wait for an order."""


class Calls:
    """Your process's side.

    Args:
        actor: That is called.
        bell: Rung when there is something new to be heard.
    """

    def __init__(self, actor: Any, bell: Bell) -> None:
        self._actor, self._bell = actor, bell
        self._lock, self._sends = threading.Lock(), threading.RLock()
        self._numbers = itertools.count()
        self._newest: tuple[Any, Any] | None = None  # pushed, and not on its way yet
        self._pushing, self._sent = False, -math.inf  # is one on its way; when was one sent
        self._timer: threading.Timer | None = None  # that sends what was held back
        self._pace, self._came = 0.0, 0.0  # seconds between two rollouts, and when the last came
        self._expected: deque[Expected | None] = deque([None])
        self._answers: dict[int, Any] = {}
        self._arrived: deque[Any] = deque()
        self._asked, self._heard = 1, 0
        self._reason: str | None = None
        self._interrupted = self._closed = False
        # The first word of a worker answers nothing.
        when_done(actor.ask.remote(None, 0, None, ()), functools.partial(self._answer, 0))

    def end(self, reason: str) -> None:
        """Take note that the actor has ended."""
        with self._lock:
            self._reason = self._reason or reason
            self._release()

    def _answer(self, turn: int, answer: Any, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._reason = self._reason or words(error)
            self._answers[turn] = _END if error is not None else answer
            self._release()

    def _release(self) -> None:
        """Let answers be heard that all before have come; then the end."""
        before = len(self._arrived)
        while self._heard in self._answers:
            self._arrived.append(self._answers.pop(self._heard))
            self._heard += 1
        if self._reason is not None and self._heard == self._asked:
            self._arrived.append(_END)
        if len(self._arrived) > before and not self._closed:
            self._bell.ring()  # only if there is something new: who hears it, takes one

    def _check(self) -> None:
        if self._reason is not None or not needed().is_initialized():
            raise EOFError(self._reason)

    def _call(self, method: Any, *arguments: Any) -> Any:
        self._check()
        try:
            return method.remote(next(self._numbers), *arguments)
        except Exception as error:  # it is of a cluster that we left, which Ray has no class for
            self._asked = self._heard  # nothing more comes
            self.end(words(error))
            raise EOFError(self._reason) from error

    def limit(self, seconds: float | None) -> None:
        """Nothing: a call of Ray waits for nobody."""

    def send(self, message: Any, sizes: Sequence[int] = ()) -> None:
        """Send a message, with memory for the worker to make; EOFError if it is gone."""
        with self._sends:
            self._call(self._actor.tell, message, sizes)

    def send_last(self, message: Any) -> None:
        """Send a message that nothing follows."""
        self.send(message)

    def ask(
        self, message: Any, sizes: Sequence[int] = (), expected: Expected | None = None
    ) -> None:
        """Send a message that is answered, with a block if one is expected."""
        with self._sends:
            turn, pushed = self._asked, self._newest or ()
            call = self._call(self._actor.ask, turn, message, sizes, *pushed)
            if pushed:
                self._newest, self._sent = None, monotonic()
            self._expected.append(expected)
            self._asked += 1
        when_done(call, functools.partial(self._answer, turn))

    def push(self, message: Any, block: Any) -> None:
        """Send a message that the worker reads even in a rollout, with an object.

        One that has not been sent when the next comes is not sent at all.
        """
        with self._sends:
            self._check()
            self._newest = message, block
            self._send_newest()

    def _send_newest(self) -> None:
        if self._newest is None or self._pushing or self._heard == self._asked:
            return
        held_back = self._sent + max(_NEAR, self._pace / 2) - monotonic()
        if held_back <= 0:
            call = self._call(self._actor.push, *self._newest)
            self._newest, self._pushing, self._sent = None, True, monotonic()
            when_done(call, self._pushed)
        elif self._timer is None and not 0 < self._pace < 2 * _NEAR:
            self._timer = threading.Timer(held_back, self._late)
            self._timer.daemon = True
            self._timer.start()

    def _pushed(self, _: Any, error: BaseException | None) -> None:
        with self._sends, contextlib.suppress(EOFError):
            self._pushing = False
            self._send_newest()

    def _late(self) -> None:
        with self._sends, contextlib.suppress(EOFError):
            self._timer = None
            self._send_newest()

    def receive(self) -> Any:
        """Wait for a message, and put its block where it belongs; EOFError if it is gone."""
        self._bell.take()
        with self._lock:
            answer = self._arrived.popleft()
            if answer is _END:
                self._arrived.append(_END)
            if self._arrived:
                self._bell.ring()
        if answer is _END:
            raise EOFError(self._reason)
        report, block = answer
        expected = self._expected.popleft()
        if expected is not None:
            now = monotonic()
            self._pace, self._came = (now - self._came if self._came else 0.0), now
        if block is not None and expected is not None:
            expected.came(block)
        return pickle.loads(report)

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        if on != self._interrupted:
            self._interrupted = on
            with contextlib.suppress(EOFError):
                self.send(Interrupt(on))

    def close(self) -> None:
        """Ring no more."""
        with self._lock:
            self._closed = True
        with self._sends:
            if self._timer is not None:
                self._timer.cancel()


def when_done(call: Any, then: Callable[[Any, BaseException | None], None]) -> None:
    """Call `then` with what a call of an actor returns or raises, in a thread of Ray's."""

    def done(future: Any) -> None:
        error = future.exception()
        then(None if error is not None else future.result(), error)

    call.future().add_done_callback(done)


def words(error: BaseException) -> str:
    """Return why an actor ended, in a line."""
    text = str(error)
    if "process has died" in text:
        return DIED
    if "node has died" in text:
        return "died with its node."
    if "ray.kill" in text:
        return "was killed through Ray."
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"was lost: {type(error).__name__}: {(lines or [''])[0][:300]}"


# -- the worker's side --------------------------------------------------------------------------


class RayPort(Inbox):
    """The worker's end; the actor's threads put messages in and take reports out."""

    def __init__(self) -> None:
        super().__init__()
        self._early: dict[int, tuple[Any, ...]] = {}
        self._next, self._delivering = 0, threading.Lock()
        self._state = threading.Condition()
        self._reports: dict[int, Any] = {}
        self._turns = itertools.count()
        self._over = False

    def deliver(self, number: int, *what: Any) -> None:
        """Take what was pushed and a message, if there are any, when their turn has come."""
        with self._delivering:
            self._early[number] = what
            while self._next in self._early:
                now, self._next = self._early.pop(self._next), self._next + 1
                self._take_in(*now)

    def _take_in(
        self, message: Any, sizes: Sequence[int], pushed: Any = None, block: Any = None
    ) -> None:
        if pushed is not None:
            self._put(pushed, (), writable(block))
        if message is not None:
            self._put(message, sizes, None)

    def report(self, turn: int) -> Any:
        """Wait for the report with this number; EOFError if the worker ends without it."""
        with self._state:
            self._state.wait_for(lambda: turn in self._reports or self._over)
            if turn not in self._reports:
                raise EOFError("the worker has ended")
            return self._reports.pop(turn)

    def send(self, message: Any, memory: SharedMemory | None = None) -> None:
        """Let a report be taken, with a block, which must stay as it is until it was."""
        block = None if memory is None else memory.array
        with self._state:
            # As bytes: arrays inside would come out read-only, as Ray's do.
            self._reports[next(self._turns)] = pickle.dumps(message), block
            self._state.notify_all()

    def close(self) -> None:
        """Let who waits for reports know that there will be none."""
        with self._state:
            self._over = True
            self._state.notify_all()


def writable(block: np.ndarray) -> np.ndarray:
    """Return the same memory as torch wants it; it is Ray's and must only be read."""
    if block.flags.writeable:
        return block
    if not block.nbytes:
        return block.copy()
    pointer: Any = (ctypes.c_uint8 * block.nbytes).from_address(block.ctypes.data)
    pointer.owner = block
    return np.frombuffer(pointer, np.uint8)
