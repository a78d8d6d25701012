"""Envs on the CPU, the policy on the GPU: CartPole with an MLP, pixels with a CNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from bench.envs import FramesEnv
from bench.gpu.turns import Turn
from bench.policies import Greedy
from swath.collectors import Collector
from swath.envs import SerialEnv

STEPS = 32
DEVICE = torch.device("cuda", 0)


class Cnn(nn.Module):
    """The usual network for 4x84x84 frames; the best of its actions."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions),
        )  # fmt: skip

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation.float() / 255).argmax(-1)


def cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


WORKS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "CartPole, MLP": (cartpole, partial(Greedy, 4, 2, 3)),
    "pixels, CNN": (FramesEnv, partial(Cnn, 4)),
}


class Swath:
    """swath's `Collector`, the envs in one or two groups, the policy as a graph or not."""

    def __init__(self, make: Any, policy: nn.Module, envs: int, **options: Any) -> None:
        self.collector = Collector(
            SerialEnv(envs, make),
            policy.to(DEVICE),
            frames_per_batch=envs * STEPS,
            **options,
        )

    def __call__(self) -> int:
        return self.collector.next().numel()

    def close(self) -> None:
        self.collector.shutdown()


class Bare:
    """A loop by hand: rows in pinned memory, one copy up and one down per step."""

    def __init__(self, make: Any, policy: nn.Module, envs: int) -> None:
        self.envs, self.policy = [make() for _ in range(envs)], policy.to(DEVICE)
        space = self.envs[0].observation_space
        dtype = torch.from_numpy(np.zeros(1, space.dtype)).dtype
        self.obs = torch.empty(STEPS + 1, envs, *space.shape, dtype=dtype, pin_memory=True)
        self.next_obs = torch.empty(STEPS, envs, *space.shape, dtype=dtype)
        self.action = torch.empty(STEPS, envs, dtype=torch.int64, pin_memory=True)
        self.reward, self.done = np.zeros((STEPS, envs), np.float32), np.zeros((STEPS, envs), bool)
        self.rows, self.next_rows = self.obs.numpy(), self.next_obs.numpy()
        for i, env in enumerate(self.envs):
            self.rows[STEPS, i] = env.reset()[0]

    @torch.no_grad()
    def __call__(self) -> int:
        self.rows[0] = self.rows[STEPS]
        for t in range(STEPS):
            answer = self.policy(self.obs[t].to(DEVICE, non_blocking=True))
            self.action[t].copy_(answer, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            self._step(t, self.action[t].tolist())
        return self.reward.size

    def _step(self, t: int, actions: list[int]) -> None:
        rows, following = self.rows[t + 1], self.next_rows[t]
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            rows[i], self.reward[t, i], terminated, truncated, _ = env.step(action)
            following[i] = rows[i]
            self.done[t, i] = terminated or truncated
            if terminated or truncated:
                rows[i] = env.reset()[0]


class Peer:
    """TorchRL's `Collector` over a `SerialEnv`, with its policy on the GPU."""

    def __init__(self, make: Any, policy: nn.Module, envs: int) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import Collector as TorchRLCollector
        from torchrl.envs import GymWrapper
        from torchrl.envs import SerialEnv as TorchRLSerialEnv

        module = TensorDictModule(policy.to(DEVICE), in_keys=["observation"], out_keys=["action"])
        wrapped = partial(_wrapped, GymWrapper, make)
        self.collector = TorchRLCollector(
            TorchRLSerialEnv(envs, wrapped),
            module,
            frames_per_batch=envs * STEPS,
            total_frames=-1,
            env_device="cpu",
            policy_device=DEVICE,
            storing_device="cpu",
        )
        self.batches = iter(self.collector)

    def __call__(self) -> int:
        return next(self.batches).numel()

    def close(self) -> None:
        self.collector.shutdown()


def _wrapped(wrapper: Any, make: Any) -> Any:
    return wrapper(make(), categorical_action_encoding=True)


def contestants(work: str, envs: int) -> dict[str, Callable[[], Turn]]:
    make, policy = WORKS[work]
    return {
        "swath": lambda: Swath(make, policy(), envs),
        "swath, 2 groups": lambda: Swath(make, policy(), envs, env_groups=2),
        "swath, graph": lambda: Swath(make, policy(), envs, cudagraph_policy=True),
        "swath, 2 groups, graph": lambda: Swath(
            make, policy(), envs, env_groups=2, cudagraph_policy=True
        ),
        "TorchRL": lambda: Peer(make, policy(), envs),
        "bare loop": lambda: Bare(make, policy(), envs),
    }
