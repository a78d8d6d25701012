"""Workers start without torch's compiler, and miss nothing once it is imported."""

from __future__ import annotations

import link_kit as kit
import pytest
import tensordict.base
import tensordict.utils
import torch

from swath.collectors import MultiSyncCollector
from swath.links import launch, pack
from swath.links.launch import stop_server


@pytest.fixture(autouse=True)
def fresh_server():
    stop_server()  # one that was asked for the compiler keeps it


def ask(payload, function):
    worker = launch(kit.answer, payload)
    worker.channel.receive()
    worker.channel.send((pack(function, "it"), ()))
    answer = worker.channel.receive()[0]
    worker.close(0.0)
    return answer


def has_compiler():
    return "_dynamo" in vars(torch)


def test_a_worker_of_a_plain_policy_never_imports_the_compiler():
    def policy(observation):
        return torch.full(observation.shape[:-1], int("_dynamo" in vars(torch)))

    with MultiSyncCollector(["CartPole-v1"] * 2, policy, frames_per_batch=20) as collector:
        assert not next(iter(collector))["action"].any()


@pytest.mark.parametrize("name", [b"torchrl.envs", b"torch._dynamo"])
def test_a_worker_that_needs_the_compiler_finds_it_imported(name):
    assert not ask(b"payload", has_compiler)
    assert ask(b"payload of " + name, has_compiler)


def marks():
    """Tell which of the functions that tensordict marks are marked."""
    from torch._dynamo import trace_rules

    allowed = id(tensordict.base._foreach_copy_compiled) in trace_rules._allowed_callable_ids
    return allowed, getattr(tensordict.utils._lock_warn, "_dynamo_marked_constant", False)


def test_marks_are_set_when_the_compiler_is_imported():
    assert marks() == (True, True)
    assert ask(b"", marks) == (True, True)
