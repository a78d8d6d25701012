"""Torch-native CartPole, an MLP of 64x64, T = 32: envs, policy and data on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bench.gpu.turns import Turn
from bench.policies import Greedy
from swath.collectors import Collector
from swath.envs import TorchCartPole

STEPS = 32
DEVICE = torch.device("cuda", 0)


def cartpoles(envs: int, fused: bool) -> TorchCartPole:
    env = TorchCartPole(envs, DEVICE)
    return env.compile() if fused else env


def policy() -> nn.Module:
    return Greedy(4, 2, seed=3).to(DEVICE)


class Swath:
    """swath's `Collector`, with the whole rollout as one graph or step by step."""

    def __init__(self, envs: int, cudagraph: bool, fused: bool = False) -> None:
        self.collector = Collector(
            cartpoles(envs, fused),
            policy(),
            frames_per_batch=envs * STEPS,
            cudagraph=cudagraph,
            seed=0,
        )
        self.total = torch.zeros((), device=DEVICE)

    def __call__(self) -> int:
        batch = self.collector.next()
        self.total += batch["next", "reward"].sum()
        return batch.numel()

    def close(self) -> None:
        self.collector.shutdown()


class Bare:
    """A loop by hand, captured: the rows of a batch, overwritten by the next; no ids, no leases."""

    def __init__(self, envs: int, fused: bool) -> None:
        self.env, self.policy = cartpoles(envs, fused), policy()
        self.env.seed(torch.arange(envs, device=DEVICE))
        self.obs = torch.empty(STEPS + 1, envs, 4, device=DEVICE)
        self.next_obs = torch.empty(STEPS, envs, 4, device=DEVICE)
        self.action = torch.empty(STEPS, envs, dtype=torch.int64, device=DEVICE)
        self.reward = torch.empty(STEPS, envs, device=DEVICE)
        self.flags = torch.empty(3, STEPS, envs, dtype=torch.bool, device=DEVICE)
        self.total = torch.zeros((), device=DEVICE)
        self.obs[STEPS].copy_(self.env.reset())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            self.rollout()
            self.rollout()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.rollout()

    def rollout(self) -> None:
        terminated, truncated, done = self.flags
        self.obs[0].copy_(self.obs[STEPS])
        for t in range(STEPS):
            self.action[t].copy_(self.policy(self.obs[t]))
            observation, reward, ended, cut = self.env.step(self.action[t])
            self.next_obs[t].copy_(observation)
            self.reward[t].copy_(reward)
            terminated[t].copy_(ended)
            truncated[t].copy_(cut)
            torch.logical_or(ended, cut, out=done[t])
            self.obs[t + 1].copy_(self.env.reset(done[t]))

    def __call__(self) -> int:
        self.graph.replay()
        self.total += self.reward.sum()
        return self.reward.numel()


class Peer:
    """TorchRL's `Collector` on the same env, as an `EnvBase`."""

    def __init__(self, envs: int, fused: bool) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import Collector as TorchRLCollector

        from bench.gpu.peer import CartPoleBase

        module = TensorDictModule(policy(), in_keys=["observation"], out_keys=["action"])
        self.collector = TorchRLCollector(
            CartPoleBase(cartpoles(envs, fused)),
            module,
            frames_per_batch=envs * STEPS,
            total_frames=-1,
            device=DEVICE,
        )
        self.batches = iter(self.collector)
        self.total = torch.zeros((), device=DEVICE)

    def __call__(self) -> int:
        batch = next(self.batches)
        self.total += batch["next", "reward"].sum()
        return batch.numel()

    def close(self) -> None:
        self.collector.shutdown()


def contestants(envs: int, fused: bool) -> dict[str, Callable[[], Turn]]:
    """Return who races; with `fused`, the arithmetic of the env is compiled for all of them."""
    return {
        "swath graph": lambda: Swath(envs, True, fused),
        "swath eager": lambda: Swath(envs, False, fused),
        "TorchRL": lambda: Peer(envs, fused),
        "bare graph": lambda: Bare(envs, fused),
    }
