"""The link between your process and a worker process on the same machine.

```
  your process                                                    worker process
  ProcessLink  ---- messages, descriptors of shared memory --->   ProcessPort
      |        <--- messages -----------------------------------      |
      |        ==== flags: one word, "stop this rollout" ========>    |
      '-------- sentinel: ready once the process has ended ---'
```

Your process owns all memory and makes it; the worker only maps it. Slabs and weights never travel:
a message names memory that both sides see. The order of shutdown: flag, `close` message, wait,
kill after the time limit, channel and sentinel closed; memory goes when the last view of it goes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from swath.links.channel import Channel
from swath.links.launch import ending, launch
from swath.memory import SharedMemory
from swath.shield import Shield

__all__ = ["ProcessLink", "ProcessPort", "Wire"]

_LAST_WORDS = 3.0
"""Seconds for a process to end whose channel has ended."""


class Wire:
    """Your process's end of a channel to a worker on this machine, and a flag that both see.

    Args:
        channel: To the worker, which waits for the flag.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        flag = SharedMemory(1)
        self._flag = flag.array
        self._send_at_first(flag)

    def _send_at_first(self, flag: SharedMemory) -> None:
        try:
            self.send(None, [flag])
        except EOFError:  # it has died already, as the next to listen will see
            pass
        flag.close_descriptor()

    def fileno(self) -> int:
        """Return the descriptor to wait on for messages."""
        return self._channel.fileno()

    def limit(self, seconds: float | None) -> None:
        """Give the worker up that takes or gives nothing for so long in a message."""
        self._channel.limit(seconds)

    def send(
        self,
        message: Any,
        memories: Sequence[SharedMemory] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message, memory to map and open files; EOFError if the worker is gone."""
        mapped: list[Any] = [memory.descriptor for memory in memories]
        sizes = [memory.nbytes for memory in memories]
        self._channel.send((message, sizes), [*mapped, *descriptors])

    def ask(
        self, message: Any, memories: Sequence[SharedMemory] = (), expected: Any = None
    ) -> None:
        """Send a message that is answered; what is expected is in memory that both see."""
        self.send(message, memories)

    def send_last(self, message: Any) -> None:
        """Send a message that nothing follows, if that is possible at once."""
        self._channel.send_last((message, []))

    def receive(self) -> Any:
        """Wait for a message and return it; EOFError if the worker is gone."""
        return self._channel.receive()[0]

    def waits(self) -> bool:
        """Tell whether a message waits."""
        return self._channel.waits()

    def interrupt(self, on: bool = True) -> None:
        """Ask the worker to end the rollout that it is in after the step that it is in."""
        self._flag[0] = on

    def close(self, timeout: float | None = None) -> None:
        """Let go of the worker."""
        self._channel.close()


class ProcessLink(Wire):
    """Your process's end.

    Args:
        target: What the worker runs: an importable function of a channel and of the payload.
        payload: What it needs, as bytes.
        shield: What holds Ctrl-C back until the link is noted; see `launch`.
    """

    shares_memory = True

    def __init__(
        self,
        target: Callable[[Channel, bytes], None],
        payload: bytes,
        shield: Shield | None = None,
    ) -> None:
        self._process = launch(target, payload, shield)
        self.pid, self.sentinel = self._process.pid, self._process.sentinel
        self.name, self.host = f"process {self.pid}", socket.gethostname()
        try:
            super().__init__(self._process.channel)
        except BaseException:
            self.kill()
            self.close()
            raise

    def exit_code(self, timeout: float | None = 0.0) -> int | None:
        """Return how the process ended; None if it has not."""
        return self._process.exit_code(timeout)

    def ended(self) -> str:
        """Say how the process ended, now that it has."""
        code = self.exit_code(_LAST_WORDS)
        if code is None:  # it has closed its channel, and lives on
            return "closed its connection but did not end, so it was killed."
        return ending(code)

    def kill(self) -> None:
        """End the worker, whatever it is doing."""
        self._process.kill()

    def close(self, timeout: float | None = None) -> None:
        """Let go of the worker once it has ended; kill it after `timeout` seconds."""
        self._process.close(timeout)


class ProcessPort:
    """The worker's end."""

    shares_memory = True

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        _, (flag,) = self.receive()
        self._flag = flag.array.data

    def receive(self) -> tuple[Any, list[SharedMemory]]:
        """Wait for a message and return it with the memory that came beside it.

        Further descriptors, if any, are left in `descriptors`.
        """
        (message, sizes), descriptors = self._channel.receive()
        self.descriptors = descriptors[len(sizes) :]
        return message, [SharedMemory(*pair) for pair in zip(sizes, descriptors, strict=False)]

    def send(self, message: Any, memory: Any = None) -> None:
        """Send a message; memory is shared, so it need not travel."""
        self._channel.send(message)

    def waits(self) -> bool:
        """Tell whether a message waits."""
        return self._channel.waits()

    def interrupted(self) -> bool:
        """Tell whether the rollout is to end."""
        return bool(self._flag[0])
