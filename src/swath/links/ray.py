"""The link between your process and a worker in a Ray actor, and the cluster that it runs on.

```
  your process                                                  actor
  RayLink  ---- tell(n, message), ask(n, message): calls ---->  RayPort -- worker, in run()
      |    <=== the answer of an ask: a report, and one block       |
      |    ==== weights: with an ask, or by push(n, ...) if it is at work: one object for all ===>
      '--- the end of run() is the end of the worker ------------'
```

Calls of one link may overtake each other, so each has a number, and the port takes them in order;
so do answers. Nobody polls: a call that ends rings a bell, in a thread of Ray's, and the crew waits
for bells. A block comes as one numpy array in Ray's store, which is read-only: it is copied once,
into the slab, and let go. Of weights only the newest matter: they go with the next order, or, if
that is not near, by themselves, twice in a rollout at most.

An actor on this machine comes in by a door (`links/door.py`), and is then spoken with as a process
is (`links/process.py`): it maps memory of this process, and Ray has only to say how it ends.

The place owns the actor; order of shutdown: `close` message, the end of `run`, or the time limit,
then the actor is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import pickle
import select
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

import numpy as np

from swath.links.bell import Bell
from swath.links.door import Door
from swath.links.process import Wire
from swath.links.remote import Expected, Inbox, Interrupt
from swath.memory import SharedMemory

__all__ = ["RayLink", "RayPort", "enter", "leave", "needed", "writable"]

_END = object()
_ENDING = 5000
"""Milliseconds for a process that Ray has killed to be gone."""
_NEAR = 0.05
"""Seconds that weights may wait for an order."""


def needed() -> Any:
    """Return the module `ray`, imported on first use."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("Ray is not installed; this needs it: pip install swath[ray]") from error
    return ray


def writable(block: np.ndarray) -> np.ndarray:
    """Return the same memory as torch wants it; it is Ray's and must only be read."""
    if block.flags.writeable or not block.nbytes:
        return block
    pointer: Any = (ctypes.c_uint8 * block.nbytes).from_address(block.ctypes.data)
    pointer.owner = block
    return np.frombuffer(pointer, np.uint8)


# -- the cluster --------------------------------------------------------------------------------

_users, _entering = 0, threading.Lock()


def enter(address: str | None, config: Mapping[str, Any], cpus: float) -> None:
    """Use the cluster that this process is connected to, or connect, or start one here.

    Args:
        address: Of a cluster that runs; by default what `RAY_ADDRESS` says, if anything.
        config: Further arguments of `ray.init`.
        cpus: That a cluster of our own must offer, whatever the machine has.
    """
    global _users
    ray = needed()
    with _entering:
        if not ray.is_initialized():
            _users = 0
            options = {"logging_level": "error", "log_to_driver": False, **config}
            options.setdefault("address", address or os.environ.get("RAY_ADDRESS"))
            if options["address"] in (None, "local"):
                options["address"] = "local"
                options.setdefault("include_dashboard", False)
                options.setdefault("num_cpus", max(int(-(-cpus // 1)), os.cpu_count() or 1))
                options.setdefault("object_store_memory", 1 << 30)
            ray.init(**options)
            _users = 1
        elif _users:
            _users += 1


def leave() -> None:
    """End what `enter` has begun, when nobody else uses it."""
    global _users
    with _entering:
        if _users:
            _users -= 1
            if not _users and needed().is_initialized():
                needed().shutdown()


# -- your process's side ------------------------------------------------------------------------


class RayLink:
    """Your process's end.

    Args:
        actor: That has the methods of a `RayPort`'s owner; see `workers/ray.py`.
        job: What its `run` is called with.
        where: Says in words why the actor has found no place yet.
        on_close: Called once the actor is let go.
        door: By which it comes in if it is on this machine; the actor knows its name.
    """

    shares_memory = False
    sentinel = None

    def __init__(
        self,
        actor: Any,
        job: bytes,
        where: Callable[[], str],
        on_close: Callable[[], None],
        door: Door,
    ) -> None:
        self._actor, self._where, self._on_close = actor, where, on_close
        self.name = f"actor {actor._actor_id.hex()[:8]}, not placed"
        self.pid: int | None = None
        self.host: str | None = None
        self.attached: set[int] = set()
        """Numbers of the memory that the worker has, for who gives it some."""
        self._bell, self._lock = Bell(), threading.Lock()
        self._ready: Any = self._bell  # what to wait on
        if door.name is not None:
            self._ready = select.epoll()
            self._ready.register(self._bell, select.POLLIN)
        self._sends, self._numbers = threading.RLock(), itertools.count()
        self._early: list[tuple[Any, ...]] | None = []  # until it is known how to speak with it
        self._newest: tuple[Any, Any] | None = None  # pushed, and not on its way yet
        self._pushing, self._sent = False, -math.inf  # is one on its way; when was one sent
        self._timer: threading.Timer | None = None  # that sends what was held back
        self._pace, self._came = 0.0, 0.0  # seconds between two rollouts, and when the last came
        self._expected: deque[Expected | None] = deque([None])
        self._answers: dict[int, Any] = {}
        self._arrived: deque[Any] = deque()
        self._asked, self._heard = 1, 0  # the first word of a worker answers nothing
        self._reason: str | None = None
        self._interrupted = self._closed = self._killed = False
        self._ended = threading.Event()
        self._door = door
        self._wire: Wire | None = None
        self._process: int | None = None  # its descriptor, if it is on this machine
        _when_done(actor.here.remote(), self._placed)
        _when_done(actor.run.remote(job), self._over)

    def _placed(self, about: Any, error: BaseException | None) -> None:
        if error is not None:
            self._answer(0, None, error)
            return
        with self._sends:
            self.pid, self.host, node, knocked = about
            actor = self._actor._actor_id.hex()[:8]
            self.name = f"actor {actor} on {self.host} ({node}), process {self.pid}"
            if knocked:
                self._let_in()
            self._door.close()
            if not self.near:
                call = self._actor.ask.remote(None, 0, None, ())
                _when_done(call, functools.partial(self._answer, 0))
            early, self._early = self._early or (), None
            with contextlib.suppress(EOFError):
                for send, *what in early:
                    send(*what)

    def _let_in(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._closed:
                channel, self._process = self._door.open()
                self._wire = Wire(channel)
                self._ready.register(self._wire, select.POLLIN)

    @property
    def near(self) -> bool:
        """Whether the actor maps memory of this process; known when it has said a word."""
        return self._wire is not None

    def _end_here(self) -> None:
        """See the end of an actor that maps memory: it must not write there any more.

        Ray says that an actor was killed, not that it is dead.
        """
        with self._lock:
            if self._process is not None:
                ended = select.poll()
                ended.register(self._process, select.POLLIN)
                if not ended.poll(_ENDING):
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(self._process, signal.SIGKILL)
                    ended.poll(_ENDING)

    def _over(self, _: Any, error: BaseException | None) -> None:
        with self._lock:
            self._reason = "has ended." if error is None else _words(error)
            self._release()
        self._ended.set()

    def _answer(self, turn: int, answer: Any, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._reason = self._reason or _words(error)
            self._answers[turn] = _END if error is not None else answer
            self._release()

    def _release(self) -> None:
        """Let answers be heard that all before have come; then the end."""
        before = len(self._arrived)
        while self._heard in self._answers:
            self._arrived.append(self._answers.pop(self._heard))
            self._heard += 1
        if self._reason is not None and (self.near or self._heard == self._asked):
            self._arrived.append(_END)
        if len(self._arrived) > before and not self._closed:
            self._bell.ring()  # only if there is something new: who hears it, takes one

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return self._ready.fileno()

    def _check(self) -> None:
        if self._reason is not None or not needed().is_initialized():
            raise EOFError(self._reason)

    def _call(self, method: Any, *arguments: Any) -> Any:
        self._check()
        return method.remote(next(self._numbers), *arguments)

    def send(self, message: Any, memory: Sequence[Any] = ()) -> None:
        """Send a message, with memory of this process, or sizes of what the worker is to make.

        The former is for one that is near. EOFError if the worker is gone.
        """
        with self._sends:
            if self._early is not None:
                self._early.append((self.send, message, memory))
            elif self._wire is not None:
                self._wire.send(message, memory)
            else:
                self._call(self._actor.tell, message, memory)

    def ask(
        self, message: Any, memory: Sequence[Any] = (), expected: Expected | None = None
    ) -> None:
        """Send a message that is answered, with a block if one is expected; see `send`."""
        with self._sends:
            if self._early is not None:
                self._early.append((self.ask, message, memory, expected))
            elif self._wire is not None:
                self._wire.send(message, memory)
            else:
                turn, pushed = self._asked, self._newest or ()
                call = self._call(self._actor.ask, turn, message, memory, *pushed)
                if pushed:
                    self._newest, self._sent = None, monotonic()
                self._expected.append(expected)
                self._asked += 1
                _when_done(call, functools.partial(self._answer, turn))

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
            _when_done(call, self._pushed)
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
        if self._early is not None:
            wait([self.fileno()])
        if self._wire is not None:
            if self._reason is not None and not self._wire.waits():
                raise EOFError(self._reason)
            return self._wire.receive()
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

    def waits(self) -> bool:
        """Tell whether a message waits."""
        return bool(self._arrived) or (self._wire is not None and self._wire.waits())

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        with self._sends:
            if self._early is not None:
                self._early.append((self.interrupt, on))
            elif self._wire is not None:
                self._wire.interrupt(on)
            elif on != self._interrupted:
                self._interrupted = on
                with contextlib.suppress(EOFError):
                    self.send(Interrupt(on))

    def ended(self) -> str:
        """Say how the worker ended, or why it has not begun."""
        if self._process is not None:
            self._ended.wait(_ENDING / 1000)  # its connection has ended, which Ray hears of later
            self.kill()  # its worker has ended, the actor may not have
        if self.pid is None and (self._reason is None or self._killed):
            return self._where()
        return self._reason or "was lost."

    def kill(self) -> None:
        """End the actor, whatever it is doing."""
        if needed().is_initialized():
            self._killed = True  # if it had no place, that is how it ended
            needed().kill(self._actor, no_restart=True)
            self._end_here()

    def close(self, timeout: float | None = None) -> None:
        """Let go of the actor once its worker has ended; kill it after `timeout` seconds."""
        if needed().is_initialized():
            self._ended.wait(0.0 if self.pid is None else timeout)
            self.kill()
        with self._lock:
            closed, self._closed = self._closed, True
            process, self._process = self._process, None
        if process is not None:
            os.close(process)
        with self._sends:
            if self._timer is not None:
                self._timer.cancel()
        if not closed:
            for one in {self._door, self._wire, self._bell, self._ready} - {None}:
                one.close()
            self._on_close()


def _when_done(call: Any, then: Callable[[Any, BaseException | None], None]) -> None:
    """Call `then` with what a call of an actor returns or raises, in a thread of Ray's."""

    def done(future: Any) -> None:
        error = future.exception()
        then(None if error is not None else future.result(), error)

    call.future().add_done_callback(done)


def _words(error: BaseException) -> str:
    """Return why an actor ended, in a line."""
    text = str(error)
    if "process has died" in text:
        return "died: its process was killed or crashed (killed, often out of memory)."
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
