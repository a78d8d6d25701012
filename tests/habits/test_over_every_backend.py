"""Habits work alike, wherever the workers are."""

from __future__ import annotations

import io
import json
import warnings

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from swath.errors import PolicyError, UsageError
from swath.testing import CountingEnv, check_transitions

pytestmark = [
    pytest.mark.over("processes", "gloo", "ray"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
ENVS = [CountingEnv] * 2


def count_calls(td):
    """A policy that takes a TensorDict and finds in it what it wrote at the last step."""
    calls = td.get("calls", torch.zeros(*td.shape, 1))
    return td.update({"action": torch.zeros(td.shape, dtype=torch.int64), "calls": calls + 1})


@KINDS
def test_a_batch_is_saved_at_its_size(backend, kind):
    with backend.make(kind, ENVS, frames_per_batch=2000) as collector:
        batch = collector.next()
        for thing in (batch, batch["observation"], {"a": batch["action"]}):
            file = io.BytesIO()
            torch.save(thing, file)
            values = thing.values(True, True) if isinstance(thing, TensorDict) else [thing]
            size = sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
            size += thing["a"].nbytes if isinstance(thing, dict) else 0
            assert len(file.getvalue()) < size + 20_000
            assert len(file.getvalue()) > size


@KINDS
def test_a_function_of_a_tensordict_finds_what_it_wrote(backend, kind):
    with backend.make(kind, ENVS, count_calls, frames_per_batch=20) as collector:
        batches = [collector.next() for _ in range(4)]
    for batch in batches:
        calls = batch["calls"].reshape(-1, batch.shape[-1])
        assert (calls.diff() == 1).all()
    assert max(int(batch["calls"].max()) for batch in batches) > 20


@KINDS
def test_what_torchrls_users_give_call_and_read(backend, kind):
    """-1, None and whole floats; hooks that are set later; texts for `map_fn`; plain statistics."""
    seen = []
    options = {"max_frames_per_traj": -1, "init_random_frames": None, "split_trajs": None}
    with backend.make(kind, ENVS, frames_per_batch=2e1, total_frames=80, **options) as collector:
        collector.set_post_collect_hook(lambda batch: seen.append(batch.numel()))
        returns = []
        for batch in collector:
            returns += collector.take_episodes()["return"]
            assert batch.numel() == 20
        assert isinstance(collector, torch.utils.data.IterableDataset)
        assert collector.total_frames == 80
        assert collector.requested_frames_per_batch == 20
        assert collector.map_fn("worker_idx") == [0, 1]
        assert collector.getattr_env("action_space").n == CountingEnv().action_space.n
        stats = json.loads(json.dumps(collector.stats()))
        assert (stats["frames"], stats["workers"], stats["workers_alive"]) == (80, 2, 2)
        assert stats["episodes"] == len(returns)
    assert seen == [20] * 4


@KINDS
def test_weights_are_given_in_the_forms_of_torchrl(backend, kind):
    module = nn.Linear(3, 1)
    policy = TensorDictModule(Rounded(module), ["observation"], ["action", "value"])
    with backend.make(kind, ENVS, policy, frames_per_batch=20) as collector:
        for number in (1.0, 2.0):
            nn.init.zeros_(module.weight)
            nn.init.constant_(module.bias, number)
            weights = TensorDict.from_module(policy)
            forms = {1.0: {"policy_weights": weights}, 2.0: {"weights_dict": {"policy": weights}}}
            collector.update_policy_weights_(**forms[number], wait=True)
            data = torch.cat([collector.next().reshape(-1) for _ in range(6)])
            newest = data["collector", "policy_version"] == int(number)
            assert newest[-1]
            assert (data["value"][newest] == number).all()


class Rounded(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, observation):
        value = self.inner(observation.float())
        return torch.zeros(observation.shape[:-1], dtype=torch.int64), value


def test_ids_of_the_script_work_in_workers(backend):
    gym.register("InTheScript-v0", CountingEnv)
    try:
        with backend.sync(["InTheScript-v0"] * 2, frames_per_batch=40) as collector:
            assert check_transitions(collector.next()) == 40
    finally:
        del gym.registry["InTheScript-v0"]


def test_env_objects_are_copied(backend):
    with backend.sync([CountingEnv(), gym.make("CartPole-v1")][:1] * 2, frames_per_batch=40) as c:
        assert check_transitions(c.next()) == 40


def test_a_torchrl_buffer_gets_frames(backend):
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(200), batch_size=4)
    options = {"frames_per_batch": 20, "total_frames": 60, "replay_buffer": buffer}
    with backend.sync(ENVS, **options) as collector:
        assert [batch for batch in collector if batch is not None] == []
    assert len(buffer) == 60
    assert buffer.sample()["observation"].shape == (4, 3)


def test_groups_of_agents_are_taken_as_they_are(backend):
    kit = pytest.importorskip("kits.torchrl_kit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with backend.sync([lambda: kit.Teams((2,))] * 2, frames_per_batch=40) as collector:
            batch = collector.next()
    assert batch.batch_size == (2, 2, 10)
    for name, agents in kit.GROUPS.items():
        assert batch.get(("next", name)).batch_size == (2, 2, 10, agents)


def test_mistakes_are_told_in_words(backend):
    def flat(observation):
        return observation.flatten(1).argmax(-1)

    with pytest.raises(PolicyError, match=r"Pass the env in a list, \[env\]"):
        backend.sync(ENVS, flat, frames_per_batch=20)
    with backend.sync(ENVS, frames_per_batch=20, postproc=lambda batch: None) as collector:
        with pytest.raises(UsageError, match="postproc returned None; expected the batch"):
            collector.next()
    with pytest.raises(UsageError, match="frames_per_batch is missing"):
        backend.sync(ENVS)
