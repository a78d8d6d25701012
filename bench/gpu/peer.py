"""TorchRL's side: the torch-native CartPole as an `EnvBase`."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from swath.envs import TorchCartPole


class CartPoleBase(EnvBase):
    """N CartPoles; steps and masked resets are those of `TorchCartPole`."""

    def __init__(self, inner: TorchCartPole) -> None:
        envs, device = inner.num_envs, inner.device
        super().__init__(device=device, batch_size=[envs])
        self.inner = inner
        self.inner.seed(torch.arange(envs, device=device))
        flag = Categorical(2, shape=(envs, 1), dtype=torch.bool, device=device)
        self.observation_spec = Composite(
            observation=Unbounded((envs, 4), device=device), shape=[envs], device=device
        )
        self.action_spec = Categorical(2, shape=(envs,), dtype=torch.int64, device=device)
        self.reward_spec = Bounded(0.0, 1.0, (envs, 1), device=device)
        self.full_done_spec = Composite(
            done=flag.clone(),
            terminated=flag.clone(),
            truncated=flag.clone(),
            shape=[envs],
            device=device,
        )

    def _flags(self, terminated: torch.Tensor, truncated: torch.Tensor) -> dict[str, torch.Tensor]:
        both = (terminated | truncated)[:, None]
        return {"done": both, "terminated": terminated[:, None], "truncated": truncated[:, None]}

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        observation = self.inner.reset(None if mask is None else mask[:, 0])
        none = torch.zeros(self.batch_size, dtype=torch.bool, device=self.device)
        values = {"observation": observation, **self._flags(none, none)}
        return TensorDict(values, self.batch_size, self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        observation, reward, terminated, truncated = self.inner.step(tensordict["action"])
        values = {"observation": observation, "reward": reward[:, None]}
        values.update(self._flags(terminated, truncated))
        return TensorDict(values, self.batch_size, self.device)

    def _set_seed(self, seed: int | None) -> None:
        pass
