"""JAX envs, on the CPU."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from swath.collectors import Collector
from swath.envs import JaxEnv

jax = pytest.importorskip("jax")
jnp = jax.numpy

INF = np.float32(np.inf)


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


def make(num_envs=6):
    box = gymnasium.spaces.Box(-INF, INF, (2,), np.float32)
    params = {"push": jnp.float32(0.5)}
    return JaxEnv(Walk(), num_envs, box, gymnasium.spaces.Discrete(2), params=params)


def policy(observation):
    """Some walk to the right until they are out, the others to and fro until they are cut."""
    walks = (observation[..., 0] * 1000).floor() % 2 == 0
    return (walks | (observation[..., 1] % 2 == 0)).long()


def test_every_row_is_a_real_transition():
    with Collector(make(), policy, frames_per_batch=6 * 40, seed=3) as collector:
        batch = collector.next()
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
    assert len(starts[:, 0].unique()) == len(starts)
    assert torch.equal(now[:, 1:][~done[:, :-1]], then[:, :-1][~done[:, :-1]])


def test_the_same_seed_gives_the_same_data_and_another_does_not():
    def collected(seed):
        with Collector(make(), policy, frames_per_batch=120, seed=seed) as collector:
            return collector.next()["observation"].clone()

    assert torch.equal(collected(1), collected(1))
    assert not torch.equal(collected(1), collected(2))


def test_what_it_returned_does_not_change():
    env = make()
    env.seed(torch.arange(6))
    first = env.reset()
    copy = first.clone()
    for _ in range(20):
        env.step(torch.ones(6, dtype=torch.int64))
        env.reset(torch.ones(6, dtype=torch.bool))
    assert torch.equal(first, copy)


def test_a_state_without_envs_says_so():
    with Collector(make(), policy, frames_per_batch=120) as collector:
        collector.next()
        with pytest.warns(UserWarning, match="compiled functions of JAX cannot be pickled"):
            collector.state_dict()
