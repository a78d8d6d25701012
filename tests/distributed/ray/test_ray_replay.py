"""A replay buffer in an actor: collectors write, trainers sample, nothing passes through here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import multi_kit as kit
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from wait_kit import comes_true

from swath.collectors import Collector
from swath.collectors.distributed import RayCollector
from swath.data import PrioritizedSampler, RayReplayBuffer, ReplayBuffer
from swath.data.ray import flatten, unflatten
from swath.envs import SerialEnv
from swath.errors import ClosedError, EnvError, UsageError, WorkerError
from swath.testing import CountingEnv, CrashingEnv, SlowEnv, check_transitions

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def test_a_delivered_batch_goes_uncopied_and_any_batch_comes_back_the_same():
    with Collector(SerialEnv(3, CountingEnv), frames_per_batch=30) as collector:
        batch = collector.next()
        for key, (block, _) in flatten(batch)[0].items():
            assert block.ctypes.data == batch[key].data_ptr()
        other = TensorDict({"a": torch.rand(3), "b": {"c": torch.ones(3, 2, dtype=torch.uint8)}}, 3)
        for one in (batch, batch[1:, 2:5], other, other.expand(2, 3), batch[:0]):
            flat, size = flatten(one)
            assert sum(block.nbytes for block, _ in flat.values()) == one.bytes()
            read_only = {key: (block.copy(), form) for key, (block, form) in flat.items()}
            for block, _ in read_only.values():
                block.flags.writeable = False
            again = unflatten(read_only, size)
            assert again.batch_size == one.batch_size
            assert (again == one).all()
            assert set(again.keys(True, True)) == set(one.keys(True, True))


def test_views_of_other_tensors_come_back_as_they_look():
    base = torch.arange(4.0)
    views = {
        "later": base[2:].expand(2, 2),  # as many numbers as its storage has
        "conjugated": torch.randn(4, dtype=torch.complex64).conj().view(2, 2),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag.view(2, 2),
    }
    flat, size = flatten(TensorDict(views, [2]))
    again = unflatten(flat, size)
    for name, value in views.items():
        assert torch.equal(again[name], value), name


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
            with pytest.raises(UsageError, match="draw batches from the buffer"):
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


@pytest.mark.parametrize("make", [lambda: "prioritized", PrioritizedSampler])
def test_priorities_bad_arguments_and_a_dead_actor(make, cluster):
    with pytest.raises(UsageError, match="sampler='best'"):
        RayReplayBuffer(10, sampler="best")
    with pytest.raises(UsageError, match="device"):
        RayReplayBuffer(10, device="cpu")
    buffer = RayReplayBuffer(100, sampler=make(), batch_size=50, seed=0)
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


PACED = {"samples_per_insert": 2.0, "tolerance": 0.0, "min_size": 40, "batch_size": 20}


def collect(buffer, frames=200, env=CountingEnv):
    options = {"frames_per_batch": 20, "total_frames": frames, "replay_buffer": buffer}
    return RayCollector([env], **options)


def sample_on(buffer):
    """Sample until that is refused, and return how often it was not."""
    for number in range(10_000):
        try:
            buffer.sample()
        except UsageError as error:
            if "no writer is registered that would add more" in str(error):
                return number
            raise
    raise AssertionError("it is never refused")


def test_who_samples_past_the_end_of_the_collection_is_refused(cluster):
    @cluster.remote(num_cpus=0)
    def elsewhere(buffer):
        try:
            while True:
                buffer.sample()
        except ValueError as error:
            return str(error)

    with RayReplayBuffer(1000, **PACED) as buffer:
        for frames in (200, 400):
            with collect(buffer) as collector:
                collector.start()
                other = elsewhere.remote(buffer)
                assert sample_on(buffer) > 0
                assert "no writer is registered that would add more" in cluster.get(
                    other, timeout=60
                )
            stats = buffer.stats()
            assert (stats["frames"], stats["samples"]) == (frames, 2 * (frames - 40))
        buffer.extend(TensorDict(buffer._ask("read", "call", "state_dict")["frames"], [400])[:20])
        assert sample_on(buffer) == 2  # frames that others write are there, but not waited for


def test_frames_are_waited_for_until_the_last_collector_ends():
    with RayReplayBuffer(1000, batch_size=20, min_size=300) as buffer:
        with collect(buffer, 400, lambda: SlowEnv(0.002)) as long, collect(buffer, 100) as short:
            long.start()
            long.pause()
            short.start()
            while short.is_running():
                time.sleep(0.01)
            with ThreadPoolExecutor(1) as pool:
                drawn = pool.submit(buffer.sample)
                time.sleep(0.5)
                assert not drawn.done()
                long.resume()
                assert len(drawn.result(60)) == 20
            while long.is_running():
                time.sleep(0.01)
        buffer.empty()
        assert sample_on(buffer) == 0


def test_the_end_of_a_buffer_ends_a_collection_in_its_background(cluster):
    with RayReplayBuffer(1000) as buffer, collect(buffer, -1) as collector:
        collector.start()
        buffer.sample(1)
        cluster.kill(buffer._actor)
        with pytest.raises(WorkerError, match="the actor with the replay buffer is gone"):  # noqa: PT012
            while True:
                collector.pause()  # returns, too
                collector.resume()
                time.sleep(0.01)


def test_however_many_wait_others_get_in():
    with RayReplayBuffer(1000, batch_size=1) as buffer:
        with ThreadPoolExecutor(24) as pool:
            waiting = [pool.submit(buffer.sample) for _ in range(24)]
            time.sleep(1)
            buffer.note_version(3)
            with ThreadPoolExecutor(1) as other:
                assert other.submit(buffer.stats).result(10)["frames"] == 0
                with buffer.unpaced():
                    assert len(buffer) == 0
                other.submit(buffer.fail, EnvError("as asked")).result(10)
            for one in waiting:
                with pytest.raises(EnvError, match="as asked"):
                    one.result(10)
        buffer.fail(None)
        buffer.extend(TensorDict({"value": torch.zeros(1)}, 1))
        assert len(buffer.sample()) == 1


def is_known(ray, name):
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def gone(ray, name):
    return comes_true(lambda: not is_known(ray, name), every=0.05)


def test_an_actor_that_finds_no_place_is_told_and_leaves_nothing_behind(cluster):
    greedy = {"num_cpus": 64, "resources": {"rare": 2}, "name": "greedy"}
    needs = r"not scheduled within 0.5 s .*'CPU': 64.*'rare': 2.*'8 of 8'.*'1 of 1'.*remote_config,"
    with pytest.raises(WorkerError, match=needs):
        RayReplayBuffer(10, remote_config=greedy, launch_timeout=0.5)
    assert gone(cluster, "greedy")
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        RayReplayBuffer(10, remote_config=greedy, launch_timeout=None)
    interrupt.join()
    assert gone(cluster, "greedy")


def not_to_be_imported(batch):
    """Stand for what the actor cannot import."""
    return batch


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_cpus": "many"}, "num_cpus"),
        ({"num_cpu": 1}, "num_cpu"),
        ({"scheduling_strategy": "here"}, "scheduling_strategy"),
        ({1: 2}, "strings"),
        ([1], r"a dict .* \[1\]"),
    ],
)
def test_a_wrong_remote_config_is_told(config, words):
    with pytest.raises(UsageError, match=rf"remote_config: .*{words}"):
        RayReplayBuffer(10, remote_config=config)


def test_what_cannot_be_made_in_the_actor_is_told():
    with pytest.raises(UsageError, match="launch_timeout must be above 0"):
        RayReplayBuffer(10, launch_timeout=0.0)
    with pytest.raises(UsageError, match=r"options\['transform'\]"):
        RayReplayBuffer(10, transform=threading.Lock().acquire)
    with pytest.raises(WorkerError, match=r"is gone: .*No module named"):
        RayReplayBuffer(10, transform=not_to_be_imported)


def test_by_default_it_takes_no_cpu(cluster):
    with RayReplayBuffer(10) as buffer:
        time.sleep(0.5)  # Ray counts from time to time
        assert cluster.available_resources()["CPU"] == 8
        with RayReplayBuffer(10, remote_config={"num_cpus": 2}):
            assert comes_true(lambda: cluster.available_resources()["CPU"] == 6, every=0.05)
    with pytest.raises(ClosedError, match="was closed"):
        buffer.sample()


def test_a_buffer_that_was_sent_elsewhere_keeps_its_cluster(cluster):
    with RayReplayBuffer(10) as buffer:
        buffer.handle()
        assert buffer._ender.alive
        cluster.put(buffer)
        assert not buffer._ender.alive


SCRIPT = """
from swath.preload import preload; preload()
import gc, time
import ray
from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer
from swath.testing import CountingEnv

SMALL = {"num_cpus": 2, "object_store_memory": 128 << 20}

def buffer_of_two_cores():
    return RayReplayBuffer(1000, batch_size=8, ray_init_config=SMALL)
"""


def run(body):
    with kit.Child(
        [sys.executable, "-u", "-c", SCRIPT + textwrap.dedent(body)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as script:
        _, err = script.communicate(timeout=200)
    assert script.returncode == 0, err
    assert "Traceback" not in err


def test_two_collectors_have_room_beside_a_buffer_and_who_drops_it_leaves_the_cluster():
    run(
        """
        def use():
            buffer = buffer_of_two_cores()
            options = {"frames_per_batch": 20, "replay_buffer": buffer, "launch_timeout": 60}
            with RayCollector([CountingEnv] * 2, **options) as collector:
                collector.start()
                assert len(buffer.sample()) == 8
            assert ray.is_initialized()

        use()
        deadline = time.monotonic() + 30
        while ray.is_initialized():
            assert time.monotonic() < deadline, "the cluster stays"
            gc.collect()
            time.sleep(0.1)
        """
    )
