"""A CUDA stream of our own.

```
 caller's stream:  ..., learning) ---.                     .---> (the batch may be used
 our stream:                          '--> a rollout, ... -'
```

Nothing of ours runs on the caller's stream. Ours begins when what the caller has queued is done
(new weights, the last use of a slab), and what the caller queues next begins when ours is done; the
host waits for neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["OwnStream", "side_by_side"]


class OwnStream:
    """A stream on this device; nothing at all on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run what is inside on this stream."""
        if self.stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Let the host wait until all that was queued here is done."""
        if self.stream is not None:
            self.stream.synchronize()


def side_by_side(*works: Callable[[], None]) -> None:
    """Do pieces of work none of which needs another; all at once, where a graph is recorded.

    Small kernels take longer to start than to run, and a graph can start several. All that a piece
    reads and others know must outlive the recording.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        for work in works:
            work()
        return
    first, *others = works
    main, sides = torch.cuda.current_stream(), []
    for work in others:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            work()
        sides.append(side)
    first()
    for side in sides:
        main.wait_stream(side)
