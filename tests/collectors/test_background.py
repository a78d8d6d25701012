"""Collecting in the background: `start`, `pause`, failures, weights that are never torn."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import nn
from wait_kit import comes_true

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.envs import SerialEnv
from swath.errors import ClosedError, EnvError, UsageError
from swath.testing import CountingEnv, CrashingEnv, check_transitions


class Kept:
    """Anything with `extend` is a replay buffer."""

    def __init__(self):
        self.batches, self.error = [], None
        self.filled = threading.Event()

    def extend(self, batch):
        self.batches.append(batch.clone())
        self.filled.set()

    def fail(self, error):
        self.error = error

    @property
    def frames(self):
        return sum(batch.numel() for batch in self.batches)


def until(condition, seconds=20):
    assert comes_true(condition, seconds)


KINDS = {
    "single": lambda **kw: Collector(SerialEnv(2, CountingEnv), **kw),
    "sync": lambda **kw: MultiSyncCollector([CountingEnv] * 2, **kw),
    "async": lambda **kw: MultiAsyncCollector([CountingEnv] * 2, **kw),
    "one": lambda **kw: AsyncCollector(CountingEnv, **kw),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_it_collects_until_total_frames(kind):
    buffer = Kept()
    with KINDS[kind](
        frames_per_batch=20, total_frames=200, seed=0, replay_buffer=buffer
    ) as collector:
        assert not collector.is_running()
        collector.start()
        until(lambda: not collector.is_running())
        assert buffer.frames == 200
        assert collector.stats()["frames"] == 200
    assert check_transitions(buffer.batches) == 200


@kinds
def test_a_pause_rests_between_two_batches(kind):
    buffer = Kept()
    with KINDS[kind](frames_per_batch=20, seed=0, replay_buffer=buffer) as collector:
        collector.start()
        assert buffer.filled.wait(20)
        with collector.pause():
            assert collector.is_running()
            before = buffer.frames
            time.sleep(0.1)
            assert buffer.frames == before
            collector.state_dict()
        until(lambda: buffer.frames > before)
        collector.pause()
        before = buffer.frames
        time.sleep(0.05)
        assert buffer.frames == before
        collector.resume()
        until(lambda: buffer.frames > before)
        collector.async_shutdown()
        assert not collector.is_running()
    check_transitions(buffer.batches)


@kinds
def test_the_end_of_one_pause_is_not_the_end_of_another(kind):
    buffer = Kept()
    with KINDS[kind](frames_per_batch=20, seed=0, replay_buffer=buffer) as collector:
        collector.start()
        assert buffer.filled.wait(20)
        first, second = collector.pause(), collector.pause()
        before = buffer.frames
        with first:
            pass
        time.sleep(0.1)
        collector.state_dict()
        assert buffer.frames == before
        with second:
            collector.state_dict()
        until(lambda: buffer.frames > before)
        collector.pause()
        collector.pause()
        collector.resume()  # ends all of them
        before = buffer.frames
        until(lambda: buffer.frames > before)
    check_transitions(buffer.batches)


@kinds
def test_calls_that_make_no_sense_meanwhile(kind):
    buffer = Kept()
    with KINDS[kind](frames_per_batch=20, replay_buffer=buffer) as collector:
        collector.start()
        with pytest.raises(UsageError, match="in the background"):
            collector.next()
        with pytest.raises(UsageError, match="was started already"):
            collector.start()
        collector.set_seed(3)
        collector.reset()
    with pytest.raises(ClosedError):
        collector.start()
    with KINDS[kind](frames_per_batch=20) as collector, pytest.raises(UsageError, match="buffer"):
        collector.start()


@kinds
def test_weights_are_not_published_behind_the_learners_back(kind):
    with KINDS[kind](
        frames_per_batch=20, replay_buffer=Kept(), update_at_each_batch=True
    ) as collector:
        with pytest.raises(UsageError, match="in the middle of a step"):
            collector.start()
        assert not collector.is_running()


@pytest.mark.parametrize("kind", ["single", "sync", "async"])
def test_a_failure_is_raised_by_the_next_call(kind):
    makers = [CountingEnv, lambda: CrashingEnv(at_step=50)]
    make = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}[kind]
    buffer = Kept()
    with make(makers, frames_per_batch=20, seed=0, replay_buffer=buffer) as collector:
        collector.start()
        until(lambda: not collector.is_running())
        for call in (collector.update_policy_weights_, collector.resume, collector.state_dict):
            with pytest.raises(EnvError, match="env 1") as caught:
                call()
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert buffer.error is caught.value


@kinds
def test_a_learner_samples_meanwhile(kind):
    with (
        ReplayBuffer(500, batch_size=32, min_size=100, seed=0) as buffer,
        KINDS[kind](frames_per_batch=20, seed=0, replay_buffer=buffer) as collector,
    ):
        collector.start()
        for _ in range(50):
            assert buffer.sample().batch_size == (32,)
        until(lambda: buffer.stats()["frames"] > 1000)
        assert 480 <= len(buffer) <= 500  # those being written right now do not count


def test_a_failure_is_raised_by_sample_too():
    makers = [CountingEnv, lambda: CrashingEnv(at_step=50)]
    with (
        ReplayBuffer(500, batch_size=32, min_size=400) as buffer,
        Collector(makers, frames_per_batch=20, replay_buffer=buffer) as collector,
    ):
        collector.start()
        with pytest.raises(EnvError, match="env 1"):
            buffer.sample()


def test_a_sample_that_can_never_come_is_an_error():
    with (
        ReplayBuffer(500, batch_size=32, min_size=400) as buffer,
        Collector(CountingEnv, frames_per_batch=20, total_frames=100, replay_buffer=buffer) as c,
    ):
        c.start()
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample()
        assert buffer.stats()["frames"] == 100


def test_the_ratio_holds_and_shutdown_does_not_wait_for_it():
    buffer = ReplayBuffer(10_000, samples_per_insert=2, tolerance=100, batch_size=20)
    with buffer, Collector(CountingEnv, frames_per_batch=20, replay_buffer=buffer) as collector:
        collector.start()
        for _ in range(40):
            buffer.sample()
        stats = buffer.stats()
        assert 2 * stats["frames"] <= stats["samples"] + 100 + 2 * 20 + 2
        time.sleep(0.1)  # now the thread waits for samples
        collector.async_shutdown(timeout=600)  # more than a test may take
        assert not collector.is_running()


@kinds
def test_a_pause_while_samples_are_missing_writes_what_was_made(kind):
    buffer = ReplayBuffer(10_000, samples_per_insert=2, tolerance=0, batch_size=20)
    with buffer, KINDS[kind](frames_per_batch=20, seed=0, replay_buffer=buffer) as collector:
        collector.start()
        until(lambda: collector.stats()["frames"] >= 40)  # the second batch waits for samples
        assert buffer.stats()["frames"] == 20
        with collector.pause():  # so that a state that is taken now has all frames
            before = buffer.stats()["frames"]
            assert before == collector.stats()["frames"]
        until(lambda: collector.stats()["frames"] > before)
        assert buffer.stats()["frames"] == before  # the ratio holds again


def test_a_sample_beyond_the_ratio_is_an_error_when_the_collector_has_ended():
    buffer = ReplayBuffer(500, samples_per_insert=1, tolerance=0, min_size=20, batch_size=10)
    with (
        buffer,
        Collector(CountingEnv, frames_per_batch=20, total_frames=60, replay_buffer=buffer) as c,
    ):
        c.start()
        for _ in range(4):
            buffer.sample()
        with pytest.raises(
            UsageError, match=r"samples_per_insert=1\), and no writer is registered"
        ):
            buffer.sample()


class Telling(nn.Module):
    """Shows in its action whether both weights are of one version."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(200_000))
        self.b = nn.Parameter(torch.zeros(200_000))

    def forward(self, observation):
        torn = (self.a[-1] != self.b[0]) | (self.a[0] != self.a[-1])
        return {
            "action": torn.long().expand(observation.shape[0]),
            "value": self.a[0].expand(observation.shape[0]),
        }


def test_no_forward_pass_sees_half_of_an_update():
    policy, buffer = Telling(), Kept()
    with Collector(
        SerialEnv(2, CountingEnv), policy, frames_per_batch=40, replay_buffer=buffer
    ) as collector:
        collector.start()
        for version in range(1, 150):
            with torch.no_grad():  # what an optimizer does, in place
                policy.a.fill_(version)
                policy.b.fill_(version)
            assert collector.update_policy_weights_() == version
            time.sleep(0.002)
        assert buffer.filled.wait(20)
        until(lambda: buffer.batches[-1]["collector", "policy_version"].max() == 149)
    data = torch.cat(buffer.batches, 1)
    assert not data["action"].any()
    assert torch.equal(data["value"], data["collector", "policy_version"].float())
    assert len(data["value"].unique()) > 10


def test_shutdown_does_not_wait_for_the_batch():
    class Slow(CountingEnv):
        def step(self, action):
            time.sleep(0.01)
            return super().step(action)

    collector = Collector(Slow, frames_per_batch=100_000, replay_buffer=Kept())
    collector.start()
    time.sleep(0.1)
    collector.async_shutdown(timeout=600)  # more than a test may take


def test_a_pause_that_is_interrupted_is_none():
    held = threading.Event()
    with Collector(
        CountingEnv,
        frames_per_batch=20,
        replay_buffer=Kept(),
        post_collect_hook=lambda b: held.wait(),
    ) as collector:
        collector.start()
        ring = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
        ring.start()
        with pytest.raises(KeyboardInterrupt):
            collector.pause()  # in vain: the batch does not get done
        ring.join()
        held.set()
        until(lambda: collector.stats()["frames"] > 100)
