"""Policies that are plain callables: observation in; action, or action and extras, out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.errors import PolicyError, UsageError
from swath.policies.base import Interface, Path, State, TorchPolicy
from swath.tree import Key, fetch, key_name

__all__ = ["CallablePolicy", "RecurrentPolicy"]

_EXTRA_NAMES = ("log_prob", "value")
_STATE: Key = ("policy_state",)


class RecurrentPolicy(torch.nn.Module):
    """Carry a state for a function `fn(observation, state) -> (action, state)`.

    The state is passed from step to step and from batch to batch, and starts from `initial_state`
    in each episode. It is stored at `"policy_state"` (before the step) and `("next",
    "policy_state")` (after it), so that training can use it. A policy of your own with an attribute
    `initial_state` needs no wrapping.

    Args:
        fn: Called with the observation and the state; returns `(action, state)` or
            `(action, extras, state)` with a dict of extras.
        initial_state: The state of one env at the start of an episode, without batch dimension:
            a tensor, or a dict or tuple of tensors.

    Examples:
        >>> counter = RecurrentPolicy(lambda obs, n: ((n % 2).long(), n + 1), torch.zeros(()))
        >>> counter(torch.zeros(4), counter.initial_state)
        (tensor(0), tensor(1.))
    """

    def __init__(self, fn: Callable[..., Any], initial_state: Any) -> None:
        super().__init__()
        self.fn = fn
        self.initial_state = initial_state

    def forward(self, observation: Any, state: Any) -> Any:
        """Call the wrapped function."""
        return self.fn(observation, state)


class CallablePolicy(TorchPolicy):
    """The adapter for callables and modules that know nothing of TensorDict."""

    def __init__(self, interface: Interface, policy: Callable[..., Any]) -> None:
        super().__init__(interface, policy)
        self.inputs = [leaf.key for leaf in interface.observations]
        space: Any = interface.observation_space
        initial = _initial_state(policy)
        self._recurrent = initial is not None
        if self._recurrent:
            places = _paths(initial, _STATE, ()).items()
            self.states = [State(key, fetch(initial, path).detach()) for key, path in places]
            self.inputs += [state.key for state in self.states]
        parts = (space, initial)[: 1 + self._recurrent]
        names = None if self._recurrent else _named_entries(policy, space, interface.by_name)
        if names is not None:
            seen = interface.observations
            self.inputs = [leaf.key for name in names for leaf in seen if leaf.path[0] == name]
            parts = tuple(space[name] for name in names)
        if any(map(_is_nested, parts)):
            self.arguments = _nester(parts, itertools.count())

    def advice(self, error: Exception, rows: Mapping[Key, torch.Tensor]) -> str:
        advice = super().advice(error, rows)
        if not advice and isinstance(error, (AttributeError, LookupError, TypeError)):
            return (
                " If the policy expects a TensorDict, name its argument td or tensordict, or "
                "annotate it with TensorDict."
            )
        return advice

    def read(self, answer: Any, rows: Sequence[torch.Tensor]) -> dict[Key, Path]:
        paths: dict[Key, Path] = {}
        states: dict[Key, Path] = {}
        decision: Any = answer
        at: Path = ()
        if self._recurrent:
            if not isinstance(answer, tuple) or len(answer) not in (2, 3):
                raise PolicyError(
                    "a policy with an initial_state must return (action, state) or (action, "
                    f"extras, state); it returned {_described(answer)}."
                )
            decision, at = (answer[0], (0,)) if len(answer) == 2 else (answer[:2], ())
            states = _paths(answer[-1], _STATE, (-1,))
        for name, path in self._named(decision).items():
            value = fetch(decision, path)
            if name == "action":
                for leaf in self.interface.actions:
                    if _reaches(value, leaf.path):
                        paths[leaf.key] = (*at, *path, *leaf.path)
            else:
                paths.update(_paths(value, (name,), (*at, *path)))
        return {**paths, **states}

    def _named(self, answer: Any) -> dict[str, Path]:
        """Return where the action and the extras are, by name."""
        space = self.interface.action_space
        if _is_mapping(answer):
            names = list(answer.keys())
            if isinstance(space, spaces.Dict) and (
                set(names) == set(space.keys()) or "action" not in names
            ):
                return {"action": ()}
            return {str(name): (name,) for name in names}
        if not isinstance(answer, tuple) or self._is_tuple_action(answer):
            return {"action": ()}
        if len(answer) == 2 and _is_mapping(answer[1]):
            return {"action": (0,), **{str(name): (1, name) for name in answer[1].keys()}}
        names = list(getattr(answer, "_fields", ("action", *_EXTRA_NAMES)))
        if len(answer) > len(names):  # as TorchRL calls them
            names = ["action", *(f"output{i}" for i in range(1, len(answer)))]
        if names[0] != "action":
            raise PolicyError(
                f"the policy returned {_described(answer)} whose first value is {names[0]!r}; it "
                "must be the action. Return a dict with an 'action' to name the others yourself."
            )
        return {name: (i,) for i, name in enumerate(names[: len(answer)])}

    def _is_tuple_action(self, answer: tuple[Any, ...]) -> bool:
        """Tell an action of a Tuple space from such an action followed by extras."""
        space = self.interface.action_space
        if not isinstance(space, spaces.Tuple):
            return False
        return isinstance(space[0], spaces.Tuple) or not isinstance(answer[0], tuple)


def _named_entries(policy: Any, space: Any, by_name: bool) -> list[str] | None:
    """Return the entries of an observation that a policy's arguments are named after.

    None if they are not, or if its one argument may as well be the whole observation.
    """
    if not isinstance(space, spaces.Dict):
        return None
    try:
        called = policy.forward if isinstance(policy, torch.nn.Module) else policy
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some things of C have no signature
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty]
    if len(needed) < (1 if by_name else 2) or any(name not in space.keys() for name in needed):
        return None
    named = itertools.takewhile(lambda one: one.kind in positional, parameters)
    return [one.name for one in itertools.takewhile(lambda one: one.name in space.keys(), named)]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, TensorDictBase))


def _is_nested(value: Any) -> bool:
    return _is_mapping(value) or isinstance(value, (tuple, spaces.Tuple))


def _described(answer: Any) -> str:
    count = f" of {len(answer)} values" if isinstance(answer, tuple) else ""
    return f"a {type(answer).__name__}{count}"


def _reaches(value: Any, path: Path) -> bool:
    """Tell whether a path leads somewhere, through mappings and sequences only."""
    for step in path:
        inside = value.keys() if _is_mapping(value) else ()
        if isinstance(value, (tuple, list)):
            inside = range(len(value))
        if step not in inside:
            return False
        value = value[step]
    return True


def _paths(value: Any, key: Key, at: Path) -> dict[Key, Path]:
    """Return the keys and paths of all values in nested mappings and tuples."""
    if _is_mapping(value):
        parts = list(value.items())
    elif isinstance(value, tuple):
        parts = list(enumerate(value))
    else:
        return {key: at}
    flat: dict[Key, Path] = {}
    for name, part in parts:
        flat.update(_paths(part, (*key, str(name)), (*at, name)))
    return flat


def _nester(like: Any, numbers: Iterator[int]) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return the function that puts rows, in order, into a structure like this value or space."""
    if _is_mapping(like):
        entries = {name: _nester(part, numbers) for name, part in like.items()}
        return lambda rows: {name: part(rows) for name, part in entries.items()}
    if _is_nested(like):
        parts = [_nester(part, numbers) for part in like]
        make = getattr(like, "_make", tuple)
        return lambda rows: make([part(rows) for part in parts])
    return itemgetter(next(numbers))


def _initial_state(fn: Callable[..., Any]) -> Any:
    """Return the initial state of one env as the user structured it; None if there is none."""
    initial = getattr(fn, "initial_state", None)
    if callable(initial):
        try:
            initial = initial()
        except Exception as error:
            raise UsageError(
                f"the policy's initial_state() raised {type(error).__name__}: {error}. It must "
                "take no arguments and return the state of one env."
            ) from error
    for key, path in _paths(initial, _STATE, ()).items():
        value = fetch(initial, path)
        if initial is not None and not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the policy's initial_state has a {type(value).__name__} at {key_name(key)}; it "
                "must be a tensor, or a dict or tuple of tensors, for one env."
            )
    return initial
