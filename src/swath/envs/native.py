"""Environments that are tensors: N envs on one device, stepped without asking the host anything.

`TorchEnv` is what the rollout loop calls, `BatchedTorchEnv` a base from which to write one, and
`TorchCartPole` and `TorchPendulum` are two of Gymnasium's envs written that way. No method reads
a tensor's value on the host, and state changes in place, at addresses that stay: so a whole
rollout can be captured in one CUDA graph and replayed.

Random numbers come from `counter_uniform`, a function of (key, counter, column) and nothing else.
An env's episodes follow from its own key, whatever the batch, the device and the other envs, and
torch's global generators are never touched.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
import os
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium
import numpy as np
import torch
from torch import Tensor

from swath.compat.torch import compiled_for_cuda
from swath.errors import EnvError, PolicyError, SwathError, UsageError

__all__ = [
    "BatchedTorchEnv",
    "Observation",
    "TorchCartPole",
    "TorchEnv",
    "TorchPendulum",
    "counter_uniform",
]

Observation: TypeAlias = "Tensor | dict[str, Observation]"
"""A tensor `[N, ...]`, or for a `Dict` space a nested dict of them."""

# Odd 64-bit numbers, written as the signed integers that int64 tensors hold.
_KEY_FACTOR = 0xD1342543DE82EF95 - 2**64
_COUNTER_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_COLUMN_FACTOR = 0xD6E8FEB86659FD93 - 2**64
_MIX_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_MIX_SECOND = 0x94D049BB133111EB - 2**64


def counter_uniform(keys: Tensor, counters: Tensor, num: int) -> Tensor:
    """Return `[N, num]` float32 uniform in [0, 1), fixed by key, counter and column alone.

    The same on every device. One round of splitmix64's mixing over key, counter and column.

    Args:
        keys: int64 `[N]`, one stream each; neighbouring integers give unrelated streams.
        counters: int64 `[N]`, the place in the stream.
        num: Numbers to draw for each env.

    Examples:
        >>> keys, counters = torch.tensor([3, 4]), torch.tensor([0, 9])
        >>> both = counter_uniform(keys, counters, num=2)
        >>> bool((both[1:] == counter_uniform(keys[1:], counters[1:], num=2)).all())
        True
    """
    return _uniform(keys, counters, torch.arange(1, num + 1, device=keys.device))


def _uniform(keys: Tensor, counters: Tensor, columns: Tensor) -> Tensor:
    on_gpu = keys.is_cuda and not torch.compiler.is_compiling()
    if on_gpu and (mixed := _mixed_on_gpu()) is not None:
        bits = mixed(keys[:, None], counters[:, None], columns)
        return torch.mul(bits, 2.0**-24, out=torch.empty_like(bits, dtype=torch.float32))
    place = (counters * _COUNTER_FACTOR)[:, None] + columns * _COLUMN_FACTOR
    # Exclusive or, not a sum: in a sum, two keys could be one stream shifted by some counters.
    bits = (keys * _KEY_FACTOR)[:, None] ^ place
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_SECOND
    # The upper 24 bits are all that float32 holds, and the best mixed.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


@functools.cache
def _mixed_on_gpu() -> Callable[..., Tensor] | None:
    """Return all of it up to the last shift as one kernel: of 20, they would be half of a step."""
    source = f"""
    template <typename T> T mixed(T key, T counter, T column) {{
        unsigned long long place = (unsigned long long)counter * {_COUNTER_FACTOR}LL
            + (unsigned long long)column * {_COLUMN_FACTOR}LL;
        unsigned long long bits = ((unsigned long long)key * {_KEY_FACTOR}LL) ^ place;
        bits = (bits ^ (bits >> 30)) * {_MIX_FIRST}LL;
        bits = (bits ^ (bits >> 27)) * {_MIX_SECOND}LL;
        return (T)(bits >> 40);
    }}"""
    return compiled_for_cuda(source)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift as if unsigned: `>>` on int64 repeats the sign bit, which is masked off here."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


@runtime_checkable
class TorchEnv(Protocol):
    """N envs whose state and step are tensors on one device.

    Its methods must not wait for the device (no `.item()`, no `if tensor`), and must keep the state
    at fixed addresses (`copy_`). Tensors that they return must not change in a later call, and
    actions that they keep must be copies.

    Examples:
        >>> isinstance(TorchCartPole(2), TorchEnv)
        True
    """

    num_envs: int
    device: torch.device
    observation_space: gymnasium.Space[Any]
    """The space of one env."""
    action_space: gymnasium.Space[Any]
    """The space of one env."""

    def seed(self, keys: Tensor) -> None:
        """Restart the random stream of every env at its key, int64 `[N]`."""

    def reset(self, mask: Tensor | None = None) -> Observation:
        """Start an episode in the envs of `mask`, bool `[N]` (None: all); observe all N."""

    def step(self, action: Any) -> tuple[Observation, Tensor, Tensor, Tensor]:
        """Return observation, reward float32 `[N]`, terminated and truncated bool `[N]`.

        It never resets envs: the caller does that, with the mask of the envs that are done.
        """


class BatchedTorchEnv(abc.ABC):
    """Base class of torch-native envs: seeding, masked reset and time limit around three functions.

    A subclass defines its two spaces and writes `_initial`, `_dynamics` and `_observe`. The three
    compute new tensors from the old with torch operations only. Set attributes that they read
    before `super().__init__()`, which calls `_initial` once to find the shape of the state.

    Args:
        num_envs: N, the number of envs in the batch.
        device: Where all tensors live; torch's default device if None.
        max_episode_steps: Truncate episodes at this length; None for no limit. By default the
            class defines it.
        dtype: Dtype of the random numbers that `_initial` gets, and so usually of the state.

    A walk on a line, from a random start until it is more than 1 from the middle:

    Examples:
        >>> class Walk(BatchedTorchEnv):
        ...     observation_space = gymnasium.spaces.Box(-2, 2, (1,))
        ...     action_space = gymnasium.spaces.Discrete(2)
        ...
        ...     def _initial(self, uniform):
        ...         return uniform - 0.5
        ...
        ...     def _dynamics(self, state, action):
        ...         state = state + (0.2 * action - 0.1)[:, None]
        ...         distance = state[:, 0].abs()
        ...         return state, -distance, distance > 1
        ...
        ...     def _observe(self, state):
        ...         return state
        >>> env = Walk(num_envs=3, max_episode_steps=50)
        >>> env.seed(torch.tensor([10, 11, 12]))
        >>> observation = env.reset()
        >>> observation, reward, terminated, truncated = env.step(torch.tensor([0, 1, 1]))
        >>> observation.shape, reward.shape, terminated.tolist()
        (torch.Size([3, 1]), torch.Size([3]), [False, False, False])
        >>> observation = env.reset(terminated | truncated)
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    num_draws: int = 1
    """How many random numbers an env gets at each reset."""
    max_episode_steps: int | None = None
    """The longest episode, unless an env is made with another limit."""
    _fuses = False

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str | None = None,
        max_episode_steps: int | EllipsisType | None = ...,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        limit = self.max_episode_steps if max_episode_steps is ... else max_episode_steps
        for name, value in (("num_envs", num_envs), ("max_episode_steps", limit)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value!r}.")
        if not dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating point type, got {dtype}.")
        self.num_envs, self.max_episode_steps, self.dtype = num_envs, limit, dtype
        # A space has a generator: one that the class declares must not be shared by its envs.
        self.observation_space = copy.deepcopy(self.observation_space)
        self.action_space = copy.deepcopy(self.action_space)
        entropy = torch.frombuffer(bytearray(os.urandom(8 * num_envs)), dtype=torch.int64)
        device = torch.get_default_device() if device is None else device
        self._key = entropy.to(device, copy=True)
        self.device = self._key.device  # with its index, where the caller said just "cuda"
        self._counter = torch.zeros_like(self._key)
        self._elapsed = torch.zeros_like(self._key)
        self._columns = torch.arange(1, self.num_draws + 1, device=device)
        self._state = self._draw_initial().clone(memory_format=torch.contiguous_format)
        _check_shape(
            "the state from _initial, cut to [N],", self._state.shape[:1], (num_envs,), EnvError
        )

    @abc.abstractmethod
    def _initial(self, uniform: Tensor) -> Tensor:
        """Return states `[N, ...]` that start an episode, from `uniform` `[N, num_draws]`."""

    @abc.abstractmethod
    def _dynamics(self, state: Tensor, action: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next state `[N, ...]`, reward `[N]` and terminated bool `[N]`."""

    @abc.abstractmethod
    def _observe(self, state: Tensor) -> Observation:
        """Return what the policy sees of the states, in the dtype of `observation_space`."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, device={str(self.device)!r}, "
            f"max_episode_steps={self.max_episode_steps})"
        )

    def to(self, device: torch.device | str) -> BatchedTorchEnv:
        """Move the envs to a device in the middle of their episodes, and return them."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.device = self._key.device
        return self

    @property
    def state(self) -> Tensor:
        """The states `[N, ...]`; assigning copies into the same memory."""
        return self._state

    @state.setter
    def state(self, value: Tensor) -> None:
        _check_shape("state", value.shape, self._state.shape, UsageError)
        self._state.copy_(value)

    def seed(self, keys: Tensor) -> None:
        """Restart the random stream of every env at its key, int64 `[N]`; `reset` draws from it."""
        _check_shape("keys", keys.shape, (self.num_envs,), UsageError)
        if keys.dtype != torch.int64:
            raise UsageError(f"keys must be int64, got {keys.dtype}. Convert with keys.long().")
        self._key.copy_(keys)
        self._counter.zero_()

    def compile(self) -> BatchedTorchEnv:
        """Compile the arithmetic of a step and of a reset with `torch.compile`; return the envs.

        That takes some seconds, and pays off on a GPU, where most of the time of a step is spent on
        launching kernels. Sums may differ in their last bits.
        """
        self._fuses = True
        return self

    @torch.no_grad()
    def reset(self, mask: Tensor | None = None) -> Observation:
        """Start an episode in the envs of `mask`, bool `[N]` (None: all); observe all N."""
        if mask is None:
            mask = torch.ones_like(self._key, dtype=torch.bool)
        _check_shape("mask", mask.shape, (self.num_envs,), UsageError)
        return (_fused(type(self)._renew) if self._fuses else type(self)._renew)(self, mask)

    def _renew(self, mask: Tensor) -> Observation:
        rows = mask.view(-1, *[1] * (self._state.dim() - 1))
        state = torch.where(rows, self._draw_initial(), self._state)
        self._state.copy_(state)
        self._counter.add_(mask)
        self._elapsed.masked_fill_(mask, 0)
        return self._observe(state)

    @torch.no_grad()
    def step(self, action: Any) -> tuple[Observation, Tensor, Tensor, Tensor]:
        """Return observation, reward float32 `[N]`, terminated and truncated bool `[N]`."""
        shape = self.action_space.shape
        if isinstance(action, Tensor) and shape is not None:
            _check_shape("action", action.shape, (self.num_envs, *shape), PolicyError)
        return (_fused(type(self)._advance) if self._fuses else type(self)._advance)(self, action)

    def _advance(self, action: Any) -> tuple[Observation, Tensor, Tensor, Tensor]:
        state, reward, terminated = self._dynamics(self._state, action)
        if not torch.compiler.is_compiling():  # which sees to this itself
            state, reward, terminated = map(self._apart, (state, reward, terminated))
        _check_shape("the state from _dynamics", state.shape, self._state.shape, EnvError)
        _check_shape("the reward from _dynamics", reward.shape, (self.num_envs,), EnvError)
        _check_shape("terminated from _dynamics", terminated.shape, (self.num_envs,), EnvError)
        self._state.copy_(state)
        self._elapsed.add_(1)
        limit = self.max_episode_steps
        truncated = self._elapsed >= (torch.iinfo(torch.int64).max if limit is None else limit)
        return self._observe(state), reward.to(torch.float32), terminated, truncated

    def _apart(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is none of our state, which is overwritten."""
        ours = tensor.untyped_storage().data_ptr() == self._state.untyped_storage().data_ptr()
        return tensor.clone() if ours else tensor

    def _draw_initial(self) -> Tensor:
        uniform = _uniform(self._key, self._counter, self._columns)
        return self._initial(uniform.to(self.dtype))


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method compiled, one for all envs of a class: they stay picklable."""
    return torch.compile(function, dynamic=False)


class TorchCartPole(BatchedTorchEnv):
    """Balance a pole on a cart: Gymnasium's `CartPole-v1`, N at once.

    Actions are int64 `[N]`: 1 pushes right, 0 left. The reward of every step is 1, including the
    last one.

    Examples:
        >>> env = TorchCartPole(num_envs=2)
        >>> env.seed(torch.tensor([1, 2]))
        >>> bool((env.reset().abs() <= 0.05).all())
        True
        >>> observation, reward, terminated, truncated = env.step(torch.tensor([0, 1]))
        >>> observation.shape, reward.tolist()
        (torch.Size([2, 4]), [1.0, 1.0])
    """

    _MAX_POSITION = 2.4
    _MAX_ANGLE = 12 * 2 * math.pi / 360
    _HIGH = np.array([2 * _MAX_POSITION, np.inf, 2 * _MAX_ANGLE, np.inf], dtype=np.float32)
    _GRAVITY = 9.8
    _POLE_MASS = 0.1
    _TOTAL_MASS = 0.1 + 1.0
    _HALF_LENGTH = 0.5
    _FORCE = 10.0
    _STEP_SECONDS = 0.02

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH, dtype=np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    num_draws = 4
    max_episode_steps = 500

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bounds = [self._MAX_POSITION, math.inf, self._MAX_ANGLE, math.inf]
        self._bounds = torch.tensor(bounds, dtype=self.dtype, device=self.device)
        force = self._FORCE / self._TOTAL_MASS
        self._forces = torch.tensor([-force, force], dtype=self.dtype, device=self.device)
        self._reward = torch.ones(self.num_envs, device=self.device)

    def _initial(self, uniform: Tensor) -> Tensor:
        return 0.1 * uniform - 0.05

    def _dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, velocity, angle, spin = state.unbind(-1)
        sine, cosine = angle.sin(), angle.cos()
        # Written for few kernels: on a GPU they, not the arithmetic, are what a step costs.
        share = self._POLE_MASS * self._HALF_LENGTH / self._TOTAL_MASS
        left, right = self._forces
        push = torch.where(action == 1, right, left)
        push = torch.addcmul(push, spin.square(), sine, value=share)
        inertia = torch.rsub(cosine.square(), self._HALF_LENGTH * 4.0 / 3.0, alpha=share)
        spin_rate = torch.addcmul(self._GRAVITY * sine, cosine, push, value=-1.0) / inertia
        velocity_rate = torch.addcmul(push, spin_rate, cosine, value=-share)
        rates = torch.stack([velocity, velocity_rate, spin, spin_rate], dim=-1)
        state = torch.add(state, rates, alpha=self._STEP_SECONDS)
        return state, self._reward, (state.abs() > self._bounds).any(-1)

    def _observe(self, state: Tensor) -> Tensor:
        return state.to(torch.float32)


class TorchPendulum(BatchedTorchEnv):
    """Swing a pendulum up and hold it: Gymnasium's `Pendulum-v1`, N at once; never terminates.

    Actions are float32 `[N, 1]`, the torque, clipped to [-2, 2]. The reward is minus the cost of
    the angle from upright, the speed and the torque.

    Examples:
        >>> env = TorchPendulum(num_envs=2)
        >>> env.seed(torch.tensor([1, 2]))
        >>> env.reset().shape
        torch.Size([2, 3])
        >>> observation, reward, terminated, truncated = env.step(torch.zeros(2, 1))
        >>> bool((reward <= 0).all()), terminated.tolist()
        (True, [False, False])
    """

    _MAX_SPEED = 8.0
    _MAX_TORQUE = 2.0
    _GRAVITY = 10.0
    _STEP_SECONDS = 0.05  # mass and length are 1, and so left out of the equations below
    _HIGH = np.array([1.0, 1.0, _MAX_SPEED], dtype=np.float32)

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH, dtype=np.float32)
    action_space = gymnasium.spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, shape=(1,), dtype=np.float32)
    num_draws = 2
    max_episode_steps = 200

    def _initial(self, uniform: Tensor) -> Tensor:
        angle, speed = (2.0 * uniform - 1.0).unbind(-1)
        return torch.stack([math.pi * angle, speed], dim=-1)

    def _dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state.unbind(-1)
        torque = action[:, 0].clamp(-self._MAX_TORQUE, self._MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        acceleration = 1.5 * self._GRAVITY * angle.sin() + 3.0 * torque
        speed = speed + acceleration * self._STEP_SECONDS
        speed = speed.clamp(-self._MAX_SPEED, self._MAX_SPEED)
        angle = angle + speed * self._STEP_SECONDS
        never = torch.zeros_like(angle, dtype=torch.bool)
        return torch.stack([angle, speed], dim=-1), -cost, never

    def _observe(self, state: Tensor) -> Tensor:
        angle, speed = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), speed], dim=-1).to(torch.float32)


def _check_shape(
    what: str, shape: tuple[int, ...], expected: tuple[int, ...], error: type[SwathError]
) -> None:
    # Broadcasting would hide the mistake: [N, 1] against [N] gives [N, N], or N equal rows.
    if shape != expected:
        raise error(f"{what} must have shape {list(expected)}, got {list(shape)}.")
