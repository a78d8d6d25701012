"""What people pass by mistake is refused when a collector is made, in words that name the way."""

from __future__ import annotations

import pytest
import torch

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.errors import UsageError
from swath.testing import CountingEnv

WRONG = {
    "a policy first": ({"create_env_fn": torch.nn.Linear(3, 2)}, "Linear, which looks like a pol"),
    "a class of buffer": ({"replay_buffer": ReplayBuffer}, r"replay_buffer is the class ReplayBuf"),
    "no mapping": ({"create_env_kwargs": "render_mode"}, "keyword arguments as a mapping are exp"),
    "nothing to count": ({"frames_per_batch": 0}, "frames_per_batch"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_wrong_argument_is_refused_in_words(kind, wrong):
    arguments, message = WRONG[wrong]
    arguments = {"create_env_fn": CountingEnv, "frames_per_batch": 20, **arguments}
    env = arguments.pop("create_env_fn")
    with pytest.raises(UsageError, match=message):
        kind(env if kind is Collector else [env], **arguments)


def test_kwargs_for_each_worker_are_refused_where_there_is_none():
    with pytest.raises(UsageError, match="a list of these, too, one for each worker"):
        Collector(CountingEnv, create_env_kwargs=[{}], frames_per_batch=20)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_without_frames_per_batch_it_is_called_missing(kind):
    with pytest.raises(UsageError, match="frames_per_batch is missing: give"):
        kind([CountingEnv])


def test_a_state_of_another_kind_of_collector_is_refused_in_words():
    with (
        Collector(CountingEnv, frames_per_batch=20) as alone,
        MultiSyncCollector([CountingEnv], frames_per_batch=20) as crew,
    ):
        with pytest.raises(UsageError, match=r"state is of a collector without workers; .* has 1"):
            crew.load_state_dict(alone.state_dict())
        with pytest.raises(UsageError, match=r"state is of batches of all workers; .* one process"):
            alone.load_state_dict(crew.state_dict())
        assert alone.next().numel() == crew.next().numel() == 20
