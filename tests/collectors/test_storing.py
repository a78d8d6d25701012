"""Frames on their way into a replay buffer in the background, written by whom they may be."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import multi_kit as kit
import pytest
import torch
from multi_kit import Broken, Telling, told_right, wide
from wait_kit import comes_true

from swath.collectors import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    SyncDataCollector,
)
from swath.data import ReplayBuffer, SliceSampler
from swath.data.columns import HostColumn
from swath.envs import SerialEnv
from swath.errors import EnvError, UsageError, WorkerError
from swath.testing import CountingEnv, CrashingEnv, check_transitions
from swath.workers.body import Worker

LEFT_OVER = pytest.mark.filterwarnings("ignore:total_frames is reached")

KINDS = {
    "single": lambda policy=None, **kw: Collector(SerialEnv(2, wide), policy, **kw),
    "sync": lambda policy=None, **kw: MultiSyncCollector([[wide, wide], [wide]], policy, **kw),
    "async": lambda policy=None, **kw: MultiAsyncCollector([[wide, wide], [wide]], policy, **kw),
    "one": lambda policy=None, **kw: AsyncCollector(wide, policy, **kw),
}
WORKERS = ["sync", "async", "one"]


def make(kind, buffer, policy=None, **options):
    options = {"frames_per_batch": 24, "seed": 0, "replay_buffer": buffer, **options}
    if kind == "sync":
        options.setdefault("cat_results", 0)
    return KINDS[kind](policy, **options)


def new(storage="shared", capacity=2000, path=None, **options):
    directory = path / "buffer" if storage == "memmap" else None
    return ReplayBuffer(capacity, storage=storage, directory=directory, batch_size=8, **options)


def until(condition, seconds=30):
    assert comes_true(condition, seconds)


def finished(collector):
    collector.start()
    until(lambda: not collector.is_running())
    collector.update_policy_weights_()  # raises what has failed


def frames(buffer):
    """Return all frames in the order in which they were written."""
    data = torch.cat(list(buffer))
    return data[data["index"].argsort()]


def stamp_of_process(batch):
    batch["pid"] = torch.full(batch.batch_size, os.getpid())
    return batch


OPTIONS = {
    "plain": {},
    "random": {"init_random_frames": 50},
    "postproc": {"postproc": lambda batch: batch.set("twice", 2 * batch["next", "reward"])},
    "split": {"split_trajs": True},
    "padded": {"trajs_per_batch": 3},
    "cat": {"trajs_per_batch": 3, "traj_format": "cat"},
    "padded postproc": {
        "trajs_per_batch": 3,
        "postproc": lambda batch: batch.set("twice", 2 * batch["next", "reward"]),
    },
    "limit": {"max_frames_per_traj": 4},
}


@LEFT_OVER
@pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_fills_the_buffer_with_every_frame_once(kind, option, storage, tmp_path):
    policy = Telling()
    given = OPTIONS[option]
    with (
        new(storage, path=tmp_path) as buffer,
        make(kind, buffer, policy, total_frames=240, **given) as collector,
    ):
        finished(collector)
        stats = collector.stats()
        assert stats["frames"] == 240
        whole = [frames(buffer)]
        by_workers = kind != "single" and storage != "memory"
        assert (stats["replay"]["writer"] == "workers") == by_workers
        if option == "random":
            assert int(whole[0]["collector", "random"].sum()) == 50
        if "postproc" in given:
            assert torch.equal(whole[0]["twice"], 2 * whole[0]["next", "reward"])
            whole = [whole[0].exclude("twice")]
        if "trajs_per_batch" in given:
            ids, done = whole[0]["collector", "traj_ids"], whole[0]["next", "done"][:, 0]
            ends = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])])
            assert torch.equal(done, ends)  # one whole trajectory after the other
            assert int(ends.sum()) % 3 == 0
            assert (whole[0]["observation"][:, 2][torch.roll(ends, 1)] == 0).all()
            whole.append(collector.partial())
            assert collector.partial() is None
        assert sum(len(part) for part in whole) == 240
        longest = {"max_frames_per_traj": 4} if option == "limit" else {}
        assert check_transitions([part.exclude("index") for part in whole], **longest) == 240


@pytest.mark.parametrize("kind", WORKERS)
def test_the_workers_write_and_your_process_does_not(kind, monkeypatch):
    with new() as buffer, make(kind, buffer, postproc=stamp_of_process) as collector:
        monkeypatch.setattr(buffer, "extend", lambda batch: pytest.fail("written here"))
        collector.start()
        workers = set(kit.pids_of(collector))
        until(lambda: len(buffer) > 300)
        until(lambda: set(frames(buffer)["pid"].tolist()) == workers)


@pytest.mark.parametrize("kind", WORKERS)
def test_they_write_to_a_buffer_that_has_frames_already(kind):
    with new() as buffer, make(kind, buffer, total_frames=240) as collector:
        for _ in range(2):
            collector.next()  # async: rollouts are under way when it starts
        before = len(buffer)
        assert before == 48
        finished(collector)
        data = frames(buffer)
        assert check_transitions(data.exclude("index")) == 240 == collector.stats()["frames"]
        with pytest.raises(UsageError, match="write to the replay buffer directly"):
            collector.rollout()


@pytest.mark.parametrize("kind", WORKERS)
def test_in_a_pause_nobody_writes(kind):
    with new(capacity=100_000) as buffer, make(kind, buffer) as collector:
        collector.start()
        until(lambda: len(buffer))
        for _ in range(3):
            with collector.pause():
                before = buffer.stats()["frames"]
                assert collector.stats()["frames"] == before
                time.sleep(0.05)
                assert buffer.stats()["frames"] == before
                collector.state_dict()
            until(lambda before=before: buffer.stats()["frames"] > before)
        collector.set_seed(7)
        collector.pause()
        before = len(buffer)
        collector.resume()
        until(lambda: len(buffer) > before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_the_ratio_holds_and_neither_pause_nor_shutdown_waits_for_it(kind, storage):
    buffer = new(storage, 10_000, samples_per_insert=2, tolerance=100)
    with buffer, make(kind, buffer) as collector:
        collector.start()
        for _ in range(60):
            buffer.sample()
        time.sleep(0.2)  # now they wait for samples
        stats, batch = buffer.stats(), 24 * 2
        assert 2 * stats["frames"] <= stats["samples"] + 100 + 2 * batch + 2
        with collector.pause():  # lets what is under way be written
            assert buffer.stats()["frames"] >= stats["frames"]
            state = collector.state_dict()
            assert state["frames"] == collector.stats()["frames"]
        for _ in range(200):
            buffer.sample()
        assert buffer.stats()["frames"] > stats["frames"]
        time.sleep(0.2)  # and wait again
        collector.async_shutdown(timeout=600)  # more than a test may take
        assert not collector.is_running()


def test_worker_timeout_and_the_ratio_leave_the_writing_here():
    with (
        new(samples_per_insert=2) as buffer,
        make("sync", buffer, worker_timeout=60) as collector,
    ):
        collector.start()
        assert "worker_timeout" in collector.stats()["replay"]["writer"]


@pytest.mark.parametrize("kind", WORKERS)
def test_what_cannot_travel_leaves_the_writing_here_and_says_why(kind):
    lock = threading.Lock()

    def locked(batch):
        with lock:
            return batch

    hooked = []
    for options, reason in (
        ({"postproc": locked}, "cannot be pickled"),
        ({"post_collect_hook": hooked.append}, "post_collect_hook"),
    ):
        with new() as buffer, make(kind, buffer, total_frames=240, **options) as collector:
            finished(collector)
            assert reason in collector.stats()["replay"]["writer"]
            assert check_transitions(frames(buffer).exclude("index")) == 240
    assert sum(batch.numel() for batch in hooked) == 240


class SlowToFail(ReplayBuffer):
    """Takes its time to say that it has failed."""

    def fail(self, error):
        time.sleep(0.3)
        super().fail(error)


@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_who_samples_is_not_told_of_an_end_before_its_reason(storage):
    options = {"storage": storage, "batch_size": 8, "min_size": 2000}
    with (
        SlowToFail(10_000, **options) as buffer,
        Collector(
            partial(CrashingEnv, at_step=50), frames_per_batch=24, replay_buffer=buffer
        ) as collector,
    ):
        collector.start()
        with pytest.raises(EnvError, match="env 0"):
            buffer.sample()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failure_of_an_env_reaches_whoever_samples(kind):
    makers = [CountingEnv, partial(CrashingEnv, at_step=50)]
    make = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
    with (
        new(min_size=2000) as buffer,
        make(makers, frames_per_batch=24, seed=0, replay_buffer=buffer) as collector,
    ):
        collector.start()
        with pytest.raises(EnvError, match="env 1") as caught:
            buffer.sample()
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EnvError, match="env 1"):
            collector.update_policy_weights_()
        buffer.fail(None)
        written, left = frames(buffer).exclude("index"), collector.partial()
        assert left is not None  # the whole steps of the rollout that failed, and no other's
        left = left.reshape(-1)
        if ("collector", "mask") in left.keys(True):
            left = left[left.pop(("collector", "mask"))]
        # The worker may have begun new episodes, and written them, before it was told to end.
        stamp, last, _ = left["observation"][-1].tolist()
        later = (written["observation"][:, 0] == stamp) & (written["observation"][:, 1] > last)
        assert check_transitions([written[~later], left]) == (~later).sum() + len(left)
        assert not later.any() or check_transitions(written[later]) == later.sum()


def test_what_the_buffer_refuses_is_told_and_not_lost():
    with new() as buffer, make("sync", buffer, on_worker_failure="restart") as collector:
        buffer.extend(collector.rollout().exclude("action"))
        collector.start()
        until(lambda: not collector.is_running())
        with pytest.raises(UsageError, match="has a new key, 'action'"):
            collector.reset()
        assert collector.stats()["restarts"] == 0
        assert collector.partial().numel() == 24  # both workers


class DyingColumn:
    """Kills its process in the middle of a write, once."""

    def __init__(self, path, writes):
        self.path, self.writes = path, writes

    def __call__(self):
        frames, left = HostColumn.frames, [self.writes]

        def dying(column, *args):
            left[0] -= 1
            if not left[0] and _is_first(self.path):
                os.kill(os.getpid(), signal.SIGKILL)
            return frames(column, *args)

        HostColumn.frames = dying


def _is_first(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))  # of two at once, one
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_killed_in_a_write_leaves_whole_frames_and_is_restarted(kind, tmp_path):
    dying = DyingColumn(str(tmp_path / "died"), 100)  # in the middle of the batch
    options = {"init_fn": dying, "on_worker_failure": "restart"}
    with new() as buffer, make(kind, buffer, total_frames=480, **options) as collector:
        finished(collector)
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["frames"] == 480 == buffer.stats()["frames"]
        assert stats["replay"]["writer"] == "workers"
        written = frames(buffer).exclude("index")
        assert check_transitions(written) == len(written) == 480


class DyingAtMessage:
    """Kills the process of a worker when it is given a message; so many times in all."""

    def __init__(self, path, message, times):
        self.path, self.message, self.times = path, message, times

    def __call__(self):
        follow = getattr(Worker, self.message)

        def dying(worker, *message):
            if any(_is_first(f"{self.path}-{number}") for number in range(self.times)):
                os.kill(os.getpid(), signal.SIGKILL)
            follow(worker, *message)

        setattr(Worker, self.message, dying)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_killed_when_it_is_told_of_the_buffer_is_restarted(
    kind, times, prepared, tmp_path
):
    """At the start, or when there is memory for frames, and again as soon as it was restarted."""
    dying = DyingAtMessage(str(tmp_path / "died"), "_store_in", times)
    options = {"init_fn": dying, "on_worker_failure": "restart", "total_frames": 480}
    with new() as buffer, make(kind, buffer, **options) as collector:
        if prepared:
            collector.next()
        finished(collector)
        stats = collector.stats()
        assert stats["restarts"] == times
        assert stats["frames"] == 480 == buffer.stats()["frames"]
        assert stats["replay"]["writer"] == "workers"
        assert check_transitions(frames(buffer).exclude("index")) == 480


class DyingWithFrames(DyingAtMessage):
    """Kills it when it is given memory for frames that it holds already."""

    def __call__(self):
        follow, times = Worker._store_in, iter(range(self.times))

        def dying(worker, message, *memory):
            told = message.handle is not None and worker._store is not None
            if told and next(times, None) is not None and _is_first(self.path):
                os.kill(os.getpid(), signal.SIGKILL)
            follow(worker, message, *memory)

        Worker._store_in = dying


@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_killed_when_there_is_memory_for_its_frames_loses_them_and_says_so(kind, tmp_path):
    dying = DyingWithFrames(str(tmp_path / "died"), "_store_in", 1)
    options = {"init_fn": dying, "on_worker_failure": "restart", "total_frames": 480}
    with new() as buffer, make(kind, buffer, **options) as collector:
        finished(collector)
        stats, written = collector.stats(), frames(buffer).exclude("index")
        assert stats["restarts"] == 1
        assert stats["lost"]["rollouts"] >= 1
        assert check_transitions(written) == len(written) < 480


def go_on(collector, buffer):
    """Start it and sample for ever; at which of the two it fails depends on who is first."""
    collector.start()
    while True:
        buffer.sample()


def test_a_worker_killed_when_it_is_told_of_the_buffer_ends_the_run_if_no_restart_is_left(
    tmp_path,
):
    dying = DyingAtMessage(str(tmp_path / "died"), "_store_in", 4)
    options = {"init_fn": dying, "on_worker_failure": "restart", "max_restarts": 3}
    with new() as buffer, make("async", buffer, **options) as collector:
        with pytest.raises(WorkerError, match=r"worker . .*killed.* 3 restarts were made before"):
            go_on(collector, buffer)


def load_in_a_pause(collector):
    with collector.pause():
        state = collector.state_dict()
        collector.options.replay_buffer.empty()  # the same episodes come once more
        collector.load_state_dict(state)


QUESTIONS = {
    "_call": lambda collector: collector.map_fn(lambda worker: worker.worker),
    "_take_state": lambda collector: collector.state_dict(),
    "_put_state": load_in_a_pause,
    "_set_seed": lambda collector: collector.set_seed(3),
    "_reset": lambda collector: collector.reset(),
    "_acknowledge": lambda collector: collector.update_policy_weights_(wait=True),
    "_take_held": lambda collector: collector.state_dict(),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_killed_by_a_question_is_restarted(kind, question, tmp_path):
    """What is asked of all workers is answered by all of them in the end."""
    dying = DyingAtMessage(str(tmp_path / "died"), question, 2)
    options = {"init_fn": dying, "on_worker_failure": "restart"}
    if question != "_put_state":
        options["trajs_per_batch"] = 2
    with new(capacity=100_000) as buffer, make(kind, buffer, Telling(), **options) as collector:
        collector.start()
        until(lambda: len(buffer))
        answer = QUESTIONS[question](collector)
        if question == "_call":
            assert answer == [0, 1]
        until(lambda: collector.stats()["restarts"] == 2)
        before = buffer.stats()["frames"]
        until(lambda: buffer.stats()["frames"] > before + 500)
        collector.pause()
        written = frames(buffer).exclude("index")
        assert check_transitions(written) == len(written)


def test_who_samples_is_not_kept_waiting_by_what_a_killed_worker_had_begun_to_write(tmp_path):
    dying = DyingColumn(str(tmp_path / "died"), 100)
    options = {"init_fn": dying, "on_worker_failure": "restart", "total_frames": 480}
    pace = {"samples_per_insert": 1, "tolerance": 1000}
    with new(**pace) as buffer, make("sync", buffer, **options) as collector:
        finished(collector)
        assert (buffer._ring.stamps < 0).any()
        buffer.sample(1480)  # more may not be drawn
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample(1000)


@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_killed_in_a_write_ends_the_run_with_its_name(kind, tmp_path):
    dying = DyingColumn(str(tmp_path / "died"), 100)
    with new(min_size=2000) as buffer, make(kind, buffer, init_fn=dying) as collector:
        collector.start()
        with pytest.raises(WorkerError, match=r"worker . .*killed"):
            buffer.sample()
        buffer.fail(None)
        written = frames(buffer).exclude("index")
        assert check_transitions(written) == len(written) > 0


@LEFT_OVER
def test_a_restart_loses_the_trajectories_that_the_worker_held_and_says_which(tmp_path):
    once = str(tmp_path / "once")
    makers = [wide, partial(Broken, "step", 70, kit.exit_at_once, once)]
    makers[1] = partial(makers[1], action_space=wide().action_space)
    with (
        new() as buffer,
        MultiSyncCollector(
            makers,
            frames_per_batch=24,
            total_frames=480,
            seed=0,
            trajs_per_batch=4,
            on_worker_failure="restart",
            replay_buffer=buffer,
        ) as collector,
    ):
        finished(collector)
        stats, written = collector.stats(), frames(buffer).exclude("index")
        left = collector.partial()
        assert stats["restarts"] == 1
        assert stats["replay"]["writer"] == "workers"
        lost = set(stats["lost"]["trajectories"])
        assert lost
        kept = {*written["collector", "traj_ids"].tolist(), *left["collector", "traj_ids"].tolist()}
        assert not lost & kept
        ids = written["collector", "traj_ids"]
        for one in ids.unique():
            episode = written[ids == one]
            assert episode["observation"][:, 2].tolist() == list(range(len(episode)))
            assert episode["next", "done"][:, 0].tolist() == [False] * (len(episode) - 1) + [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_weights_reach_the_frames_and_the_lag_is_told(kind, storage):
    policy = Telling()
    with new(storage, 100_000) as buffer, make(kind, buffer, policy) as collector:
        collector.start()
        for version in range(1, 40):
            assert collector.update_policy_weights_(policy.become(version)) == version
            time.sleep(0.005)
        until(lambda: frames(buffer)["collector", "policy_version"].max() == 39)
        collector.pause()
        data = frames(buffer)
        assert told_right(data)
        assert len(data["collector", "policy_version"].unique()) > 3
        collector.update_policy_weights_(policy.become(40))
        before = collector.stats()["replay"]
        batch = buffer.sample(64)
        lags = 40 - batch["collector", "policy_version"]
        after = collector.stats()["replay"]
        assert after["samples"] - before["samples"] == 64
        assert after["frames"] == len(data) == collector.stats()["frames"]
        assert after["sample_ratio"] == after["samples"] / after["frames"]
        assert after["lag_max"] == max(before["lag_max"], int(lags.max())) > 0


def test_the_lag_is_exact():
    with new("memory") as buffer, make("single", buffer, Telling()) as collector:
        collector.next()
        for _ in range(3):
            collector.update_policy_weights_()
        buffer.sample()
        told = collector.stats()["replay"]
        assert (told["lag_mean"], told["lag_max"]) == (3.0, 3)
        buffer.empty()
        collector.next()
        buffer.sample(24)
        told = collector.stats()["replay"]
        assert (told["lag_mean"], told["lag_max"]) == (8 * 3 / 32, 3)
        assert (told["frames"], told["samples"]) == (48, 32)


@LEFT_OVER
@pytest.mark.parametrize("option", ["plain", "cat"])
@pytest.mark.parametrize("kind", WORKERS)
def test_a_state_taken_in_a_pause_continues(kind, option):
    given = OPTIONS[option]
    held_back = new(samples_per_insert=1, tolerance=100)  # it has more to do in the pause
    with held_back as buffer, make(kind, buffer, total_frames=480, **given) as collector:
        collector.start()
        until(lambda: len(buffer) > 100)
        with collector.pause():
            state, first = collector.state_dict(), frames(buffer)
    with new() as buffer, make(kind, buffer, total_frames=480, **given) as collector:
        collector.load_state_dict(state)
        finished(collector)
        parts = [first, frames(buffer), collector.partial() if option == "cat" else None]
        parts = [part.exclude("index", inplace=False) for part in parts if part is not None]
        assert sum(len(part) for part in parts) == 480
        assert check_transitions(parts) == 480


@LEFT_OVER
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_state_is_not_loaded_behind_the_trajectories_that_workers_hold(kind):
    with new() as buffer, make(kind, buffer, trajs_per_batch=2) as collector:
        collector.start()
        until(lambda: len(buffer))
        with collector.pause():
            state = collector.state_dict()
            with pytest.raises(UsageError, match="Make a new collector, load the state"):
                collector.load_state_dict(state)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_slices_of_what_workers_wrote_are_of_one_trajectory(kind):
    sampler = SliceSampler(slice_len=4)
    with (
        ReplayBuffer(500, storage="shared", sampler=sampler, batch_size=64, seed=0) as buffer,
        make(kind, buffer) as collector,
    ):
        collector.start()
        until(lambda: buffer.stats()["frames"] > 1000)
        for _ in range(20):
            batch = buffer.sample()
            ids, seen = batch["collector", "traj_ids"], batch["observation"]
            assert (ids == ids[:, :1]).all()
            assert (seen[:, :, 2].diff(dim=1) == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_can_never_come_is_an_error_in_shared_memory_too(kind):
    with new(min_size=400) as buffer, make(kind, buffer, total_frames=120) as collector:
        collector.start()
        with pytest.raises(UsageError, match="no writer is registered that would add more"):
            buffer.sample()
        assert buffer.stats()["frames"] == 120


@pytest.mark.parametrize("storage", ["memory", "shared"])
def test_the_snippet_of_the_documents_runs(storage):
    optim_steps = 20
    rb = ReplayBuffer(10_000, storage=storage, batch_size=32)
    collector = SyncDataCollector("CartPole-v1", frames_per_batch=50, replay_buffer=rb)
    collector.start()
    # little pause
    time.sleep(0.2)
    # Start training
    for _ in range(optim_steps):
        data = rb.sample()  # Sampling from the replay buffer
        assert data.batch_size == (32,)
    collector.async_shutdown()
    assert collector.stats()["replay"]["samples"] == 32 * optim_steps
