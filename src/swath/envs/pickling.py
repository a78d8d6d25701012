"""The state of envs as bytes, where they can be pickled with it."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import cloudpickle
from gymnasium.utils import EzPickle

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
    """Refuses objects whose pickling succeeds but leaves the state of the simulator out."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, EzPickle) and vars(EzPickle)["__getstate__"] is kind.__getstate__:
            raise pickle.PicklingError(
                f"gymnasium's EzPickle keeps of {kind.__name__} only how it was made"
            )
        if _is_parallel(kind):
            raise pickle.PicklingError(f"TorchRL's {kind.__name__} is closed by being pickled")
        return super().reducer_override(obj)


def _is_parallel(kind: type) -> bool:
    return any(
        t.__name__ == "ParallelEnv" and t.__module__.startswith("torchrl.") for t in kind.__mro__
    )
