"""Halts one side of a protocol in shared memory between any two of its stores.

A process can lose its core anywhere, for any time, and the others go on meanwhile. `Halts` stands
for that: the words that a side writes are wrapped in `Words`, which call it before each store, and
there it lets the others act. What comes out must not depend on where that was.

```
 with (Halts(the others act)) as it is:   words[1] = a  |  words[2] = b  |  words[0] = c
                                        act()          act()           act()
```

A side is also broken off at each of these places (`act` raises), or killed there.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from swath.envs import hosted
from swath.envs.parallel import ParallelGroup

PATIENCE = 20.0
"""Seconds after which something that should come does not."""


class Halts:
    """The places where a side may be halted, in the order in which it comes by.

    Args:
        act: What the others do meanwhile.
        at: Only there; everywhere if None.
    """

    def __init__(self, act: Callable[[], Any], at: int | None = None) -> None:
        self.act, self.at, self.count = act, at, 0
        self._acting = False

    def __call__(self) -> None:
        """Be at one of the places."""
        if self._acting:  # who acts is not halted
            return
        number, self.count = self.count, self.count + 1
        if self.at in (None, number):
            self._acting = True
            try:
                self.act()
            finally:
                self._acting = False


def halted_everywhere(run: Callable[[Halts], Any], act: Callable[[], Any]) -> Iterator[int]:
    """Run with a halt at the first place, then at the second, until there is none; yield which."""
    at, halts = 0, Halts(act, 0)
    while True:
        run(halts)
        if halts.count <= at:
            assert at, "there was no place to halt at"
            return
        yield at
        at += 1
        halts = Halts(act, at)


class Words:
    """Shared words; whoever stores into them through this is halted before, and with `reads`
    whoever reads, too."""

    def __init__(self, words: Any, halts: Halts, reads: bool = False) -> None:
        self._words, self._halts, self._reads = words, halts, reads

    def __setitem__(self, at: Any, value: Any) -> None:
        self._halts()
        self._words[at] = value

    def __getitem__(self, at: Any) -> Any:
        if self._reads:
            self._halts()
        return self._words[at]

    def __len__(self) -> int:
        return len(self._words)

    def __getattr__(self, name: str) -> Any:
        if self._reads:
            self._halts()
        return getattr(self._words, name)


class Copied:
    """A tensor that is copied in two halves; whoever does that is halted before each."""

    def __init__(self, tensor: Any, halts: Halts) -> None:
        self.tensor, self._halts = tensor, halts

    def copy_(self, source: Any) -> None:
        """Copy."""
        half = len(self.tensor) // 2
        for part in (slice(None, half), slice(half, None)):
            self._halts()
            self.tensor[part].copy_(getattr(source, "tensor", source)[part])


# -- ParallelEnv ----------------------------------------------------------------------------------


def let_processes_act(group: ParallelGroup) -> None:
    """Wake the processes of a `ParallelEnv` for nothing, and wait until they sleep again."""
    for bell in group.bells:
        bell.ring()
    until = time.monotonic() + PATIENCE
    for bell, link in zip(group.bells, group.links, strict=True):
        while _rings(bell) or not sleeps(link.pid):
            assert time.monotonic() < until, "a process of the ParallelEnv does not go to sleep"
            time.sleep(0.0002)


def _rings(bell: Any) -> bool:
    poller = select.poll()
    poller.register(bell.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def sleeps(pid: int) -> bool:
    """Tell whether a process waits for something."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "S"


def halting_processes(make: Callable[[], Any], seconds: float = 0.002) -> Callable[[], Any]:
    """Return a maker of the same envs; the process that calls it is halted at each store and read.

    Nobody can tell there when the others have acted, so they have some time each.
    """

    def make_halting() -> Any:
        made, host = make(), hosted._Host
        if not getattr(host, "halts", False):
            hosted._Host = _halting(host, Halts(lambda: time.sleep(seconds)))
        return made

    return make_halting


def _halting(host: Any, halts: Halts) -> Any:
    class Halting(host):
        halts = True

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._order = Words(self._order, halts, reads=True)
            self._mark, self._ended = Words(self._mark, halts), Words(self._ended, halts)

    return Halting


# -- killed ---------------------------------------------------------------------------------------


def killed() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
