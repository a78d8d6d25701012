"""Envs whose observations tell their whole history, and policies whose actions tell their weights.

Workers import this file, so it imports no test tools.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from swath.policies import RecurrentPolicy

_LARGE = 2**53 - 1  # exact in float64

# -- what an episode is ---------------------------------------------------------------------------


def first_hash(stamp: int, episode: int) -> int:
    return zlib.crc32(f"{stamp} {episode}".encode())


def next_hash(before: int, action: tuple[float, ...]) -> int:
    """Return a number that changes with every action of the episode so far."""
    return zlib.crc32(f"{before} {[float(one) for one in action]}".encode())


def reward_of(hashed: int) -> float:
    return hashed % 1021 / 2  # exact in float32


def ending_of(stamp: int, episode: int, longest: int) -> tuple[int, bool, bool]:
    """Return length, terminated and truncated of an episode."""
    mix = zlib.crc32(f"{episode} of {stamp}".encode())
    return 1 + mix % longest, mix // 8 % 3 != 1, mix // 8 % 3 != 0


# -- observations ---------------------------------------------------------------------------------


class Form(NamedTuple):
    """One way to show (stamp, episode, step, hash)."""

    space: gym.Space[Any]
    keys: list[tuple[str, ...]]
    show: Callable[[np.ndarray], Any]
    read: Callable[[list[np.ndarray]], np.ndarray]
    """From the leaves, rows first, to `[rows, 4]`."""
    step: Callable[[Sequence[Tensor]], Tensor]
    """From the leaves, any dimensions first, to the step."""


def _box(shape: tuple[int, ...], dtype: Any = np.int64) -> spaces.Box:
    return spaces.Box(0, 255 if dtype == np.uint8 else _LARGE, shape, dtype)


def _wide(array: np.ndarray) -> np.ndarray:
    """Return bytes, eight of each number, as numbers."""
    return np.ascontiguousarray(array).reshape(len(array), prod(array.shape[1:])).view(np.int64)


def _step_of_bits(leaves: Sequence[Tensor]) -> Tensor:
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    return (leaves[0][..., 128:136].long() * weights).sum(-1)


_ONE = [("observation",)]
FORMS = {
    "numbers": Form(
        _box((4,)), _ONE, lambda n: n, lambda leaves: leaves[0], lambda leaves: leaves[0][..., 2]
    ),
    "floats": Form(
        _box((4,), np.float64),
        _ONE,
        lambda n: n.astype(np.float64),
        lambda leaves: leaves[0].astype(np.int64),
        lambda leaves: leaves[0][..., 2].long(),
    ),
    "image": Form(
        _box((4, 8, 1), np.uint8),
        _ONE,
        lambda n: n.view(np.uint8).reshape(4, 8, 1),
        lambda leaves: _wide(leaves[0]),
        lambda leaves: leaves[0][..., 2, 0, 0].long(),
    ),
    "bits": Form(
        spaces.MultiBinary(256),
        _ONE,
        lambda n: np.unpackbits(n.view(np.uint8)).astype(np.int8),
        lambda leaves: _wide(np.packbits(leaves[0].astype(np.uint8), axis=-1)),
        _step_of_bits,
    ),
    "dict": Form(
        spaces.Dict({"where": _box((3,)), "more": spaces.Dict({"hash": _box((8,), np.uint8)})}),
        [("where",), ("more", "hash")],
        lambda n: {"where": n[:3], "more": {"hash": n[3:].view(np.uint8)}},
        lambda leaves: np.concatenate([leaves[0], _wide(leaves[1])], -1),
        lambda leaves: leaves[0][..., 2],
    ),
    "tuple": Form(
        spaces.Tuple((spaces.Discrete(_LARGE), _box((2,)), _box((1,), np.float64))),
        [("observation", "0"), ("observation", "1"), ("observation", "2")],
        lambda n: (n[0], n[1:3], n[3:].astype(np.float64)),
        lambda leaves: np.concatenate(
            [leaves[0][:, None], leaves[1], leaves[2].astype(np.int64)], -1
        ),
        lambda leaves: leaves[1][..., 1],
    ),
}


OF_GYMNASIUM = tuple(FORMS)
# That of `teams_kit.HistoryTeams`, where each of two agents sees a half of the hash.
FORMS["teams"] = Form(
    spaces.Dict(),
    [("agents", "where"), ("agents", "hash")],
    lambda n: n,
    lambda leaves: np.concatenate([leaves[0][:, 0], _wide(leaves[1])], -1),
    lambda leaves: leaves[0][..., 0, 2],
)


def leaves_of(observation: Any) -> list[Tensor]:
    """Return the leaves of what a policy is given, in the order of the form's keys."""
    if isinstance(observation, dict):
        if "agents" in observation:
            return [observation["agents"]["where"], observation["agents"]["hash"]]
        return [observation["where"], observation["more"]["hash"]]
    return list(observation) if isinstance(observation, tuple) else [observation]


def columns_of(batch: TensorDictBase, *key: str) -> np.ndarray:
    """Return an entry with one dimension of rows, lane after lane."""
    return batch[key].flatten(0, batch.ndim - 1).numpy()


def read(form: str, batch: TensorDictBase, *below: str) -> list[list[int]]:
    """Return what the observations of a batch tell, row after row."""
    leaves = [columns_of(batch, *below, *key) for key in FORMS[form].keys]
    return FORMS[form].read(leaves).tolist()


# -- actions --------------------------------------------------------------------------------------


class Acting(NamedTuple):
    """One kind of action, as a function of a number."""

    space: gym.Space[Any]
    keys: list[tuple[str, ...]]
    leaves: Callable[[Tensor], list[Tensor]]


_BITS = torch.arange(12)
_ACTION = [("action",)]
ACTIONS = {
    "discrete": Acting(spaces.Discrete(10_007), _ACTION, lambda v: [v % 10_007]),
    "start": Acting(spaces.Discrete(10_007, start=-5), _ACTION, lambda v: [v % 10_007 - 5]),
    "multi": Acting(
        spaces.MultiDiscrete([101, 103]), _ACTION, lambda v: [torch.stack([v % 101, v % 103], -1)]
    ),
    "binary": Acting(
        spaces.MultiBinary(12), _ACTION, lambda v: [(v[..., None] >> _BITS & 1).to(torch.int8)]
    ),
    "box": Acting(
        spaces.Box(-1000, 1000, (2,), np.float32),
        _ACTION,
        lambda v: [torch.stack([v % 997, -(v % 991)], -1).float()],
    ),
    "dict": Acting(
        spaces.Dict({"a": spaces.Discrete(1009), "b": spaces.Box(-1000, 1000, (1,), np.float32)}),
        [("action", "a"), ("action", "b")],
        lambda v: [v % 1009, (v % 13)[..., None].float()],
    ),
}


ACTIONS_OF_GYMNASIUM = tuple(ACTIONS)
# That of `teams_kit.HistoryTeams`: a number for each agent.
ACTIONS["agents"] = Acting(
    spaces.MultiDiscrete([103, 103]),
    [("agents", "action")],
    lambda v: [torch.stack([v % 101, v % 103], -1)],
)
OF_TEAMS = ("discrete", "box", "agents")


def action_for(kind: str, number: Tensor) -> Any:
    """Return the action of this kind that tells a number."""
    leaves = ACTIONS[kind].leaves(number)
    return dict(zip("ab", leaves, strict=True)) if kind == "dict" else leaves[0]


def told_by(action: Any) -> tuple[float, ...]:
    """Return an action as plain numbers."""
    leaves = [action[key] for key in sorted(action)] if isinstance(action, dict) else [action]
    return tuple(float(one) for leaf in leaves for one in np.asarray(leaf).reshape(-1).tolist())


def actions_of(kind: str, batch: TensorDictBase) -> list[tuple[float, ...]]:
    """Return the actions of a batch as plain numbers, row after row."""
    leaves = [columns_of(batch, *key) for key in ACTIONS[kind].keys]
    rows = np.concatenate(
        [leaf.reshape(len(leaf), prod(leaf.shape[1:])).astype(np.float64) for leaf in leaves], -1
    )
    return [tuple(row) for row in rows.tolist()]


# -- the env --------------------------------------------------------------------------------------


FUSE: list[tuple[int, type[BaseException]]] = []
"""After how many calls an env of this process fails, with what; empty for never."""


FLAGS = ("terminated", "truncated", "done")


def burn() -> None:
    """Fail if it is time to."""
    if FUSE:
        left, error = FUSE.pop()
        if left == 0:
            raise error("as asked")
        FUSE.append((left - 1, error))


class HistoryEnv(gym.Env[Any, Any]):
    """Shows (stamp, episode, step, hash of all actions of the episode).

    The stamp is the seed, or a number that no other env has until there is one. Everything else
    follows from the stamp and the actions.

    Args:
        form: Of the observations.
        action: Kind of the actions.
        longest: Most steps of an episode; 1 for episodes that end at once.
        reuses: Whether it returns the same arrays at each step, changed.
    """

    def __init__(
        self,
        form: str = "numbers",
        action: str = "discrete",
        longest: int = 5,
        reuses: bool = False,
    ) -> None:
        self.form, self.longest, self.reuses = FORMS[form], longest, reuses
        self.observation_space, self.action_space = self.form.space, ACTIONS[action].space
        self.stamp, self.episode, self.count = int.from_bytes(os.urandom(5), "big"), -1, -1
        self.hash, self.length = 0, 0
        self._kept: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        burn()
        if seed is not None:
            self.stamp, self.episode = seed, -1
        self.episode, self.count = self.episode + 1, 0
        self.hash = first_hash(self.stamp, self.episode)
        self.length, *self._flags = ending_of(self.stamp, self.episode, self.longest)
        return self._observe(), {"hash": float(self.hash)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        burn()
        if not 0 <= self.count < self.length:
            raise RuntimeError(f"step() at {self.count} of {self.length}: nobody called reset().")
        if not self.action_space.contains(action):
            raise RuntimeError(f"the action {action!r} is not in {self.action_space}.")
        self.hash = next_hash(self.hash, told_by(action))
        self.count += 1
        flags = self._flags if self.count == self.length else (False, False)
        return self._observe(), reward_of(self.hash), *flags, {"hash": float(self.hash)}

    def _observe(self) -> Any:
        shown = self.form.show(np.array([self.stamp, self.episode, self.count, self.hash]))
        if not self.reuses or not isinstance(shown, np.ndarray):
            return shown
        if self._kept is None:
            self._kept = shown
        self._kept[...] = shown
        return self._kept


# -- policies -------------------------------------------------------------------------------------


class Telling(nn.Module):
    """Its actions tell a parameter, its extras a buffer; with `noisy` it draws a number, too."""

    def __init__(self, action: str, form: str, noisy: bool = False, value: int = 1) -> None:
        super().__init__()
        self.action, self.form, self.noisy = action, form, noisy
        self.weight = nn.Parameter(torch.tensor(float(value)))
        self.register_buffer("mean", torch.tensor(float(value)))

    def become(self, value: int) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.mean.fill_(value)

    def told(self, leaves: Sequence[Tensor]) -> dict[str, Any]:
        lead = FORMS[self.form].step(leaves).shape
        number = self.weight.round().long().expand(lead)
        noise = {"noise": torch.rand(lead)} if self.noisy else {}
        extras = {"told": self.mean.expand(lead), "log_prob": -self.weight.expand(lead)}
        return {"action": action_for(self.action, number), **extras, **noise}

    def forward(self, observation: Any) -> Any:
        return self.told(leaves_of(observation))


class TellingLeaves(Telling):
    """The same from leaves to leaves, for a `TensorDictModule`."""

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        told = self.told(leaves)
        actions = told.pop("action")
        actions = list(actions.values()) if isinstance(actions, dict) else [actions]
        return (*actions, *told.values())


class Remembering(Telling):
    """Its state counts the steps of the episode; its actions tell the parameter plus that."""

    initial_state = torch.zeros((), dtype=torch.int64)

    def forward(self, observation: Any, state: Tensor) -> Any:
        told = self.told(leaves_of(observation))
        told["action"] = action_for(self.action, self.weight.round().long() + state)
        return told.pop("action"), told, state + 1


class Counting(Telling):
    """Takes a TensorDict, in which it counts its own calls, env by env.

    Args:
        action: Kind of the actions.
        form: Of the observations.
        how: It writes into what it is given; "private" counts at a key with a leading `_`, "apart"
            answers with a TensorDict of its own, "shared" changes in place what it wrote before.
    """

    def __init__(self, action: str, form: str, how: str) -> None:
        super().__init__(action, form)
        self.how = how

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        told = self.told([td[key] for key in FORMS[self.form].keys])
        step = FORMS[self.form].step([td[key] for key in FORMS[self.form].keys])
        key = "_count" if self.how == "private" else ("memory", "count")
        count = td.get(key, None)
        if count is None:
            count = torch.zeros_like(step)
        count = count.add_(1) if self.how == "shared" else count + 1
        answer = td.empty() if self.how == "apart" else td
        for name in ("told", "log_prob"):
            answer[name] = told[name]
        answer[key] = count
        if self.how == "private":
            answer["count"] = count
        action = told["action"]
        leaves = list(action.values()) if isinstance(action, dict) else [action]
        for name, leaf in zip(ACTIONS[self.action].keys, leaves, strict=True):
            answer[name] = leaf
        return answer


COUNTING = ("counting", "private", "apart", "shared")
"""Policies that count their calls: how the count is kept."""


class Stepwise:
    """No module; its actions tell the step."""

    def __init__(self, action: str, form: str) -> None:
        self.action, self.form = action, form

    def __call__(self, observation: Any) -> Any:
        step = FORMS[self.form].step(leaves_of(observation))
        return action_for(self.action, 3 * step + 1)


def policy_of(kind: str, action: str, form: str) -> Any:
    """Return a policy: none, function, module, noisy, tensordict, recurrent, wrapped, or one that
    counts."""
    if kind in COUNTING:
        return Counting(action, form, kind)
    if kind == "none":
        return None
    if kind == "function":
        return Stepwise(action, form)
    if kind == "tensordict":
        out = [*ACTIONS[action].keys, "told", "log_prob", "noise"]
        return TensorDictModule(TellingLeaves(action, form, True), FORMS[form].keys, out)
    if kind in ("recurrent", "wrapped"):
        module = Remembering(action, form)
        return module if kind == "recurrent" else RecurrentPolicy(module, module.initial_state)
    return Telling(action, form, noisy=kind == "noisy")


def learner_of(policy: Any) -> Telling | None:
    """Return the part of a policy that has the weights."""
    if isinstance(policy, nn.Module):
        return next(one for one in policy.modules() if isinstance(one, Telling))
    return None
