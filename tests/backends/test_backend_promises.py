"""What depends on how workers are reached: every frame once, weights, states, calls.

What is decided above connections, such as shapes and counts, is tested over processes alone, in
`tests/collectors`.
"""

from __future__ import annotations

import gc
import os
import threading
import time

import multi_kit as kit
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from wait_kit import comes_true

from swath.collectors import Collector
from swath.envs import SerialEnv
from swath.testing import CountingEnv, SlowEnv, check_transitions

pytestmark = pytest.mark.timeout(240)
KINDS = pytest.mark.parametrize("kind", list(kit.KINDS))
NOT_RAY = pytest.mark.over("processes", "gloo", "rpc", "mpi")
# Over processes, tests/collectors has more of the same.
ELSEWHERE = pytest.mark.over("gloo", "rpc", "mpi", "ray", "ray-far")
SAME = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done"))


# -- every frame, once, in order ------------------------------------------------------------------


@pytest.mark.parametrize("envs", [1, 3])
@KINDS
def test_every_transition_is_real_and_comes_once_in_order(backend, kind, envs):
    makers = [[CountingEnv] * envs] * 2 if envs > 1 else [CountingEnv] * 2
    frames = 14 * envs * (1 if kind == "async" else 2)
    with backend.make(kind, makers, frames_per_batch=frames, total_frames=40 * frames) as collector:
        batches = list(collector)
        stats = collector.stats()
        assert collector.next() is None
        assert list(collector) == []
    assert check_transitions(batches) == 40 * frames
    assert stats["frames"] == 40 * frames == sum(w["frames"] for w in stats["per_worker"])
    assert stats["batches"] == len(batches)
    assert stats["episodes"] == sum(b["next", "done"].sum().item() for b in batches)
    assert stats["lost"] == {"rollouts": 0, "trajectories": []}
    assert len({row[0] for batch in batches for row in kit.rows(batch)}) == 2 * envs
    for row in stats["per_worker"]:
        assert row["pid"] != os.getpid()
        assert (row["restarts"], row["lag"]) == (0, 0)
        assert row["frames_per_second"] > 0


@ELSEWHERE
def test_the_same_seed_gives_the_data_of_a_collector(backend):
    def policy(observation):
        return (observation[..., 2] > 0).long()

    options = {"frames_per_batch": 200, "total_frames": 800, "seed": 4}
    with Collector(SerialEnv(4, "CartPole-v1"), policy, **options) as collector:
        expected = list(collector)
    with backend.sync([["CartPole-v1"] * 2] * 2, policy, **options) as collector:
        batches = list(collector)
    for batch, one in zip(batches, expected, strict=True):
        for key in SAME:
            assert torch.equal(batch[key].reshape(one[key].shape), one[key]), key


@NOT_RAY
def test_preempted_counts_are_exact(backend):
    makers = [CountingEnv, lambda: SlowEnv(0.005)]
    options = {"frames_per_batch": 40, "total_frames": 200, "preemptive_threshold": 0.5}
    with backend.sync(makers, **options) as collector:
        batches = list(collector)
    assert check_transitions(batches) == sum(b["collector", "mask"].sum() for b in batches)
    assert 200 <= check_transitions(batches) < 202
    for batch in batches:
        assert torch.equal(batch["collector", "traj_ids"] >= 0, batch["collector", "mask"])


@NOT_RAY
@KINDS
def test_a_rollout_or_a_partial_between_whole_trajectories_tears_none(backend, kind):
    options = {"frames_per_batch": 20, "trajs_per_batch": 2, "traj_format": "cat", "seed": 3}
    whole, others = [], []
    with backend.make(kind, [CountingEnv] * 2, **options) as collector:
        for number in range(12):
            whole.append(collector.next())
            if number % 3 == 1:
                others.append(collector.rollout())
            if number % 5 == 4:
                others.append(collector.partial())
        others.append(collector.partial())
        assert kit.each_once(whole, others) == collector.stats()["frames"]


@NOT_RAY
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *[(kind, {}) for kind in kit.KINDS],
        ("sync", {"collect_ahead": True}),
        ("sync", {"cat_results": -1}),
    ],
)
def test_envs_that_stay_ended_end_the_collection(backend, kind, option):
    makers = [lambda: TimeLimit(CountingEnv(longest=3), 50), lambda: TimeLimit(CountingEnv(), 4)]
    options = {"frames_per_batch": 6, "reset_when_done": False, "total_frames": 100, "seed": 1}
    with backend.make(kind, makers, **options, **option) as collector:
        for _ in range(2):  # after a reset it goes on, and ends again
            batches = [batch for batch, _ in zip(collector, range(50), strict=False)]
            assert len(batches) < 20
            assert all(batch["collector", "mask"].any() for batch in batches)
            frames = [batch[batch["collector", "mask"]] for batch in batches]
            assert len({row[0] for batch in frames for row in kit.rows(batch).tolist()}) == 2
            collector.reset()
        assert collector.stats()["episodes"] == 4


@NOT_RAY
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("count", [1, 3])
def test_random_frames_may_be_fewer_than_envs(backend, kind, count):
    options = {"frames_per_batch": 20, "total_frames": 80, "init_random_frames": count}
    with backend.make(kind, [kit.wide] * 4, kit.Telling(7), **options) as collector:
        batches = list(collector)
    assert sum(batch["collector", "random"].sum() for batch in batches) == count


@NOT_RAY
def test_a_worker_collects_while_the_learner_is_busy_and_then_waits(backend):
    with backend.beside([CountingEnv], frames_per_batch=10) as collector:
        collector.next()
        pid = kit.pids_of(collector)[0]
        time.sleep(0.1)
        before = cpu_time(pid)
        time.sleep(0.1)
        assert cpu_time(pid) - before <= 2  # it parks: no polling
        started = collector.stats()["per_worker"][0]["frames"]
        assert check_transitions([collector.next() for _ in range(5)]) == 50
        assert collector.stats()["per_worker"][0]["frames"] >= started + 50


def cpu_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@KINDS
def test_kept_batches_never_change_and_dropped_ones_are_used_again(backend, kind):
    # Large enough for Ray's store.
    with backend.make(kind, [CountingEnv] * 2, frames_per_batch=2000) as collector:
        kept = [collector.next() for _ in range(12)]
        copies = [batch.clone() for batch in kept]
        for _ in range(12):
            collector.next()
        assert all((a == b).all() for a, b in zip(kept, copies, strict=True))
        check_transitions(kept)
        last = kept[-1]["next", "reward"]
        kept[-1]["observation"][:] = 7  # it is ours to write
        kept.clear()
        gc.collect()
        for _ in range(12):  # slabs that were freed are forgotten by the workers, too
            collector.next()
        assert torch.equal(last, copies[-1]["next", "reward"])
    assert torch.equal(last, copies[-1]["next", "reward"])


@pytest.mark.over("gloo", "rpc", "mpi")
def test_frames_are_collected_in_the_background(backend):
    class Kept(list):
        def extend(self, batch):
            self.append(batch.clone())

    buffer, options = Kept(), {"frames_per_batch": 20, "total_frames": 200}
    with backend.first_come([CountingEnv] * 2, replay_buffer=buffer, **options) as collector:
        collector.start()
        assert comes_true(lambda: not collector.is_running(), 60)
    assert check_transitions(buffer) == 200


# -- weights --------------------------------------------------------------------------------------


@KINDS
def test_the_version_is_right_for_every_frame(backend, kind):
    policy, batches = kit.Telling(), []
    options = {"frames_per_batch": 20, "total_frames": 1000}
    with backend.make(kind, [kit.wide] * 2, policy, **options) as collector:
        for number, batch in enumerate(collector):
            for update in range(3):
                policy.become(3 * number + update + 1)
                assert collector.update_policy_weights_() == 3 * number + update + 1
            batches.append(batch)
        assert collector.policy_version == collector.stats()["policy_version"]
    assert all(kit.told_right(batch) for batch in batches)
    assert check_transitions(batches) == 1000
    assert torch.cat([b["collector", "policy_version"].flatten() for b in batches]).max() > 50


def test_weights_are_taken_between_two_steps_of_an_async_rollout(backend):
    policy = kit.Telling()
    with backend.beside([lambda: kit.slow_wide(0.002)], policy, frames_per_batch=50) as collector:
        several = 0
        for number in range(60):
            policy.become(number + 1)
            collector.update_policy_weights_()
            if number % 20 == 0:
                batch = collector.next()
                assert kit.told_right(batch)
                version = batch["collector", "policy_version"]
                assert (version.diff() >= 0).all()
                several = max(several, version.unique().numel())
            time.sleep(0.005)
        batch = collector.next()
        assert kit.told_right(batch)
        # Where a version costs a call, at most two come in the middle of a rollout.
        least = 1 if backend.name == "ray-far" else 2
        assert max(several, batch["collector", "policy_version"].unique().numel()) > least


@NOT_RAY
def test_collecting_ahead_lags_by_exactly_one_version(backend):
    policy = kit.Telling()
    options = {"frames_per_batch": 10, "total_frames": 200, "collect_ahead": True}
    with backend.sync([kit.wide] * 2, policy, **options) as collector:
        batches = []
        for version, batch in enumerate(collector):
            batches.append(batch)
            expected = max(0, version - 1)
            assert batch["collector", "policy_version"].unique().tolist() == [expected]
            assert kit.told_right(batch)
            if version % 2:
                time.sleep(0.005)  # the next is done by now, or has hardly begun
            policy.become(version + 1)
            collector.update_policy_weights_()
    assert check_transitions(batches) == 200


@NOT_RAY
@KINDS
def test_waiting_for_weights(backend, kind):
    policy, options = kit.Telling(), {"frames_per_batch": 20, "total_frames": 200}
    with backend.make(kind, [kit.wide] * 2, policy, **options) as collector:
        batches = []
        for number in range(1, 6):
            policy.become(number)
            assert collector.update_policy_weights_(wait=True) == number
            batches.append(collector.next())
        batches.extend(collector)
    assert all(kit.told_right(batch) for batch in batches)
    assert check_transitions(batches) == 200


@NOT_RAY
def test_only_these_workers_get_weights(backend):
    policy = kit.Telling()
    with backend.sync([kit.wide] * 3, policy, frames_per_batch=30) as collector:
        assert collector.update_policy_weights_(policy.become(1), worker_ids=1) == 1
        assert collector.next()["action"][:, 0].tolist() == [0, 1, 0]
        assert collector.update_policy_weights_(policy.become(2), worker_ids=[0, 2]) == 2
        batch = collector.next()
        assert batch["action"][:, 0].tolist() == [2, 1, 2]
        assert kit.told_right(batch)
        assert collector.policy_version == 2


@NOT_RAY
@KINDS
def test_a_learner_thread_may_publish_all_the_time(backend, kind):
    policy, stop = kit.Telling(), threading.Event()
    policy.register_buffer("much", torch.zeros(100_000))

    def learn():
        version = 0
        while not stop.is_set():
            version = collector.update_policy_weights_(policy.become(version + 1))
            time.sleep(0.0005)

    batches, versions = [], set()
    with backend.make(kind, [kit.wide] * 2, policy, frames_per_batch=100) as collector:
        learner = threading.Thread(target=learn)
        learner.start()
        try:
            while len(batches) < 40 or len(versions) < 10:
                batches.append(collector.next())
                versions.update(batches[-1]["collector", "policy_version"].unique().tolist())
        finally:
            stop.set()
            learner.join()
    assert all(kit.told_right(batch) for batch in batches)
    assert check_transitions(batches) == 100 * len(batches)


# -- calls, states, what a worker is told ---------------------------------------------------------


def test_a_function_is_called_in_each_worker(backend):
    with backend.sync([kit.wide] * 2, kit.Telling(3), frames_per_batch=10) as collector:
        collector.next()
        found = collector.map_fn(lambda about: (about.worker, os.getpid(), len(about.envs)))
        rows = collector.stats()["per_worker"]
        assert found == [(row["worker"], row["pid"], 1) for row in rows]
        assert [one.item() for one in collector.get_distant_attr("policy.mean")] == [3.0] * 2
        with pytest.raises(Exception, match="no_such"):
            collector.get_distant_attr("policy.no_such")
        collector.update_policy_weights_(kit.Telling(4), wait=True)
        assert {row["lag"] for row in collector.stats()["per_worker"]} == {1}
        assert kit.told_right(collector.next(), 3)


def test_seeds_resets_and_states(backend):
    options = {"frames_per_batch": 20, "seed": 9}
    with backend.sync([CountingEnv] * 2, **options) as collector:
        first = [collector.next() for _ in range(2)]
        state = collector.state_dict()
        after = [collector.next() for _ in range(2)]
        collector.load_state_dict(state)
        for batch, again in zip(after, [collector.next() for _ in range(2)], strict=True):
            assert (batch == again).all()
        collector.reset()
        assert (collector.next()["observation"][:, 0, 2] == 0).all()
        collector.set_seed(9)
        for batch in first:
            again = collector.next()
            assert all(torch.equal(batch[key], again[key]) for key in SAME)


@pytest.mark.over("gloo", "rpc", "mpi")
def test_resuming_an_async_collector_keeps_undelivered_rollouts(backend):
    options = {"frames_per_batch": 10, "total_frames": 300}
    with backend.first_come([CountingEnv] * 2, seed=5, **options) as collector:
        before = [collector.next() for _ in range(5)]
        state = collector.state_dict()
        expected = list(collector)
    with backend.first_come([CountingEnv] * 2, seed=8, **options) as resumed:
        resumed.next()
        resumed.load_state_dict(state)
        got = list(resumed)
    assert check_transitions([*before, *expected]) == 300
    assert check_transitions([*before, *got]) == 300


@pytest.mark.over("processes", "gloo", "rpc")
def test_init_fn_and_warnings_of_workers(backend, tmp_path, capfd):
    class Told(CountingEnv):
        def __init__(self, name):
            super().__init__()
            kit.warn("do mind me")
            (tmp_path / f"{name} {os.getpid()} {torch.get_num_threads()} {os.environ['T']}").touch()

    def init():
        os.environ["T"] = "yes"

    options = {"frames_per_batch": 10, "init_fn": init, "num_threads": 3}
    kwargs = [{"name": "a"}, {"name": "b"}]
    with backend.sync([Told] * 2, create_env_kwargs=kwargs, **options) as collector:
        pids = kit.pids_of(collector)
    # One env for each worker, made there and nowhere else.
    expected = [f"{name} {pid} 3 yes" for name, pid in zip("ab", pids, strict=True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert "do mind me" not in capfd.readouterr().err


def test_a_batch_outlives_its_workers(backend):
    with backend.sync([CountingEnv] * 2, frames_per_batch=20, seed=1) as collector:
        batch = collector.next()
        pids, copy = kit.pids_of(collector), batch.clone()
    if backend.name != "mpi":  # where ranks serve the next collector
        assert kit.gone(pids)
    assert (batch == copy).all()
    batch["observation"].add_(1)  # it is memory like any other
    assert not torch.equal(batch["observation"], copy["observation"])
