"""RLlib's env runners with the envs and policies of the bench: a contestant of `bench.ray`.

They are Ray actors that are made and asked as RLlib's EnvRunner describes it, with no Algorithm
around them: no metrics are fetched, and episodes are not put together to a train batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

import ray
from bench.works import Work

IN_FLIGHT = 2
"""Async calls of an actor that are under way: it never waits for this process."""


class Acts(TorchRLModule):
    """The policy of a work. It gives actions, so that no distribution has to be made of them."""

    def setup(self) -> None:
        self.policy = self.model_config["policy"]()

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTIONS: self.policy(batch[Columns.OBS])}


def make_env(make: Any, config: Any) -> gym.Env:
    return make()


class EnvRunners:
    """A batch from all of them (sync) or from one of them, as a list of episodes, endlessly."""

    def __init__(self, work: Work, sync: bool, workers: int) -> None:
        self._frames, self._sync, self._policy = work.frames_per_batch, sync, work.policy()
        config = (
            PPOConfig()
            .environment(partial(make_env, work.make))
            .env_runners(
                num_env_runners=workers,
                num_envs_per_env_runner=work.num_envs,
                explore=False,
            )
            .rl_module(rl_module_spec=RLModuleSpec(Acts, model_config={"policy": work.policy}))
        )
        kind = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
        self._actors = [
            kind.remote(config=config, worker_index=number + 1, num_workers=workers)
            for number in range(workers)
        ]

    def __iter__(self) -> Iterator[list[SingleAgentEpisode]]:
        if self._sync:
            while True:
                parts = ray.get([self._ask(actor) for actor in self._actors])
                yield [episode for part in parts for episode in part]
        asked = {self._ask(actor): actor for actor in self._actors * IN_FLIGHT}
        while True:
            done = ray.wait(list(asked))[0][0]
            actor = asked.pop(done)
            asked[self._ask(actor)] = actor
            yield ray.get(done)

    def _ask(self, actor: Any) -> Any:
        return actor.sample.remote(num_timesteps=self._frames)

    def update_policy_weights_(self, wait: bool = False) -> None:
        """Send the policy's weights, put into Ray's store once."""
        names = self._policy.state_dict().items()
        state = {f"policy.{name}": value.numpy() for name, value in names}
        stored = ray.put({COMPONENT_RL_MODULE: state})
        sent = [actor.set_state.remote(stored) for actor in self._actors]
        if wait:
            ray.get(sent)


def count(episodes: list[SingleAgentEpisode]) -> int:
    """Frames of a batch, whose rewards are summed."""
    sum(episode.get_return() for episode in episodes)
    return sum(map(len, episodes))
