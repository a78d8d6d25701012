"""The link between your process and a worker in a Ray actor.

```
  your process                                                  actor
  RayLink  ---- here(), run(job): calls ------------------->  Host -- worker, in run()
      |    <=== it comes in by a door: Wire ================>   |  on this machine
      |    <=== it does not: Calls =========================>   |  on another
      '--- the end of run() is the end of the worker ------------'
```

An actor on this machine comes in by a door (`links/door.py`), and is then spoken with as a process
is (`links/process.py`): it maps memory of this process, and Ray has only to say how it ended. What
is said to others, and their rollouts and weights, goes through Ray (`links/calls.py`).

The place owns the actor; order of shutdown: `close` message, the end of `run`, or the time limit,
then the actor is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from swath.compat.ray import actor_id
from swath.links.bell import Bell
from swath.links.calls import DIED, Calls, when_done, words
from swath.links.cluster import needed
from swath.links.door import Door
from swath.links.process import Wire
from swath.links.remote import Expected

__all__ = ["RayLink"]

_ONE_AT_A_TIME = ("send", "ask")
_ENDING = 5000
"""Milliseconds for a process that Ray has killed to be gone."""


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
        self.name = f"actor {actor_id(actor)[:8]}, not placed"
        self.pid: int | None = None
        self.host: str | None = None
        self.attached: set[int] = set()
        """Numbers of the memory that the worker has, for who gives it some."""
        self._bell, self._lock, self._sends = Bell(), threading.RLock(), threading.Lock()
        self._ready: Any = self._bell  # what to wait on
        if door.name is not None:
            self._ready = select.epoll()
            self._ready.register(self._bell, select.POLLIN)
        self._talk: Wire | Calls | None = None  # until it is known where the actor is
        self._early: list[tuple[str, Any]] = []  # what is to be said then
        self._reason: str | None = None
        self._known = self._closed = self._killed = False
        self._ended = threading.Event()
        self._door = door
        self._process: int | None = None  # its descriptor, if it is on this machine
        when_done(actor.here.remote(), self._placed)
        when_done(actor.run.remote(job), self._over)

    def _placed(self, about: Any, error: BaseException | None) -> None:
        with self._lock:
            if error is None and not self._closed:
                self.pid, self.host, node, knocked = about
                actor = actor_id(self._actor)[:8]
                self.name = f"actor {actor} on {self.host} ({node}), process {self.pid}"
                talk = (self._let_in() if knocked else None) or Calls(self._actor, self._bell)
                with contextlib.suppress(EOFError):
                    for method, what in self._early:
                        getattr(talk, method)(*what)
                self._talk = talk
            self._door.close()
            self._known = True
            self._tell_end(None if error is None else words(error))

    def _let_in(self) -> Wire | None:
        try:
            channel, self._process = self._door.open()
        except OSError:
            return None
        try:
            wire = Wire(channel)
            self._ready.register(wire, select.POLLIN)
        except (OSError, RuntimeError):  # such as no descriptors left
            channel.close()
            os.close(self._process)
            self._process = None
            return None
        return wire

    @property
    def near(self) -> bool:
        """Whether the actor maps memory of this process; known when it has said a word."""
        return isinstance(self._talk, Wire)

    def _end_here(self) -> None:
        """See the end of an actor that maps memory: it must not write there any more.

        Ray says that an actor was killed, not that it is dead.
        """
        with self._lock:
            if self._process is not None and not self._gone(_ENDING):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
                self._gone(_ENDING)

    def _gone(self, patience: int) -> bool:
        """Tell whether the process of an actor on this machine has ended by then."""
        ended = select.poll()
        ended.register(self._process or 0, select.POLLIN)
        return bool(ended.poll(patience))

    def _over(self, _: Any, error: BaseException | None) -> None:
        with self._lock:
            self._tell_end("has ended." if error is None else words(error))
        self._ended.set()

    def _tell_end(self, reason: str | None) -> None:
        """Let who listens know of the end, if that has come, after all that was said before."""
        self._reason = self._reason or reason
        if self._reason is not None and self._known and not self._closed:
            if isinstance(self._talk, Calls):
                self._talk.end(self._reason)
            else:
                self._bell.ring()

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return self._ready.fileno()

    def _say(self, method: str, *what: Any) -> None:
        with self._lock:
            talk = self._talk
            if talk is None:
                self._early.append((method, what))
                return
        if method in _ONE_AT_A_TIME:
            with self._sends:
                getattr(talk, method)(*what)
        else:
            getattr(talk, method)(*what)

    def limit(self, seconds: float | None) -> None:
        """Give a worker that is near up that takes or gives nothing for so long in a message."""
        self._say("limit", seconds)

    def send(self, message: Any, memory: Sequence[Any] = ()) -> None:
        """Send a message, with memory of this process, or sizes of what the worker is to make.

        The former is for one that is near. EOFError if the worker is gone.
        """
        self._say("send", message, memory)

    def ask(
        self, message: Any, memory: Sequence[Any] = (), expected: Expected | None = None
    ) -> None:
        """Send a message that is answered, with a block if one is expected; see `send`."""
        self._say("ask", message, memory, expected)

    def send_last(self, message: Any) -> None:
        """Send a message that nothing follows, if that is possible at once."""
        self._say("send_last", message)

    def push(self, message: Any, block: Any) -> None:
        """Send a message that a worker elsewhere reads even in a rollout, with an object."""
        self._say("push", message, block)

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        self._say("interrupt", on)

    def receive(self) -> Any:
        """Wait for a message, and put its block where it belongs; EOFError if it is gone."""
        if self._talk is None:
            wait([self.fileno()])
        with self._lock:  # it is being let in, perhaps
            talk = self._talk
        if talk is None or (isinstance(talk, Wire) and self._reason and not talk.waits()):
            raise EOFError(self._reason)
        return talk.receive()

    def waits(self) -> bool:
        """Tell whether a message waits, or the end."""
        return bool(wait([self.fileno()], 0))

    def ended(self) -> str:
        """Say how the worker ended, or why it has not begun."""
        if self.pid is None and (self._reason is None or self._killed):
            return self._where()
        if needed().is_initialized():
            self._ended.wait(_ENDING / 1000)  # Ray may be the last to hear of it
        reason = self._reason or "was lost."
        if self._process is not None:
            if self._reason is None and self._gone(0):
                reason = DIED
            self.kill()  # its worker has ended, the actor may not have
        return reason

    def kill(self) -> None:
        """End the actor, whatever it is doing."""
        if needed().is_initialized():
            self._killed = True  # if it had no place, that is how it ended
            unknown = needed().exceptions.RayError  # it is of a cluster that we left
            with contextlib.suppress(unknown):
                needed().kill(self._actor, no_restart=True)
            self._end_here()

    def close(self, timeout: float | None = None) -> None:
        """Let go of the actor once its worker has ended; kill it after `timeout` seconds."""
        if needed().is_initialized():
            self._ended.wait(0.0 if self.pid is None or self._killed else timeout)
            self.kill()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._process is not None:
                os.close(self._process)
                self._process = None
            if self._talk is not None:
                self._talk.close()  # first: it rings the bell
            for one in {self._door, self._ready, self._bell}:
                one.close()
        self._on_close()
