"""A replay buffer in an actor: collectors write, trainers sample, nothing passes through here."""

from __future__ import annotations

import time

import multi_kit as kit
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from swath.collectors import Collector
from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer, ReplayBuffer
from swath.data.ray import flatten, unflatten
from swath.envs import SerialEnv
from swath.errors import EnvError, UsageError, WorkerError
from swath.testing import CountingEnv, CrashingEnv, SlowEnv, check_transitions

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def test_a_batch_of_views_goes_as_one_block_and_comes_back_the_same():
    with Collector(SerialEnv(3, CountingEnv), frames_per_batch=30) as collector:
        batch = collector.next()
        block, about, size = flatten(batch)
        assert block.ctypes.data == batch["observation"].untyped_storage().data_ptr()
        other = TensorDict({"a": torch.rand(3), "b": {"c": torch.ones(3, 2, dtype=torch.uint8)}}, 3)
        for one in (batch, other):
            block, about, size = flatten(one)
            read_only = block.copy()
            read_only.flags.writeable = False
            again = unflatten(read_only, about, size)
            assert again.batch_size == one.batch_size
            assert (again == one).all()
            assert set(again.keys(True, True)) == set(one.keys(True, True))


def test_actors_write_and_others_sample(cluster):
    @cluster.remote(num_cpus=0)
    def sample(buffer):
        return buffer.sample(8)["index"].max().item()

    with RayReplayBuffer(5000, batch_size=64, seed=0) as buffer:
        options = {"frames_per_batch": 50, "total_frames": 3000, "replay_buffer": buffer}
        with RayCollector([[CountingEnv] * 2] * 2, **options) as collector:
            collector.start()
            batch = buffer.sample()  # waits for the first frames
            batch["observation"][:] = 0  # ours to write
            assert cluster.get(sample.remote(buffer)) < 3000
            while collector.is_running():
                assert buffer.sample().batch_size == (64,)
            stats = collector.stats()
            assert stats["frames"] == stats["replay"]["frames"] == 3000
            assert stats["replay"]["writer"] == "workers"
            with pytest.raises(UsageError, match="draw from it"):
                collector.rollout()
        stats = buffer.stats()
        assert (stats["frames"], len(buffer)) == (3000, 3000)
        whole = buffer.sample(3000)
    order = np.argsort(whole["index"].numpy(), kind="stable")
    rows = {tuple(row): n for n, row in enumerate(whole["observation"].numpy()[order].tolist())}
    taken = whole[torch.from_numpy(np.sort(list(rows.values())))]
    assert len(rows) > 1500  # with replacement, some two thirds of them
    assert len({row[0] for row in rows}) == 4
    assert (taken["next", "reward"] != 0).any()


def test_every_frame_is_written_once_in_order_per_env():
    with RayReplayBuffer(4000, seed=0) as buffer:
        options = {"frames_per_batch": 40, "total_frames": 1200, "replay_buffer": buffer}
        with RayCollector([CountingEnv] * 2, sync=True, **options) as collector:
            collector.start()
            while collector.is_running():
                time.sleep(0.01)
        frames = buffer._ask("read", "call", "state_dict")["frames"]
    batch = TensorDict(frames, [1200])
    for stamp in batch["observation"][:, 0].unique():
        own = batch[batch["observation"][:, 0] == stamp]
        check_transitions(own)
    assert batch["observation"][:, 0].unique().numel() == 2


def test_in_the_driver_a_replay_buffer_is_filled_in_the_background():
    buffer = ReplayBuffer(1000, batch_size=32, seed=0)
    options = {"frames_per_batch": 20, "total_frames": 400, "replay_buffer": buffer}
    with RayCollector([kit.wide] * 2, kit.Telling(), **options) as collector:
        collector.start()
        while collector.is_running():
            assert kit.told_right(buffer.sample().exclude("index"))
        collector.async_shutdown()
    assert len(buffer) == 400


def test_who_is_ahead_waits_and_a_pause_does_not():
    options = {"samples_per_insert": 4.0, "tolerance": 100.0, "batch_size": 50}
    with RayReplayBuffer(10_000, **options) as buffer:
        kept = {"frames_per_batch": 20, "replay_buffer": buffer}
        with RayCollector([CountingEnv], **kept) as collector:
            collector.start()
            for _ in range(40):
                buffer.sample()
            while buffer.stats()["frames"] < 527:  # 4 * 526 - 4 is 2000 and the tolerance
                time.sleep(0.01)
            time.sleep(0.3)  # the actor is held back now
            assert buffer.stats()["frames"] < 700
            with collector.pause():
                state = collector.state_dict()
                assert state["frames"] == buffer.stats()["frames"]
            buffer.sample()


def test_a_failure_of_the_collector_reaches_who_samples():
    buffer = RayReplayBuffer(1000, batch_size=10, min_size=900)
    options = {"replay_buffer": buffer, "on_worker_failure": "raise", "frames_per_batch": 10}
    makers = [CountingEnv, lambda: CrashingEnv(at_step=25)]
    with RayCollector([lambda: SlowEnv(0.01), makers[1]], **options) as collector:
        collector.start()
        with pytest.raises(EnvError, match="crashed as asked"):
            buffer.sample()
        with pytest.raises(EnvError, match="crashed as asked"):
            collector.next()
    buffer.close()
    buffer.close()


def test_priorities_bad_arguments_and_a_dead_actor(cluster):
    with pytest.raises(UsageError, match="sampler='best'"):
        RayReplayBuffer(10, sampler="best")
    with pytest.raises(UsageError, match="device"):
        RayReplayBuffer(10, device="cpu")
    buffer = RayReplayBuffer(100, sampler="prioritized", batch_size=50, seed=0)
    batch = TensorDict({"value": torch.arange(10)}, 10)
    buffer.extend(batch)
    drawn = buffer.sample()
    buffer.update_priority(drawn["index"], torch.where(drawn["value"] == 3, 1000.0, 1e-6))
    assert (buffer.sample()["value"] == 3).float().mean() > 0.9
    with pytest.raises(UsageError, match="all must have the same keys"):
        buffer.extend(TensorDict({"other": torch.zeros(1)}, 1))
    cluster.kill(buffer._actor)
    gone = "the actor with the replay buffer is gone"
    with pytest.raises(WorkerError, match=gone):  # noqa: PT012
        while True:  # it lives a little longer
            buffer.sample()
    buffer.close()
