"""What a policy wrote into a TensorDict, which it is given back at its next step.

```
 row t of the slab, what it wrote at step t - 1  -->  policy  -->  what it writes at step t
```

So noise that remembers itself, counters and memories need no help of the env. Nothing ends them but
`reset` and a new seed: neither the end of an episode nor that of a batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from swath.tree import Key

__all__ = ["Carried"]


class Carried:
    """The entries of a policy's last answer that the env does not give anew, by key."""

    def __init__(self) -> None:
        self.values: dict[Key, Any] = {}
        self._own: dict[Key, Any] = {}  # tensors of ours, always at the same place

    def note(self, answer: TensorDictBase, given: TensorDictBase, inputs: Container[Key]) -> None:
        """Take over what a policy answered when it was given these inputs."""
        wrote = {key: value for key, value in _leaves(answer, ()) if key not in inputs}
        # One that answers with a TensorDict of its own says nothing of the entries it left out.
        self.values = wrote if answer is given else {**self.values, **wrote}

    def keep(self) -> None:
        """Own all tensors: so far they may be views of what is written again later.

        They stay where they are from then on, as a CUDA graph wants them.
        """
        for key, value in self.values.items():
            if isinstance(value, torch.Tensor):
                own = self._own.get(key)
                if own is None or not _alike(own, value):
                    _check_not_recorded(key)
                    self._own[key] = value.detach().clone()
                elif own is not value:
                    own.copy_(value)
                self.values[key] = self._own[key]

    def clear(self) -> None:
        """Forget everything."""
        self.values = {}

    def state_dict(self) -> dict[Key, Any]:
        """Return a copy of the values, on the host."""
        return {
            key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.values.items()
        }

    def load_state_dict(self, values: Mapping[Key, Any], device: torch.device) -> None:
        """Go on with values that `state_dict` returned."""
        self.values = {
            key: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        self.keep()

    def part(self, start: int, stop: int) -> dict[Key, Any]:
        """Return the values of some of the envs."""
        return {
            key: value[start:stop] if isinstance(value, torch.Tensor) else value
            for key, value in self.values.items()
        }


def _leaves(tensordict: TensorDictBase, at: Key) -> Iterator[tuple[Key, Any]]:
    """Yield what a TensorDict holds, but for what it says of the next step."""
    for name, value in tensordict.items():
        if isinstance(value, TensorDictBase):
            if at or name != "next":
                yield from _leaves(value, (*at, name))
        else:
            yield (*at, name), value


def _alike(own: torch.Tensor, value: torch.Tensor) -> bool:
    return own.shape == value.shape and own.dtype == value.dtype and own.device == value.device


def _check_not_recorded(key: Key) -> None:
    """Refuse to be part of a CUDA graph: replayed, it would read what it read when recorded."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the shape of what the policy writes at {key} changes from step to step"
        )
