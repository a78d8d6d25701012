"""JAX envs, on the CPU and on a GPU."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
import pytest
import torch

from swath.collectors import Collector
from swath.envs import JaxEnv

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of a GPU
jax = pytest.importorskip("jax")
jnp = jax.numpy

INF = np.float32(np.inf)
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
both = pytest.mark.parametrize("device", ["cpu", GPU])


class Walk:
    """A gymnax-style env: a walk on a line that ends beyond 3 and is cut after 12 steps."""

    def reset_env(self, key, params):
        start = jax.random.uniform(key, (), minval=-0.5, maxval=0.5)
        state = {"x": start, "t": jnp.zeros((), jnp.int32)}
        return self.observe(state), state

    def step_env(self, key, state, action, params):
        x = state["x"] + jnp.where(action == 1, params["push"], -params["push"])
        state = {"x": x, "t": state["t"] + 1}
        out, late = jnp.abs(x) > 3, state["t"] >= 12
        return self.observe(state), state, -jnp.abs(x), out | late, {"truncation": late & ~out}

    def observe(self, state):
        return jnp.stack([state["x"], state["t"].astype(jnp.float32)])

    def reset(self, key, params):
        raise AssertionError("the one that resets itself")

    step = reset


def make(num_envs=6, device="cpu"):
    box = gymnasium.spaces.Box(-INF, INF, (2,), np.float32)
    params = {"push": jnp.float32(0.5)}
    space = gymnasium.spaces.Discrete(2)
    return JaxEnv(Walk(), num_envs, box, space, params=params, device=device)


def policy(observation):
    """Some walk to the right until they are out, the others to and fro until they are cut."""
    walks = (observation[..., 0] * 1000).floor() % 2 == 0
    return (walks | (observation[..., 1] % 2 == 0)).long()


@both
def test_every_row_is_a_real_transition(device):
    with Collector(
        make(6, device), policy, frames_per_batch=6 * 40, seed=3, device=device
    ) as collector:
        batch = collector.next()
    assert batch["observation"].device.type == device
    check(batch)
    starts = batch["observation"][:, 1:][batch["next", "done"][:, :-1, 0]]
    assert len(starts[:, 0].unique()) == len(starts)


@both
def test_many_envs_and_many_batches(device):
    """On a GPU neither side waits on the host for the other."""
    frames = 4096 * 50
    with Collector(
        make(4096, device), policy, frames_per_batch=frames, seed=3, device=device
    ) as collector:
        for _ in range(10):
            check(collector.next())


def check(batch):
    now, then = batch["observation"], batch["next", "observation"]
    push = torch.where(batch["action"] == 1, 0.5, -0.5)
    torch.testing.assert_close(then[..., 0], now[..., 0] + push)
    assert torch.equal(then[..., 1], now[..., 1] + 1)
    torch.testing.assert_close(batch["next", "reward"][..., 0], -then[..., 0].abs())
    done = batch["next", "done"][..., 0]
    assert torch.equal(done, (then[..., 0].abs() > 3) | (then[..., 1] >= 12))
    assert torch.equal(batch["next", "truncated"][..., 0], done & (then[..., 0].abs() <= 3))
    assert batch["next", "terminated"].any()
    assert batch["next", "truncated"].any()
    starts = now[:, 1:][done[:, :-1]]
    assert (starts[:, 1] == 0).all()
    assert torch.equal(now[:, 1:][~done[:, :-1]], then[:, :-1][~done[:, :-1]])


@both
def test_the_same_seed_gives_the_same_data_and_another_does_not(device):
    def collected(seed):
        env = make(6, device)
        with Collector(env, policy, frames_per_batch=120, seed=seed, device=device) as collector:
            return collector.next()["observation"].clone()

    assert torch.equal(collected(1), collected(1))
    assert not torch.equal(collected(1), collected(2))


@both
def test_what_it_returned_does_not_change(device):
    env = make(6, device)
    env.seed(torch.arange(6))
    first = env.reset()
    copy = first.clone()
    for _ in range(20):
        env.step(torch.ones(6, dtype=torch.int64, device=device))
        env.reset(torch.ones(6, dtype=torch.bool, device=device))
    assert torch.equal(first, copy)


def test_a_state_without_envs_says_so():
    with Collector(make(), policy, frames_per_batch=120) as collector:
        collector.next()
        with pytest.warns(UserWarning, match="compiled functions of JAX cannot be pickled"):
            collector.state_dict()
