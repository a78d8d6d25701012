"""A policy on another device than the slab: its inputs go up, its answers come down.

```
 rows t of a slab --> pinned block ==one copy==> block on the device --> policy
 row t  <----------- pinned block <==one copy== block on the device <-----'
```

All of it is queued on the current stream; the host waits once, for the answers. With the slab in
pinned memory and one input, the row itself is what is copied up. The blocks stay where they are, so
the policy between them can be a CUDA graph (`cudagraph_policy`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swath.devices import Recorder, refusal
from swath.memory import Field, Layout, Slab, memory_on
from swath.policies.probing import unchanged_buffers
from swath.seeding import RandomState
from swath.tree import Key

if TYPE_CHECKING:
    from swath.policies.base import TorchPolicy

__all__ = ["StagedAct", "Staging"]


@dataclass(frozen=True)
class StagedAct:
    """Acts at step t in two halves, between which the host may do something else."""

    launch: Callable[[int], None]
    """Queues it."""
    finish: Callable[[int], None]
    """Waits for it and writes the answers."""

    def __call__(self, t: int) -> None:
        self.launch(t)
        self.finish(t)


class Staging:
    """Blocks of one policy; one step at a time is on its way.

    Args:
        policy: The adapter.
        reads: The keys of its inputs.
        slab: One like those that it will be bound to.
    """

    def __init__(self, policy: TorchPolicy, reads: Sequence[Key], slab: Slab) -> None:
        self._policy, self._reads, self.device = policy, reads, policy.device
        lead, n = policy.interface.batch_shape, policy.interface.num_envs
        fields = [slab.layout.places[key].field for key in reads]
        up = Layout([Field(f.key, f.shape, f.dtype) for f in fields], 1, n)
        down = Layout([Field(f.key, f.shape[len(lead) :], f.dtype) for f in policy.forms], 1, n)
        host = slab.device
        self._up_host, self._up = (Slab(up, memory_on(d, up.nbytes)) for d in (host, self.device))
        self._down_host, self._down = (
            Slab(down, memory_on(device, down.nbytes)) for device in (host, self.device)
        )
        self._inputs = [self._up.rows(key, lead)[0] for key in reads]
        self._staged = [self._up_host.rows(key, lead)[0] for key in reads]
        self._outputs = [self._down.rows(form.key, lead)[0] for form in policy.forms]
        self._answers = [self._down_host.rows(form.key, lead)[0] for form in policy.forms]
        self._event: Any = None
        if self.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graph: Recorder | None = None
        self._inner: Callable[..., Any] = policy.policy
        self._run: Callable[[], None] = self._infer

    def bind(self, inner: Callable[..., Any], slab: Slab) -> StagedAct:
        """Return `act(t)` for this slab."""
        self._inner = inner
        if self._policy.graphed and self.graph is None:
            self.graph = Recorder(
                self._infer, lambda: self._policy.modules, self.device, self._why()
            )
            if self.graph.why is not None:
                warnings.warn(f"cudagraph_policy has no effect: {self.graph.why}", stacklevel=2)
        starts = self._policy.can_be_recorded
        ready = self.graph is not None and starts and self.graph.ready()
        self._run = self.graph.replay if ready and self.graph else self._infer
        lead = self._policy.interface.batch_shape
        rows = [slab.rows(key, lead) for key in self._reads]
        direct = len(rows) == 1 and slab.memory.block.is_pinned() and rows[0][0].is_contiguous()
        writes = [form.writer(slab) for form in self._policy.forms]

        def launch(t: int) -> None:
            if direct:
                self._inputs[0].copy_(rows[0][t], non_blocking=True)
            else:
                for staged, row in zip(self._staged, rows, strict=True):
                    staged.copy_(row[t])
                self._up.memory.block.copy_(self._up_host.memory.block, non_blocking=True)
            self._run()
            self._down_host.memory.block.copy_(self._down.memory.block, non_blocking=True)
            if self._event is not None:
                self._event.record()

        def finish(t: int) -> None:
            if self._event is not None:
                self._event.synchronize()
            for write, answer in zip(writes, self._answers, strict=True):
                write(t, answer)

        return StagedAct(launch, finish)

    def _infer(self) -> None:
        """Call the policy on what is in one block, and put what it answers into the other."""
        values = self._inner(*self._inputs)
        values = (values,) if len(self._outputs) == 1 else values
        for form, output, value in zip(self._policy.forms, self._outputs, values, strict=True):
            output.copy_(form.as_tensor(value))
        if self.graph is not None:
            self._policy.carried.keep()

    def _why(self) -> str | None:
        """Return what speaks against recording the policy."""
        if self.device.type != "cuda":
            return "the policy is on the CPU"
        carried = self._policy.carried.state_dict()
        with RandomState.from_global(self.device).installed():
            with unchanged_buffers(self._policy.modules):
                self._infer()  # what is made at the first call only
                why = refusal(self._infer)
        self._policy.carried.load_state_dict(carried, self.device)
        return why
