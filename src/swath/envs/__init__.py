"""Environments: gymnasium, vector, torch-native, TorchRL; one interface to the loop."""

from swath.envs.base import Env, GymEnv, SerialEnv
from swath.envs.make import as_group
from swath.envs.native import BatchedTorchEnv, TorchCartPole, TorchEnv, TorchPendulum

__all__ = [
    "BatchedTorchEnv",
    "Env",
    "GymEnv",
    "SerialEnv",
    "TorchCartPole",
    "TorchEnv",
    "TorchPendulum",
    "as_group",
]
