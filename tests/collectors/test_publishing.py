"""Versions are never used twice, and no publication is lost, whatever comes in between."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from types import SimpleNamespace

import multi_kit as kit
import pytest
import torch

from swath.collectors import Collector
from swath.errors import UsageError
from swath.memory.weights import WeightBlock, WeightSpec
from swath.workers.remote import RemoteWeights


@pytest.fixture
def interrupts():
    """Let Ctrl-C be an exception, as in any process; test runners may have changed that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(function):
    """Let a function be followed by Ctrl-C, once."""
    fired = []

    def call(*args, **kwargs):
        answer = function(*args, **kwargs)
        if not fired:
            fired.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    return call


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("kind", list(kit.KINDS))
def test_ctrl_c_while_weights_are_published(kind, monkeypatch):
    policy = kit.Telling()
    with kit.KINDS[kind]([kit.wide] * 2, policy, frames_per_batch=20) as collector:
        collector.next()
        monkeypatch.setattr(WeightBlock, "publish", interrupting(WeightBlock.publish))
        with pytest.raises(KeyboardInterrupt):
            collector.update_policy_weights_(policy.become(1))
        assert collector.update_policy_weights_(policy.become(2), wait=True) == 2
        seen = [collector.next() for _ in range(6)]
        assert all(kit.told_right(batch) for batch in seen)
        assert (seen[-1]["collector", "policy_version"] == 2).all()
        with pytest.raises(UsageError, match="do not fit"):
            collector.update_policy_weights_({"weight": 3.0, "other": 3.0})
        assert collector.policy_version == 2


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_weights_are_copied_in_one_process(monkeypatch):
    policy, other = kit.Telling(), kit.Telling(5)
    with Collector(kit.wide, policy, frames_per_batch=20) as collector:
        copied = interrupting(type(policy.weight).copy_)
        monkeypatch.setattr(type(policy.weight), "copy_", copied)
        with pytest.raises(KeyboardInterrupt):
            collector.update_policy_weights_(other)
        monkeypatch.undo()
        assert policy.weight == policy.mean == 5, "half of an update"


def test_what_is_published_while_another_thread_directs_is_not_lost():
    class Slow(dict):
        """Lets another thread direct before it takes something in."""

        def update(self, *args):
            other.start()
            other.join(0.3)
            super().update(*args)

    weights = RemoteWeights(SimpleNamespace(links={}), WeightSpec.of(kit.Telling()))
    other, weights._later = threading.Thread(target=weights.direct), Slow()
    weights.publish(kit.Telling(1), 1, [0], later=True)
    other.join()
    weights.direct()
    assert weights._current[0][0].version == 1


def train(policy):
    with torch.no_grad():
        policy.weight.add_(1)


@pytest.mark.parametrize("kind", list(kit.KINDS))
def test_a_policy_that_is_trained_and_never_published_is_warned_of_once(kind):
    policy = kit.Telling()
    with kit.KINDS[kind]([kit.wide] * 2, policy, frames_per_batch=20) as collector:
        train(policy)  # nobody has acted yet
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                collector.next()
        train(policy)
        with pytest.warns(UserWarning, match=r"never published.*update_policy_weights_") as caught:
            assert (collector.next()["action"] == 0).all()
        assert [one.filename for one in caught] == [__file__]
        train(policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            next(iter(collector))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "publishes"), [({}, True), ({"update_at_each_batch": True}, False)]
)
def test_who_publishes_is_not_warned(options, publishes):
    policy = kit.Telling()
    with kit.sync([kit.wide] * 2, policy, frames_per_batch=20, **options) as collector:
        for _ in range(3):
            collector.next()
            train(policy)
            if publishes:
                collector.update_policy_weights_()


@pytest.mark.filterwarnings("error")
def test_nor_is_who_trains_the_policy_that_acts():
    policy = kit.Telling()
    with Collector(kit.wide, policy, frames_per_batch=20) as collector:
        for value in range(3):
            assert (collector.next()["action"] == value).all()
            train(policy)
