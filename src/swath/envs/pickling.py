"""The state of envs as bytes, where they can be pickled with it."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import cloudpickle
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv

__all__ = ["pickled"]


def pickled(state: Any) -> bytes | None:
    """Return envs and what goes with them as bytes; None, with a warning, where that fails."""
    blob = io.BytesIO()
    try:
        _Pickler(blob).dump(state)
    except Exception as error:  # whatever an env's pickling may raise
        warnings.warn(
            f"the envs cannot be pickled ({type(error).__name__}: {error}), so this state holds no "
            "simulator state: resuming from it starts new episodes.",
            stacklevel=2,
        )
        return None
    return blob.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """Refuses objects whose pickling succeeds but leaves some state of the simulator out."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, EzPickle) and vars(EzPickle)["__getstate__"] is kind.__getstate__:
            raise pickle.PicklingError(
                f"gymnasium's EzPickle keeps of {kind.__name__} only how it was made"
            )
        if isinstance(obj, AsyncVectorEnv):
            raise pickle.PicklingError(f"the envs of {kind.__name__} live in other processes")
        if _is_torchrl_batch(kind):
            raise pickle.PicklingError(
                f"TorchRL's {kind.__name__} loses the memory it shares with its envs"
            )
        return super().reducer_override(obj)


def _is_torchrl_batch(kind: type) -> bool:
    return any(
        t.__name__ == "BatchedEnvBase" and t.__module__.startswith("torchrl.") for t in kind.__mro__
    )
