"""Environments: gymnasium, vector, torch-native, TorchRL; one interface to the loop."""

from swath.envs.base import Env
from swath.envs.jax import JaxEnv
from swath.envs.joined import parted
from swath.envs.make import as_group, is_env
from swath.envs.native import BatchedTorchEnv, TorchCartPole, TorchEnv, TorchPendulum
from swath.envs.parallel import ParallelEnv
from swath.envs.serial import GymEnv, SerialEnv

__all__ = [
    "BatchedTorchEnv",
    "Env",
    "GymEnv",
    "JaxEnv",
    "ParallelEnv",
    "SerialEnv",
    "TorchCartPole",
    "TorchEnv",
    "TorchPendulum",
    "as_group",
    "is_env",
    "parted",
]
