"""What all kinds of groups share: their spaces, their state as bytes, checks of what envs give."""

from __future__ import annotations

import contextlib
import io
import pickle
import reprlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv

from swath.compat.gymnasium import lacks_generator
from swath.errors import EnvError
from swath.memory import Field
from swath.policies.random import Masks
from swath.rollout import CallFailed, Outcome
from swath.tree import Leaf, action_leaves, builder, key_name, observation_leaves

__all__ = [
    "Group",
    "as_array",
    "as_declared",
    "as_number",
    "called",
    "close_all",
    "comes_from",
    "is_flag",
    "not_a",
]


class Group:
    """An `EnvGroup` as most kinds are; they add `seed`, `bind` and `close`."""

    batched = True
    skips_rows = False
    resets_singly = True
    freezes = True
    needs_shared_memory = False
    native = False
    time_limits: Sequence[int | None] | None = None
    lead: tuple[int, ...] | None = None
    outcome = Outcome()
    action_masks: Masks | None = None
    kept: tuple[str, ...] = ()
    """The attributes that hold the state of the envs."""

    restores = 0

    def __init__(self, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observations: Sequence[Leaf] = observation_leaves(observation_space)
        self.actions: Sequence[Leaf] = action_leaves(action_space)
        self.build_action = builder(action_space, self.actions)
        self.info_fields: list[Field] = []
        self.unseen: set[str | tuple[str, ...]] = set()
        """Entries to store of the infos that none has had yet."""
        self.live = np.arange(num_envs)
        """The envs that are not frozen."""

    def take_forms(self, other: Any) -> None:
        """Give the same keys, shapes and dtypes as another group."""
        self.observations, self.actions = other.observations, other.actions
        self.info_fields, self.outcome = other.info_fields, other.outcome

    def place(self, device: torch.device | None) -> torch.device:
        return torch.device("cpu")

    def freeze(self, which: Sequence[int]) -> None:
        self.live = np.setdiff1d(self.live, which)

    def thaw(self, which: Sequence[int] | None) -> None:
        """Step these envs again (None: all), since they are reset."""
        if len(self.live) < self.num_envs:
            again = range(self.num_envs) if which is None else which
            self.live = np.union1d(self.live, np.array(again, int))

    def snapshot(self) -> Any:
        """Return what is `kept` as bytes; None, with a warning, where that fails."""
        blob = io.BytesIO()
        try:
            _Pickler(blob).dump([getattr(self, name) for name in self.kept])
        except Exception as error:  # whatever an env's pickling may raise
            warnings.warn(
                f"the envs cannot be pickled ({type(error).__name__}: {error}), so this state "
                "holds no simulator state: resuming from it starts new episodes.",
                stacklevel=2,
            )
            return None
        return blob.getvalue()

    def restore(self, snapshot: Any) -> None:
        """Close these envs and go on with those of a snapshot."""
        state = pickle.loads(snapshot)
        self.restores += 1
        self.close()
        for name, value in zip(self.kept, state, strict=True):
            setattr(self, name, value)

    def close(self, timeout: float | None = None) -> None:
        """Close the envs."""
        raise NotImplementedError


_DRAWING = (gym.Env, gym.Space, gym.vector.VectorEnv)
"""What draws random numbers from a generator of its own."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """Refuses objects whose pickling succeeds but leaves some state of the simulator out."""

    def reducer_override(self, obj: Any) -> Any:
        kind, why = type(obj), None
        if isinstance(obj, EzPickle) and vars(EzPickle)["__getstate__"] is kind.__getstate__:
            why = f"gymnasium's EzPickle keeps of {kind.__name__} only how it was made"
        elif isinstance(obj, AsyncVectorEnv):
            why = f"the envs of {kind.__name__} live in other processes"
        elif comes_from(obj, "torchrl", "BatchedEnvBase"):
            why = f"TorchRL's {kind.__name__} loses the memory it shares with its envs"
        if why is not None:
            raise pickle.PicklingError(why)
        if isinstance(obj, _DRAWING) and lacks_generator(obj):
            # Gymnasium makes their generators when they are first used: made after the snapshot,
            # those of a resume and of going on would not be the same.
            obj.np_random  # noqa: B018
        return super().reducer_override(obj)


def comes_from(thing: Any, package: str, name: str | None = None) -> bool:
    """Tell whether a thing is an instance of a package's class, without importing the package."""
    return any(
        kind.__module__.split(".")[0] == package and name in (None, kind.__name__)
        for kind in type(thing).__mro__
    )


def as_array(value: Any) -> np.ndarray:
    """Return what an env gave as an array: without a copy, if numpy has its dtype."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.float() if value.dtype is torch.bfloat16 else value
        value = value.cpu()
    return np.asarray(value)


def as_declared(
    observation: Any, leaf: Leaf, shape: tuple[int, ...], i: int | None = None
) -> np.ndarray:
    """Return a leaf of an observation in its declared form, or say how it left it.

    Args:
        observation: What the env gave, in arrays or tensors.
        leaf: Which part of it.
        shape: The expected shape, with the leading dimension of a vector env.
        i: The env, if it is known.
    """
    value = observation
    try:
        for name in leaf.path:
            value = value[name]
        array = value if value.__class__ is np.ndarray else as_array(value)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        text = f"the observation gives no array for {key_name(leaf.key)}, which its space has"
        raise CallFailed(i, "step()", f"{text} ({type(error).__name__}: {error})") from error
    if array.shape == shape and (
        array.dtype == leaf.dtype or np.can_cast(array.dtype, leaf.dtype, "same_kind")
    ):
        return array
    raise CallFailed(
        i,
        "step()",
        f"the observation {key_name(leaf.key)} has shape {array.shape} and dtype {array.dtype}, "
        f"but the observation space declares {shape} and {leaf.dtype}. Fix the env or its space",
    )


def is_flag(value: Any) -> bool:
    """Tell whether an env can have meant True or False: a bool or a number, also in an array."""
    try:
        array = as_array(value)
    except Exception:  # whatever a thing's own conversion may raise
        return False
    return array.size == 1 and array.dtype.kind in "biuf" and bool(array == array)


def as_number(value: Any, i: int) -> Any:
    """Return the number that a reward is an array of; CallFailed if it is none."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return value.item()
    raise not_a("number", "reward", value, i)


def not_a(expected: str, name: str, value: Any, i: int | None) -> CallFailed:
    """Return what to raise where an env gave something else than a number or a bool."""
    article = "an array of one for each env" if i is None else f"a {expected}"
    text = f"step() gave {reprlib.repr(value)} as {name}; {article} was expected. Fix the env"
    return CallFailed(i, "step()", text)


def close_all(things: Iterable[Any], timeout: float | None = None) -> None:
    """Close all, though closing one may fail; groups with a timeout share its seconds."""
    until = None if timeout is None else monotonic() + timeout

    def close(thing: Any) -> None:
        if until is None:
            thing.close()
        else:
            thing.close(max(0.0, until - monotonic()))

    with contextlib.ExitStack() as stack:
        for thing in things:
            stack.callback(close, thing)


def called(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call into the envs; what they raise is the cause of an `EnvError`."""
    try:
        return call(*args)
    except CallFailed as failure:
        cause = failure.__cause__
        text = failure.message or f"the env raised {type(cause).__name__}: {cause}"
        raise EnvError(text, env=failure.index) from cause
