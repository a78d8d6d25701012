"""Private names of Gymnasium."""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import TimeLimit

__all__ = ["lacks_generator", "step_limit"]


def step_limit(env: TimeLimit[Any, Any]) -> int:
    """Return after how many steps a `TimeLimit` truncates."""
    found: Any = getattr(env, "_max_episode_steps", None)
    if found is None:
        found = getattr(env.spec, "max_episode_steps", None)
    if found is None:
        raise AttributeError("this version of Gymnasium does not tell the limit of a TimeLimit")
    return int(found)


def lacks_generator(thing: Any) -> bool:
    """Tell whether an env or a space has not made its random generator yet."""
    return getattr(thing, "_np_random", thing) is None
