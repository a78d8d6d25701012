"""Gymnasium ids that your script has registered, in workers, which do not run your script.

What was registered in your process goes along with each worker's job, as bytes. They are read only
when a worker meets an id that it does not know, so a package that registers its ids there, too,
finds them free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from swath.errors import UsageError
from swath.links import pack, unpack

__all__ = ["HOW_TO_REGISTER", "bring_registered", "pack_registered", "with_registered"]

HOW_TO_REGISTER = (
    "Import the package that registers it in the function that makes the env, or name its "
    "module in the id, as in 'ale_py:ALE/Pong-v5'."
)
_T = TypeVar("_T")
_brought: list[bytes] = []
"""From the process that this one works for."""


def pack_registered() -> bytes:
    """Return what was registered in this process beyond Gymnasium's own, for `bring_registered`."""
    specs = [spec for spec in gym.registry.values() if not _is_of_gymnasium(spec)]
    try:
        return pack((specs, _brought), "the registered envs")
    except UsageError:  # one of them may hold what cannot travel, and is perhaps not wanted there
        return pack(([spec for spec in specs if _travels(spec)], _brought), "the registered envs")


def bring_registered(parcel: bytes) -> None:
    """Keep what another process has packed, for ids that nobody has registered here."""
    _brought.append(parcel)


def with_registered(make: Callable[[], _T]) -> _T:
    """Make an env; if Gymnasium does not know its id, again with what was brought along."""
    try:
        return make()
    except gym.error.UnregisteredEnv:
        if not _register_brought():
            raise
    return make()


def _register_brought() -> bool:
    """Register what was brought along, and tell whether there was anything new."""
    known = len(gym.registry)
    while _brought:
        specs, before = unpack(_brought.pop())
        _brought.extend(before)
        for spec in specs:
            gym.registry.setdefault(spec.id, spec)
    return len(gym.registry) > known


def _is_of_gymnasium(spec: EnvSpec) -> bool:
    entry: Any = spec.entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return str(module).startswith("gymnasium.")


def _travels(spec: EnvSpec) -> bool:
    try:
        pack(spec, "a registered env")
    except UsageError:
        return False
    return True
