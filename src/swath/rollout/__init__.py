"""The one loop in which a policy meets envs, and what is carried from rollout to rollout."""

from swath.rollout.describe import described, envs_in_words
from swath.rollout.device import DeviceRunner, runner_for
from swath.rollout.env import BoundEnvs, CallFailed, EnvGroup, interface_of
from swath.rollout.outcome import Flags, Outcome
from swath.rollout.plan import Devices, Filled, Plan, lend, slab_for
from swath.rollout.runner import Runner
from swath.rollout.transfer import Transfer

__all__ = [
    "BoundEnvs",
    "CallFailed",
    "DeviceRunner",
    "Devices",
    "EnvGroup",
    "Filled",
    "Flags",
    "Outcome",
    "Plan",
    "Runner",
    "Transfer",
    "described",
    "envs_in_words",
    "interface_of",
    "lend",
    "runner_for",
    "slab_for",
]
