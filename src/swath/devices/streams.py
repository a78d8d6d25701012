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
from collections.abc import Iterator

import torch

__all__ = ["OwnStream"]


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
