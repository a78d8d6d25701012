"""TorchRL's specs, read as the fields of a batch: keys, shapes and dtypes as they are declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from swath.envs.group import comes_from
from swath.errors import UsageError
from swath.memory import Field, numpy_dtype
from swath.policies.choices import OneHot
from swath.rollout import Flags, Outcome, keys
from swath.tree import Key, Leaf, key_name, observation_leaves

__all__ = ["TensorSpace", "action_form", "observation_form", "outcome_of"]

_FLAGS = [key[0] for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)]


class TensorSpace(gym.Space[Any]):
    """Tensors of a dtype that no space of gymnasium has.

    Examples:
        >>> TensorSpace((2,), torch.bfloat16)
        TensorSpace((2,), torch.bfloat16)
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, numpy_dtype(dtype))
        self.torch_dtype = dtype

    @property
    def is_np_flattenable(self) -> bool:
        """It is an array."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpace) and repr(self) == repr(other)

    def __repr__(self) -> str:
        return f"TensorSpace({self.shape}, {self.torch_dtype})"


def observation_form(env: Any) -> tuple[gym.Space[Any], list[Leaf]]:
    """Return the space and the leaves of what one env shows."""
    dims = len(env.batch_size)
    leaves = [_leaf(*entry, dims) for entry in _entries(env.observation_spec, dims)]
    if [leaf.key for leaf in leaves] == [("observation",)]:
        return leaves[0].space, leaves  # plain policies see the tensor, as of gymnasium's envs
    return _dict_of(leaves)


def action_form(env: Any) -> tuple[gym.Space[Any], list[Leaf]]:
    """Return the space and the leaves of an env's action.

    A plain policy returns a lone action as it is, several below `"action"` as a dict of them, and
    those that stand elsewhere as nested dicts from the root.
    """
    dims = len(env.batch_size)
    entries = list(_entries(env.full_action_spec, dims))
    below = all(key[0] == "action" for key, _, _ in entries)
    leaves = []
    for key, spec, nested in entries:
        path = () if len(entries) == 1 else key[1:] if below else key
        leaf = _leaf(key, spec, nested, dims, path, exact=True)
        if isinstance(leaf.space, TensorSpace):
            raise UsageError(
                f"the TorchRL env's action {key_name(key)} has dtype {spec.dtype}, which numpy "
                "does not have. Convert it in the env, with DTypeCastTransform for example."
            )
        leaves.append(leaf)
    return (leaves[0].space, leaves) if len(leaves) == 1 else _dict_of(leaves)


def outcome_of(env: Any) -> Outcome:
    """Return what the steps of an env give beside observations."""
    dims = len(env.batch_size)
    rewards = [
        Field(("next", *key), _shape(spec, dims), spec.dtype, nested=(0, *nested))
        for key, spec, nested in _entries(env.full_reward_spec, dims)
    ]
    groups: dict[Key, Flags] = {}
    at_root = False
    for key, spec, nested in _entries(env.full_done_spec, dims):
        shape = _shape(spec, dims)
        if key[-1] not in _FLAGS:
            raise UsageError(
                f"the TorchRL env has a done entry {key_name(key)}; the names {_FLAGS} are "
                "expected. Rename it with a RenameTransform."
            )
        if len(key) > 1:
            groups[key[:-1]] = Flags(key[:-1], shape, nested)
        elif shape != (1,):
            raise UsageError(
                f"the TorchRL env's {key_name(key)} has shape {tuple(spec.shape)} where its batch "
                f"size is {tuple(env.batch_size)}: one flag for each env, with a last dimension of "
                "size 1, is expected at the root. Put flags of parts below a key of their own."
            )
        else:
            at_root = True
    return Outcome(tuple(rewards), tuple(groups.values()), at_root, tuple(_others(env)))


def _others(env: Any) -> Iterator[Field]:
    """Give what stands below `next` that no spec has: some transforms write such entries."""
    dims, example = len(env.batch_size), env.fake_tensordict()["next"]
    specs = (env.observation_spec, env.full_reward_spec, env.full_done_spec)
    known = {key for spec in specs for key, _, _ in _entries(spec, dims)}
    for name, value in example.items(True, True):
        key: Key = (name,) if isinstance(name, str) else tuple(name)
        if key not in known and isinstance(value, torch.Tensor):
            around = [example.get(key[:end]) for end in range(1, len(key))]
            nested = [part.batch_dims - dims for part in around]
            shape = tuple(value.shape[dims:])
            yield Field(("next", *key), shape, value.dtype, nested=(0, *nested))


def _entries(
    spec: Any, dims: int, key: Key = (), nested: tuple[int, ...] = ()
) -> Iterator[tuple[Key, Any, tuple[int, ...]]]:
    """Give key and spec of each tensor, and the batch dimensions of the TensorDicts around it."""
    if comes_from(spec, "torchrl", "StackedComposite") or comes_from(spec, "torchrl", "Stacked"):
        raise UsageError(
            f"the TorchRL env has a {type(spec).__name__} at {key_name(key or ('',))}: parts of "
            "different shapes, stacked lazily, which do not fit into one tensor. Give each of "
            "them a key of its own (group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT in "
            "TorchRL's multi-agent envs), or leave them out with an ExcludeTransform."
        )
    if comes_from(spec, "torchrl", "Composite"):
        inner = (*nested, max(0, len(spec.shape) - dims)) if key else ()
        for name, part in spec.items():
            if part is not None:
                yield from _entries(part, dims, (*key, name), inner)
        return
    if spec.dtype is None or spec.shape is None or comes_from(spec, "torchrl", "NonTensor"):
        raise UsageError(
            f"the TorchRL env has a {type(spec).__name__} at {key_name(key)}, which is not a "
            "tensor. Leave it out with an ExcludeTransform, or encode it as a tensor (a "
            "Tokenizer or Hash transform)."
        )
    if any(size < 0 for size in spec.shape):
        raise UsageError(
            f"the TorchRL env's {key_name(key)} has shape {tuple(spec.shape)}, a size that "
            "changes from step to step. Give it a fixed size in the env (with a Crop or a "
            "transform that pads), or leave it out with an ExcludeTransform."
        )
    yield key, spec, nested


def _shape(spec: Any, dims: int) -> tuple[int, ...]:
    return tuple(spec.shape[dims:])


def _leaf(
    key: Key,
    spec: Any,
    nested: tuple[int, ...],
    dims: int,
    path: Key | None = None,
    exact: bool = False,
) -> Leaf:
    space = _space_of(spec, dims)
    dtype = numpy_dtype(spec.dtype)
    return Leaf(key, key if path is None else path, space, _shape(spec, dims), dtype, nested, exact)


def _dict_of(leaves: list[Leaf]) -> tuple[spaces.Dict, list[Leaf]]:
    """Return the space in which leaves are reached by their paths, and these in its order."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        inner = tree
        for name in leaf.path[:-1]:
            inner = inner.setdefault(str(name), {})
        inner[str(leaf.path[-1])] = leaf.space

    def build(part: dict[str, Any]) -> spaces.Dict:
        return spaces.Dict({k: build(v) if isinstance(v, dict) else v for k, v in part.items()})

    space = build(tree)
    order = [leaf.path for leaf in observation_leaves(space)]
    return space, sorted(leaves, key=lambda leaf: order.index(leaf.path))


def _space_of(spec: Any, dims: int) -> gym.Space[Any]:
    """Return the space of one env's tensor: what it may be, for random actions and checks."""
    kind, inner = type(spec).__name__, getattr(spec, "space", None)
    shape, dtype = _shape(spec, dims), numpy_dtype(spec.dtype)
    scalar: Any = dtype.type
    if spec.dtype is torch.bfloat16 or dtype.kind == "c":
        return TensorSpace(shape, spec.dtype)
    if kind == "OneHot":
        return OneHot([shape[-1]], dtype, shape[:-1])
    if kind == "MultiOneHot":
        return OneHot([int(box.n) for box in inner], dtype, shape[:-1])  # type: ignore[union-attr]
    if kind == "Binary" or dtype.kind == "b":
        return spaces.Box(0, 1, shape, scalar)
    whole = _whole_space(spec, kind, shape, dims)
    if whole is not None:
        whole.dtype = dtype
        return whole
    low, high = getattr(inner, "low", None), getattr(inner, "high", None)
    if low is not None and high is not None:
        one = (0,) * dims
        return spaces.Box(low[one].cpu().numpy(), high[one].cpu().numpy(), shape, scalar)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, scalar)
    return spaces.Box(np.iinfo(scalar).min, np.iinfo(scalar).max, shape, scalar)


def _whole_space(spec: Any, kind: str, shape: tuple[int, ...], dims: int) -> gym.Space[Any] | None:
    """Return the space of a choice by its number, or None if it is something else."""
    if kind == "Categorical" and 0 < int(spec.space.n) < 2**62:
        n = int(spec.space.n)
        return spaces.Discrete(n) if shape == () else spaces.MultiDiscrete(np.full(shape, n))
    if kind == "MultiCategorical":
        nvec = spec.nvec.reshape(-1, *shape)[0] if dims else spec.nvec
        return spaces.MultiDiscrete(nvec.cpu().numpy())
    return None
