"""The link between your process and a worker that shares no memory with it.

```
  your process                                                     worker
  RemoteLink  ---- channel: messages, both ways ---------------->  RemotePort
      |       <--------------------------------------------------      |  its thread listens
      |       ==== bulk: one block per version of the weights ====>    |
      |       <=== bulk: one block per rollout ====================    |
```

Messages go over one connection that both sides watch: its end is the end of the worker. Blocks go
over a medium of their own (gloo, NCCL, MPI, RPC), each announced by a message, in the same order.
A block that is to come is received while your process does other things.

Each side owns its own memory. Order of shutdown: interrupt, `close` message, wait, channel closed;
a worker whose channel ends without that ends itself after the step that it is in, or a few seconds
later, whatever it is doing.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np

from swath.links.channel import Channel
from swath.links.launch import Launched, ending
from swath.memory import SharedMemory

__all__ = ["Bulk", "Expected", "Inbox", "Interrupt", "RemoteLink", "RemotePort", "wait_until"]

_LAST_WORDS = 3.0
"""Seconds that a worker whose trainer is gone has to end by itself."""
exit_code = 1
"""Exit code of a worker that had to end itself because its trainer was gone."""
_WAITING, _LOOK = 1e-4, 0.5
"""Seconds between two checks of a transfer, and of whether the other side has ended."""


class Bulk(Protocol):
    """Moves blocks of bytes whose size both sides know, in order."""

    def send(self, block: np.ndarray) -> Callable[[], None]:
        """Begin to send; what is returned waits for the end of it."""
        ...

    def receive(self, block: np.ndarray) -> Callable[[], None]:
        """Begin to receive into a block; what is returned waits for the end of it."""
        ...

    def watch(self, channel: Channel) -> None:
        """Give up once this has ended, if the medium does not notice that by itself."""
        ...

    def close(self) -> None:
        """Let go of the other side, whatever is under way."""
        ...


class Expected(Protocol):
    """A block that the answer to a message will bring."""

    block: np.ndarray

    def arrived(self) -> None:
        """Do what is to be done with it."""
        ...

    def came(self, block: np.ndarray) -> None:
        """Do so with what came as a block of its own, that is only lent."""
        ...


def wait_until(done: Callable[[], bool], patience: float, ended: Callable[[], bool]) -> None:
    """Wait for a transfer of a medium that tells neither when it is done nor that nobody is there.

    Args:
        done: Tells whether it is done.
        patience: Seconds after which it is given up.
        ended: Tells whether the other side has ended.
    """
    now = monotonic()
    until, look = now + patience, now + _LOOK
    while not done():
        now = monotonic()
        if now > until:
            raise TimeoutError(f"a transfer made no progress for {patience:g} s")
        if now > look:
            if ended():
                raise ConnectionError("it ended during a transfer")
            look = now + _LOOK
        sleep(_WAITING)


@dataclass(frozen=True)
class Interrupt:
    """Whether the rollout that a worker is in is to end."""

    on: bool


class RemoteLink:
    """Your process's end.

    Args:
        channel: To the worker, which was let in by a gate.
        bulk: To the same worker.
        name: The worker in words.
        pid: Its process, on its host.
        host: Its host.
        process: The process, if it was started by this one.
        cancel: Ends the worker from outside, if there is a way.
    """

    shares_memory = False

    def __init__(
        self,
        channel: Channel,
        bulk: Bulk,
        name: str,
        pid: int,
        host: str,
        process: Launched | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self._channel, self._bulk, self._process, self._cancel = channel, bulk, process, cancel
        bulk.watch(channel)
        self.name, self.pid, self.host = name, pid, host
        self.sentinel = None if process is None else process.sentinel
        self.attached: set[int] = set()
        """Numbers of the memory that the worker has, for who gives it some."""
        self._expected: deque[tuple[Callable[[], None], Expected]] = deque()
        self._sending: deque[tuple[Callable[[], None], np.ndarray]] = deque()
        self._sends = threading.RLock()
        self._interrupted = False
        self._reason = "closed its connection"

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return self._channel.fileno()

    def limit(self, seconds: float | None) -> None:
        """Give the worker up that takes or gives nothing for so long in a message."""
        self._channel.limit(seconds)

    def send(
        self, message: Any, sizes: Sequence[int] = (), expected: Expected | None = None
    ) -> None:
        """Send a message, with memory for the worker to make; EOFError if it is gone."""
        with self._sends:
            if expected is not None:
                waiting = self._begin(self._bulk.receive, expected.block)
                self._expected.append((waiting, expected))
            self._over(self._channel.send, (message, sizes, None))

    ask = send

    def push(self, message: Any, block: np.ndarray) -> None:
        """Send a message that the worker reads at once, also in a rollout, with a block."""
        with self._sends:
            while len(self._sending) > 1:  # one is under way: more would pile up
                self._begin(self._sending.popleft()[0])
            self._over(self._channel.send, (message, (), block.nbytes))
            if block.nbytes:
                self._sending.append((self._begin(self._bulk.send, block), block))

    def _begin(self, doing: Callable[..., Any], *blocks: np.ndarray) -> Any:
        try:
            return doing(*blocks)
        except Exception as error:
            self._lost(error)
            raise EOFError(self._reason) from error

    def _over(self, doing: Callable[..., Any], *what: Any) -> Any:
        """Do something on the channel; note why that fails, unless the worker just closed it."""
        try:
            return doing(*what)
        except EOFError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in (errno.EPIPE, errno.EBADF):
                self._lost(cause)
            raise

    def _lost(self, error: BaseException) -> None:
        text = str(error).strip().splitlines() or [type(error).__name__]
        self._reason = f"was lost: {text[0][:200]}"
        self._channel.end()  # so that whoever listens hears of it

    def send_last(self, message: Any) -> None:
        """Send a message that nothing follows, if that is possible at once."""
        self._over(self._channel.send_last, (message, (), None))

    def receive(self) -> Any:
        """Wait for a message, and for the block if it brings one; EOFError if it is gone."""
        message, brings = self._over(self._channel.receive)[0]
        if brings:
            waiting, expected = self._expected.popleft()
            self._begin(waiting)
            expected.arrived()
        return message

    def waits(self) -> bool:
        """Tell whether a message waits."""
        return self._channel.waits()

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        if on != self._interrupted:
            self._interrupted = on
            try:
                self.send(Interrupt(on))
            except EOFError:
                pass

    def ended(self) -> str:
        """Say how the worker ended, once its channel or sentinel says that it has."""
        if self._process is not None:
            code = self._process.exit_code(_LAST_WORDS)
            if code is not None:
                return ending(code)
        return f"{self._reason}."

    def kill(self) -> None:
        """End the worker: directly, if it can be reached, and by cutting it off."""
        self._channel.end()
        if self._process is not None:
            self._process.kill()
        if self._cancel is not None:
            self._cancel()

    def close(self, timeout: float | None = None) -> None:
        """Wait until the worker has gone, at most `timeout` seconds, and let go of it."""
        ended = self._channel.await_end(timeout)
        if not ended and self._cancel is not None:
            self._cancel()
        self._channel.close()
        self._bulk.close()
        if self._process is not None:
            self._process.close(_LAST_WORDS if ended else 0.0)


class Inbox:
    """What has come to a worker with memory of its own; a thread puts it in, the worker reads."""

    shares_memory = False

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Any, list[Any]] | None] = queue.SimpleQueue()
        self._flag = False
        self.on_push: Callable[[Any, np.ndarray], None] | None = None
        """Called by the thread with what was pushed."""

    def _put(self, message: Any, sizes: Sequence[int], block: np.ndarray | None) -> None:
        if isinstance(message, Interrupt):
            self._flag = message.on
        elif block is not None:
            assert self.on_push is not None
            self.on_push(message, block)
        else:
            self._inbox.put((message, [SharedMemory(size) for size in sizes]))

    def receive(self) -> tuple[Any, list[Any]]:
        """Wait for a message and return it with the memory that was asked for."""
        got = self._inbox.get()
        if got is None:
            raise EOFError("the other side is gone")
        return got

    def waits(self) -> bool:
        """Tell whether a message waits."""
        return not self._inbox.empty()

    def interrupted(self) -> bool:
        """Tell whether the rollout is to end."""
        return self._flag


class RemotePort(Inbox):
    """The worker's end.

    Args:
        channel: To your process.
        bulk: To the same process.
    """

    def __init__(self, channel: Channel, bulk: Bulk) -> None:
        super().__init__()
        self._channel, self._bulk, self._ended = channel, bulk, threading.Event()
        bulk.watch(channel)
        self._sending: deque[tuple[Callable[[], None], np.ndarray]] = deque()
        threading.Thread(target=self._listen, name="swath port", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                (message, sizes, pushed), _ = self._channel.receive()
                block = None if pushed is None else np.empty(pushed, np.uint8)
                if block is not None and block.nbytes:
                    self._bulk.receive(block)()
                self._put(message, sizes, block)
        except Exception:
            self._flag = True
            self._inbox.put(None)
            if not self._ended.wait(_LAST_WORDS):
                os._exit(exit_code)

    def send(self, message: Any, memory: SharedMemory | None = None) -> None:
        """Send a message, and a block that the other side expects; it must stay as it is."""
        if memory is not None:
            while len(self._sending) > 1:
                self._sending.popleft()[0]()
            self._sending.append((self._bulk.send(memory.array), memory.array))
        self._channel.send((message, memory is not None))

    def close(self) -> None:
        """Let go of the other side, which wants nothing more."""
        self._ended.set()
        self._channel.end()  # closing alone says nothing while our thread listens
        self._channel.close()
        self._bulk.close()
