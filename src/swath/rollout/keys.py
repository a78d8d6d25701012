"""The keys of a batch, named in this one place."""

from __future__ import annotations

from swath.tree import Key

__all__ = [
    "DONE",
    "FINAL",
    "FINAL_OBS",
    "INFO",
    "IS_INIT",
    "MASK",
    "NEXT_DONE",
    "NEXT_TERMINATED",
    "NEXT_TRUNCATED",
    "POLICY_VERSION",
    "RANDOM",
    "REWARD",
    "STEP_COUNT",
    "TERMINATED",
    "TRAJ_IDS",
    "TRUNCATED",
    "WORKER",
    "following",
]

DONE: Key = ("done",)
TERMINATED: Key = ("terminated",)
TRUNCATED: Key = ("truncated",)
REWARD: Key = ("next", "reward")
NEXT_DONE: Key = ("next", "done")
NEXT_TERMINATED: Key = ("next", "terminated")
NEXT_TRUNCATED: Key = ("next", "truncated")
INFO: Key = ("next", "info")
IS_INIT: Key = ("is_init",)
STEP_COUNT: Key = ("step_count",)
TRAJ_IDS: Key = ("collector", "traj_ids")
POLICY_VERSION: Key = ("collector", "policy_version")
MASK: Key = ("collector", "mask")
RANDOM: Key = ("collector", "random")
WORKER: Key = ("collector", "worker")
FINAL: Key = ("collector", "final")
FINAL_OBS: Key = ("collector", "final_obs")


def following(key: Key) -> Key:
    """Return the key below `next` of what a step leads to."""
    return ("next", *key)
