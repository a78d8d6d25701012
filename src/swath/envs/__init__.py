"""Environments: gymnasium, vector, torch-native, TorchRL; one interface to the loop."""

from swath.envs.base import Env, GymEnv, SerialEnv

__all__ = ["Env", "GymEnv", "SerialEnv"]
