"""Collectors over worker processes deliver what they promise."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings

import gymnasium as gym
import multi_kit as kit
import numpy as np
import pytest
import torch
from torch import nn

import swath
from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.utils import restore_next, split_trajectories
from swath.envs import SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, SlowEnv, check_replay, check_transitions

KINDS = pytest.mark.parametrize("kind", list(kit.KINDS))
SAME = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done"))


def make(kind, makers=(CountingEnv, CountingEnv), policy=None, **options):
    return kit.KINDS[kind](list(makers), policy, **options)


def by_worker(batches):
    """Yield the batches of each worker of an async collector, joined over time."""
    found = {}
    for batch in batches:
        found.setdefault(batch["collector", "worker"].flatten()[0].item(), []).append(batch)
    return {worker: torch.cat(parts, -1) for worker, parts in found.items()}


# -- every frame, once, in order ------------------------------------------------------------------


@KINDS
def test_options_of_the_loop_hold_in_workers(kind):
    options = {"frames_per_batch": 12, "total_frames": 600, "max_frames_per_traj": 4}
    with make(kind, set_truncated=True, **options) as collector:
        batches = list(collector)
    check_transitions(batches, max_frames_per_traj=4, set_truncated=True)
    with make(kind, reset_at_each_iter=True, **options) as collector:
        batches = list(collector)
    check_transitions(batches, max_frames_per_traj=4, reset_at_each_iter=True)


def test_replaying_a_real_env_by_hand_gives_the_same():
    def maker():
        return gym.make("CartPole-v1")

    with MultiSyncCollector(maker, num_workers=2, frames_per_batch=200, seed=3) as collector:
        check_replay([collector.next() for _ in range(3)], maker, seed=3)
    with MultiAsyncCollector([maker, maker], frames_per_batch=100, seed=3) as collector:
        batches = [collector.next() for _ in range(6)]
    for worker, whole in by_worker(batches).items():
        check_replay(whole, maker, seed=3, first_env=worker)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_same_seed_gives_the_same_data_with_any_number_of_workers(workers):
    def policy(observation):
        return (observation[..., 2] > 0).long()

    options = {"frames_per_batch": 200, "total_frames": 1000, "seed": 4}
    with Collector(SerialEnv(4, "CartPole-v1"), policy, **options) as collector:
        expected = list(collector)
    makers = [["CartPole-v1"] * (4 // workers)] * workers
    if workers == 4:
        makers = ["CartPole-v1"] * 4
    with MultiSyncCollector(makers, policy, cat_results="stack", **options) as collector:
        batches = list(collector)
    for batch, one in zip(batches, expected, strict=True):
        for key in SAME:
            assert torch.equal(batch[key].reshape(one[key].shape), one[key]), key


@pytest.mark.parametrize("random", [0, 10, 27])
def test_random_actions_and_random_frames_are_the_same_too(random):
    policy = None if not random else kit.Telling(7)
    options = {"frames_per_batch": 40, "total_frames": 80, "seed": 2, "init_random_frames": random}
    with Collector(SerialEnv(4, kit.wide), policy, **options) as collector:
        expected = torch.cat(list(collector), -1)
    with MultiSyncCollector([[kit.wide] * 2] * 2, policy, cat_results=0, **options) as collector:
        got = torch.cat(list(collector), -1)
    for key in (*SAME, *[("collector", "random")] * bool(random)):
        assert torch.equal(got[key], expected[key]), key
    check_transitions(got)


@KINDS
def test_random_frames_are_exactly_as_many_and_say_so(kind):
    options = {"frames_per_batch": 10, "total_frames": 100, "init_random_frames": 33}
    with make(kind, [kit.wide] * 2, kit.Telling(7), **options) as collector:
        batches = list(collector)
    check_transitions(batches)
    random = torch.cat([batch["collector", "random"].flatten() for batch in batches])
    told = torch.cat([batch["action"].flatten() for batch in batches])
    assert random.sum() == 33
    assert (told[~random] == 7).all()
    assert (told[random] != 7).any()


def test_the_same_seed_twice_and_set_seed():
    def run(collector):
        return [collector.next() for _ in range(3)]

    options = {"frames_per_batch": 20, "seed": 9}
    with MultiSyncCollector([CountingEnv] * 2, **options) as one:
        first = run(one)
        assert one.set_seed(9) == 9
        second = run(one)
    with MultiSyncCollector([CountingEnv] * 2, **{**options, "seed": 1}) as other:
        other.next()
        other.set_seed(9)
        third = run(other)
    for a, b, c in zip(first, second, third, strict=True):
        for key in SAME:
            assert torch.equal(a[key], b[key])
            assert torch.equal(a[key], c[key])
    ids = torch.cat([b["collector", "traj_ids"].flatten() for b in first])
    again = torch.cat([b["collector", "traj_ids"].flatten() for b in second])
    assert not set(ids.tolist()) & set(again.tolist())


def test_reset_starts_new_episodes_and_delivers_what_was_collected_before():
    for kind in ("sync", "async"):
        with make(kind, frames_per_batch=10) as collector:
            batches = [collector.next()]
            collector.reset()
            batches += [collector.next() for _ in range(8)]
        stamps = {}
        for batch in batches:
            for stamp, episode, step in kit.rows(batch):
                last = stamps.get(stamp)
                follows = last is None or (episode, step) == (last[0], last[1] + 1)
                assert follows or (episode > last[0] and step == 0)
                stamps[stamp] = (episode, step)


# -- shapes and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "envs", "shape"),
    [
        ("stack", 1, (2, 6)),
        ("stack", 3, (2, 3, 6)),
        (0, 1, (12,)),
        (0, 3, (6, 6)),
        (-1, 1, (12,)),
        (-1, 3, (3, 12)),
    ],
)
def test_a_batch_has_the_shape_that_cat_results_says(how, envs, shape):
    makers = [CountingEnv if envs == 1 else [CountingEnv] * envs] * 2
    options = {"frames_per_batch": 12 * envs, "total_frames": 36 * envs + envs, "seed": 0}
    with MultiSyncCollector(makers, cat_results=how, **options) as collector:
        batches = list(collector)
    assert [batch.batch_size for batch in batches[:-1]] == [shape] * 3
    assert all(batch.names[-1] == "time" for batch in batches)
    assert batches[-1].numel() == 2 * envs
    assert check_transitions(batches) == 38 * envs
    with MultiSyncCollector(makers, **options) as collector:
        stacked = list(collector)
    for batch, other in zip(batches, stacked, strict=True):
        ours, theirs = ({tuple(row) for row in kit.rows(b).tolist()} for b in (batch, other))
        assert ours == theirs


def test_a_stacked_batch_is_a_view_of_one_slab():
    with MultiSyncCollector([[CountingEnv] * 2] * 2, frames_per_batch=40) as collector:
        batch = collector.next()
    fields = list(batch.values(True, True))
    begin = min(field.data_ptr() for field in fields)
    end = max(field.data_ptr() + field.nbytes for field in fields)
    size = sum(-(-field.nbytes // 64) * 64 for field in fields)
    assert size <= end - begin <= 2 * size  # there are fields that are not delivered


@KINDS
@pytest.mark.parametrize("total", [1, 7, 40, 41, 101])
def test_total_frames_is_met_exactly(kind, total):
    with make(kind, frames_per_batch=20, total_frames=total) as collector:
        batches = list(collector)
        envs = 1 if kind == "async" else 2
        assert sum(batch.numel() for batch in batches) == -(-total // envs) * envs
        assert check_transitions(batches) == collector.stats()["frames"]
        assert collector.stats()["batches"] == len(batches)
        if kind != "async":
            assert len(collector) == len(batches)


def test_each_worker_may_have_its_own_number_of_frames():
    options = {"frames_per_batch": [30, 10], "cat_results": -1, "total_frames": 100}
    with MultiSyncCollector([CountingEnv] * 2, **options) as collector:
        assert collector.frames_per_batch == 40
        batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(40,), (40,), (20,)]
    assert check_transitions(batches) == 100
    _, counts = np.unique(kit.rows(batches[0])[:, 0], return_counts=True)
    assert sorted(counts.tolist()) == [10, 30]
    with MultiAsyncCollector(
        [CountingEnv] * 2, frames_per_batch=[30, 10], total_frames=400
    ) as collector:
        batches = list(collector)
    assert check_transitions(batches) == 400
    sizes = [(b["collector", "worker"][0].item(), b.numel()) for b in batches]
    assert {(0, 30), (1, 10)} <= set(sizes)
    assert sum(size not in ((0, 30), (1, 10)) for size in sizes) <= 1  # what was left


def test_the_last_batch_of_uneven_workers_is_not_a_step_too_long():
    # In floating point, 100 * 0.07 is more than 7.
    options = {"frames_per_batch": [100, 900], "cat_results": -1, "total_frames": 1070}
    with MultiSyncCollector([CountingEnv] * 2, **options) as collector:
        assert [batch.numel() for batch in collector] == [1000, 70]


def test_frames_that_do_not_divide_are_rounded_up_with_one_warning():
    with pytest.warns(UserWarning, match="frames_per_batch=41 .* rounded up to 42") as caught:
        collector = MultiSyncCollector([CountingEnv] * 2, frames_per_batch=41)
    with collector:
        assert collector.next().batch_size == (2, 21)
    assert len(caught) == 1


def test_workers_with_different_numbers_of_envs():
    makers = [[CountingEnv] * 3, [CountingEnv]]
    with MultiSyncCollector(makers, frames_per_batch=40, cat_results=0) as collector:
        batches = [collector.next() for _ in range(3)]
    assert batches[0].batch_size == (4, 10)
    check_transitions(batches)
    for how in ("stack", -1):
        with pytest.raises(UsageError, match="cat_results must be 0"):
            MultiSyncCollector(makers, frames_per_batch=40, cat_results=how)


def test_one_maker_for_all_workers_and_a_vector_env_in_each():
    def vector():
        return gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")

    with MultiSyncCollector(vector, num_workers=2, frames_per_batch=60) as collector:
        assert collector.num_workers == 2
        assert collector.next().batch_size == (2, 3, 10)
    with MultiAsyncCollector(vector, num_workers=2, frames_per_batch=60) as collector:
        assert collector.next().batch_size == (3, 20)


# -- preemption, ahead, lag ----------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_preempted_rows_are_masked_and_zero_and_never_stale(tmp_path, compact):
    gate = tmp_path / "gate"
    makers = [[CountingEnv] * 2, [lambda: kit.Uneven(str(gate))] * 2]
    options = {"frames_per_batch": 80, "preemptive_threshold": 0.5, "compact_obs": compact}
    with MultiSyncCollector(makers, **options) as collector:
        batches, lacking = [], 0
        for number in range(24):
            if number % 3:
                gate.touch()
            else:
                gate.unlink(missing_ok=True)
            if gate.exists():  # it opens while the batch is waited for
                opener = threading.Timer(0.03, gate.unlink)
                opener.start()
            batch = collector.next()
            if gate.exists():
                opener.join()
            mask = batch["collector", "mask"]
            lacking += (~mask).sum().item()
            for key, value in batch.items(True, True):
                if key not in (("collector", "final"), ("collector", "final_obs")):
                    none = -1 if key == ("collector", "traj_ids") else 0
                    assert (value[~mask] == none).all(), key
            if compact:
                batch = restore_next(batch)
            batches.append(batch.clone())
            if number % 2:
                del batch
        assert collector.stats()["frames"] == sum(
            b["collector", "mask"].sum().item() for b in batches
        )
    assert lacking > 0
    check_transitions(batches)


def test_trajectories_of_preempted_batches_are_split_without_their_masked_rows():
    makers = [CountingEnv, lambda: SlowEnv(0.005)]
    options = {"frames_per_batch": 40, "total_frames": 200, "preemptive_threshold": 0.5}
    with MultiSyncCollector(makers, split_trajs=True, **options) as collector:
        batches = list(collector)
    for batch in batches:
        mask = batch["collector", "mask"]
        assert mask[:, 0].all()
        for ids, row in zip(batch["collector", "traj_ids"], mask, strict=True):
            assert ids[row].unique().numel() == 1


def test_strictly_on_policy_by_default():
    policy = kit.Telling()
    with MultiSyncCollector([kit.wide] * 2, policy, frames_per_batch=10) as collector:
        for version in range(20):
            batch = collector.next()
            assert batch["collector", "policy_version"].unique().tolist() == [version]
            assert kit.told_right(batch)
            policy.become(version + 1)
            assert collector.update_policy_weights_() == version + 1


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("kind", ["async", "beside"])
def test_no_batch_is_older_than_max_lag(kind, lag):
    policy, seen = kit.Telling(), []
    options = {"frames_per_batch": 6, "total_frames": 300, "max_lag": lag}
    with make(kind, [kit.wide] * 2, policy, **options) as collector:
        batches = []
        for number, batch in enumerate(collector):
            batches.append(batch)
            oldest = batch["collector", "policy_version"].min().item()
            seen.append(collector.policy_version - oldest)
            assert kit.told_right(batch)
            time.sleep(0.002)
            policy.become(number + 1)
            collector.update_policy_weights_()
    assert max(seen) <= lag
    assert check_transitions(batches) == 300
    if lag == 1:
        assert max(seen) == 1  # it does collect ahead


def test_max_lag_says_nothing_of_whole_trajectories_and_is_refused_beside_them():
    for kind in (MultiAsyncCollector, AsyncCollector):
        with pytest.raises(UsageError, match=r"and max_lag do not .* leave max_lag out"):
            kind([CountingEnv], frames_per_batch=10, trajs_per_batch=2, max_lag=1)


def test_the_fast_worker_is_not_starved_by_the_slow(tmp_path):
    gate = tmp_path / "gate"
    makers = [CountingEnv, lambda: kit.Uneven(str(gate))]
    with MultiAsyncCollector(makers, frames_per_batch=10, total_frames=400) as collector:
        gate.touch()  # the slow one stands
        batches = [collector.next() for _ in range(30)]
        assert collector.stats()["per_worker"][1]["frames"] == 0
        gate.unlink()
        batches.extend(collector)
        assert collector.stats()["per_worker"][1]["frames"] > 0
    assert check_transitions(batches) == 400


# -- batches and memory ---------------------------------------------------------------------------


@KINDS
def test_memory_is_flat(kind):
    with make(kind, frames_per_batch=200) as collector:
        while min(row["frames"] for row in collector.stats()["per_worker"]) < 1000:
            collector.next()  # until each has all its slabs
        gc.collect()  # what tests before have left would go in between
        before = maps(os.getpid()), [maps(pid) for pid in kit.pids_of(collector)], descriptors()
        for _ in range(200):
            collector.next()
        after = maps(os.getpid()), [maps(pid) for pid in kit.pids_of(collector)], descriptors()
    assert after == before


def test_very_many_kept_batches_do_not_use_up_descriptors():
    before = descriptors()
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=20) as collector:
        kept = [collector.next() for _ in range(300)]
        assert descriptors() < before + 120
        pids = kit.pids_of(collector)
        assert all(len(os.listdir(f"/proc/{pid}/fd")) < 20 for pid in pids)
    check_transitions(kept)


def maps(pid):
    with open(f"/proc/{pid}/maps") as file:
        return sum("memfd:swath" in line for line in file)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@KINDS
def test_iterating_again_after_a_break_loses_nothing(kind):
    with make(kind, frames_per_batch=10, total_frames=200) as collector:
        seen = []
        for batch in collector:
            seen.append(batch)
            if len(seen) == 3:
                break
        seen.append(collector.next())
        for batch in collector:
            seen.append(batch)
            if len(seen) == 7:
                break
        seen.extend(collector)
    assert check_transitions(seen) == 200


# -- what is made of batches ----------------------------------------------------------------------


@KINDS
def test_whole_trajectories(kind):
    options = {"frames_per_batch": 18, "total_frames": 396, "trajs_per_batch": 3}
    with make(kind, [[CountingEnv] * 2, CountingEnv], traj_format="cat", **options) as collector:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = list(collector)
            rest = collector.partial()
    assert all(batch["next", "done"].sum() == 3 for batch in batches)
    assert all(batch["collector", "traj_ids"].unique().numel() == 3 for batch in batches)
    assert sum(batch.numel() for batch in batches) + rest.numel() == 396
    ids = torch.cat([batch["collector", "traj_ids"].unique() for batch in batches])
    assert ids.unique().numel() == ids.numel()
    for batch in batches:
        for traj_id in batch["collector", "traj_ids"].unique():
            part = batch[batch["collector", "traj_ids"] == traj_id]
            assert kit.rows(part)[:, 2].tolist() == list(range(part.numel()))


@pytest.mark.parametrize("then", ["reset", "set_seed"])
@pytest.mark.parametrize("kind", ["async", "ahead"])
def test_reset_beside_whole_trajectories_cuts_those_that_workers_have_gone_on_with(kind, then):
    options = {"frames_per_batch": 8, "trajs_per_batch": 1, "traj_format": "cat", "seed": 0}
    if kind == "ahead":
        options["collect_ahead"] = True
    with make("sync" if kind == "ahead" else kind, **options) as collector:
        whole = []
        for number in range(12):
            whole += [collector.next() for _ in range(1 + number % 3)]
            if then == "reset":
                collector.reset()  # a worker may have ended a trajectory that is begun here
            else:
                collector.set_seed(1 + number)
        frames = kit.each_once(whole, [])
        assert frames <= collector.stats()["frames"]


@pytest.mark.parametrize("how", ["stack", 0, -1])
def test_split_and_compact(how):
    options = {"frames_per_batch": 48, "seed": 1, "cat_results": how}
    makers = [[CountingEnv] * 2] * 2
    with MultiSyncCollector(makers, **options) as collector:
        plain = [collector.next() for _ in range(3)]
    with MultiSyncCollector(makers, split_trajs=True, **options) as collector:
        for expected in plain:
            assert (collector.next() == split_trajectories(expected)).all()
    with MultiSyncCollector(makers, compact_obs=True, **options) as collector:
        for expected in plain:
            compact = collector.next()
            assert ("next", "observation") not in compact.keys(True)
            restored = restore_next(compact)
            for key in SAME:
                assert torch.equal(restored[key], expected[key]), key


@pytest.mark.parametrize("total", [-1, 38])
def test_a_compact_batch_of_uneven_workers_can_be_made_whole_again(total):
    options = {"frames_per_batch": [12, 4], "seed": 1, "cat_results": -1, "total_frames": total}
    makers = [[CountingEnv] * 2] * 2
    with MultiSyncCollector(makers, **options) as collector:
        plain = [collector.next() for _ in range(3)]
    with MultiSyncCollector(makers, compact_obs=True, **options) as collector:
        for expected in plain:
            restored = restore_next(collector.next())
            assert ("collector", "mask") not in restored.keys(True)
            for key in SAME:
                assert torch.equal(restored[key], expected[key]), key


def test_compact_batches_of_one_worker():
    with AsyncCollector([CountingEnv] * 2, frames_per_batch=48, compact_obs=True) as collector:
        check_transitions([restore_next(collector.next()) for _ in range(5)])


@KINDS
def test_hooks_postproc_and_replay_buffer(kind):
    class Buffer(list):
        def extend(self, batch):
            self.append(batch)

    calls, buffer = [], Buffer()
    with make(
        kind,
        frames_per_batch=10,
        total_frames=30,
        pre_collect_hook=lambda: calls.append("before"),
        postproc=lambda batch: calls.append("postproc") or batch.set("new", batch["action"] * 2),
        post_collect_hook=lambda batch: calls.append("new" in batch.keys()),
        replay_buffer=buffer,
    ) as collector:
        assert list(collector) == [None] * 3
    assert calls == ["before", "postproc", True] * 3
    assert all((batch["new"] == 2 * batch["action"]).all() for batch in buffer)
    assert check_transitions(b.exclude("new") for b in buffer) == 30


# -- weights --------------------------------------------------------------------------------------


def test_update_at_each_batch():
    policy = kit.Telling()
    options = {"frames_per_batch": 10, "total_frames": 50, "update_at_each_batch": True}
    with MultiSyncCollector([kit.wide] * 2, policy, **options) as collector:
        for version, batch in enumerate(collector):
            assert batch["collector", "policy_version"].unique().tolist() == [version]
            assert kit.told_right(batch)
            policy.become(version + 1)


def test_weights_for_workers_that_do_not_exist_are_refused():
    with MultiSyncCollector([kit.wide] * 3, kit.Telling(), frames_per_batch=30) as collector:
        with pytest.raises(UsageError, match=r"worker_ids \[3\] do not exist"):
            collector.update_policy_weights_(worker_ids=[3])
        assert collector.policy_version == 0


def test_weights_come_as_a_module_a_state_dict_or_a_tensordict_and_the_learner_is_untouched():
    from tensordict import TensorDict

    learner = kit.Telling(5)
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    pointers = [value.data_ptr() for value in learner.state_dict().values()]
    with MultiSyncCollector([kit.wide] * 2, kit.Telling(), frames_per_batch=10) as collector:
        td = TensorDict(before, []).apply(lambda value: value * 3)
        for source, value in ((learner, 5), (td, 15), (learner.state_dict(), 5)):
            collector.update_policy_weights_(source)
            assert (collector.next()["action"] == value).all()
        learner.become(8)  # publishing is a copy
        assert (collector.next()["action"] == 5).all()
        learner.become(5)
        for wrong in ({"weight": torch.tensor(1.0)}, {**before, "other": torch.tensor(1.0)}):
            with pytest.raises(UsageError, match="do not fit the policy"):
                collector.update_policy_weights_(wrong)
        with pytest.raises(UsageError, match="has shape"):
            collector.update_policy_weights_({**before, "weight": torch.zeros(2)})
        assert collector.policy_version == 3
        assert (collector.next()["action"] == 5).all()
    assert [value.data_ptr() for value in learner.state_dict().values()] == pointers
    assert all(torch.equal(value, before[name]) for name, value in learner.state_dict().items())
    assert learner.weight.requires_grad
    assert learner.weight.grad is None


def test_a_function_that_closes_over_modules_gets_weights_too():
    first, second = kit.Telling(2), kit.Telling(3)

    def policy(observation):
        told = first(observation)
        return {**told, "action": told["action"] * 10 + second(observation)["action"]}

    with MultiSyncCollector([kit.wide] * 2, policy, frames_per_batch=10) as collector:
        assert (collector.next()["action"] == 23).all()
        first.become(4)
        second.become(5)
        with pytest.warns(UserWarning, match="never published"):
            assert (collector.next()["action"] == 23).all()
        collector.update_policy_weights_()
        assert (collector.next()["action"] == 45).all()


def test_policy_factories_one_or_a_list():
    factories = [lambda n=n: kit.Telling(n) for n in (3, 4)]
    with MultiSyncCollector(
        [kit.wide] * 2, frames_per_batch=10, policy_factory=factories
    ) as collector:
        assert collector.next()["action"][:, 0].tolist() == [3, 4]
        with pytest.raises(UsageError, match="policy_factory, so this process has no policy"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(kit.Telling(6))
        assert (collector.next()["action"] == 6).all()
    with MultiAsyncCollector(
        [kit.wide] * 2, frames_per_batch=10, policy_factory=lambda: kit.Telling(8)
    ) as collector:
        assert (collector.next()["action"] == 8).all()
    with pytest.raises(UsageError, match="policy_factory has 3 entries for 2 workers"):
        MultiSyncCollector([kit.wide] * 2, frames_per_batch=10, policy_factory=[*factories, int])


def test_weights_that_only_workers_have_cannot_be_published_by_themselves():
    options = {"frames_per_batch": 10, "update_at_each_batch": True}
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        with pytest.raises(UsageError, match=r"update_at_each_batch .* policy_factory.* pass the"):
            kind([kit.wide] * 2, policy_factory=kit.Telling, **options)
    still = {"policy_factory": lambda: lambda observation: observation[..., 0] * 0}
    with MultiSyncCollector([CountingEnv] * 2, **still, **options) as collector:
        assert [collector.next()["collector", "policy_version"].max() for _ in range(2)] == [0, 1]


def test_waiting_for_weights_while_the_next_batch_is_collected():
    policy = kit.Telling()
    options = {"frames_per_batch": 10, "total_frames": 100, "collect_ahead": True}
    with MultiSyncCollector([kit.wide] * 2, policy, **options) as collector:
        batches = [collector.next()]
        assert collector.update_policy_weights_(policy.become(1), wait=True) == 1
        batches.extend(collector)
    versions = [batch["collector", "policy_version"].unique().tolist() for batch in batches]
    assert versions == [[0], [0]] + [[1]] * 8
    assert all(kit.told_right(batch) for batch in batches)
    assert check_transitions(batches) == 100


def test_a_policy_without_weights_has_versions_too():
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=10) as collector:
        assert collector.update_policy_weights_(wait=True) == 1
        assert collector.next()["collector", "policy_version"].unique().tolist() == [1]


# -- workers --------------------------------------------------------------------------------------


def test_workers_have_one_thread_by_default_and_states_of_their_own():
    def policy(observation):
        return {"action": torch.zeros((), dtype=torch.long), "drawn": torch.rand(())}

    def threads(observation):
        return torch.tensor(torch.get_num_threads())

    with MultiSyncCollector([CountingEnv] * 2, policy, frames_per_batch=20) as collector:
        assert collector.next()["drawn"].unique().numel() == 20
    with MultiSyncCollector([CountingEnv] * 2, threads, frames_per_batch=20) as collector:
        assert (collector.next()["action"] == 1).all()


def test_the_learner_is_not_touched():
    import random
    import signal

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    threads = torch.get_num_threads()
    for kind in kit.KINDS:
        with make(kind, frames_per_batch=10, seed=5, num_threads=2) as collector:
            collector.next()
            collector.state_dict()
            assert {n: signal.getsignal(n) for n in signal.valid_signals()} == handlers
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert torch.get_num_threads() == threads
    assert {n: signal.getsignal(n) for n in signal.valid_signals()} == handlers


class Warns(CountingEnv):
    def __init__(self):
        super().__init__()
        warnings.warn("do mind me", stacklevel=1)


def test_warnings_of_workers_are_shown_if_asked_for(capfd, monkeypatch):
    monkeypatch.setattr(swath, "filter_warnings_subprocess", False)
    MultiSyncCollector([Warns], frames_per_batch=10).shutdown()
    assert "do mind me" in capfd.readouterr().err


def test_different_envs_with_equal_spaces():
    makers = [CountingEnv, lambda: CountingEnv(longest=2), lambda: SlowEnv(0.0)]
    with MultiSyncCollector(makers, frames_per_batch=90, seed=0) as collector:
        batch = collector.next()
    assert batch["observation"][1, :, 2].max() == 1
    assert batch["observation"][0, :, 2].max() > 1
    check_transitions(batch[0])
    check_transitions(batch[1], longest=2)


def test_each_worker_may_have_its_devices():
    options = {"frames_per_batch": 10, "devices": ["cpu"] * 2, "storing_device": "cpu"}
    with MultiSyncCollector([CountingEnv] * 2, **options) as collector:
        check_transitions(collector.next())


def test_bad_input_is_refused_at_construction():
    lock = threading.Lock()
    options = {"frames_per_batch": 10}
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        for makers, extra, message in (
            ([CountingEnv] * 2, {"num_workers": 3}, "num_workers is 3, but 2 env makers"),
            ([], {}, "list of env makers is empty"),
            ([3], {}, "workers make their own"),
            ([CountingEnv] * 2, {"frames_per_batch": [5]}, "1 entries for 2 workers"),
            ([CountingEnv] * 2, {"create_env_kwargs": [{}]}, "1 entries for 2 workers"),
            ([CountingEnv] * 2, {"devices": ["cpu"] * 3}, "device has 3 entries for 2"),
            ([CountingEnv] * 2, {"num_thread": 2}, "Did you mean 'num_threads'"),
            ([CountingEnv] * 2, {"cudagraph": True}, r"cudagraph is True, .* not torch-native"),
            ([CountingEnv] * 2, {"worker_timeout": 0}, "worker_timeout"),
            ([CountingEnv] * 2, {"on_worker_failure": "ignore"}, "on_worker_failure"),
            ([CountingEnv] * 2, {"policy": lambda o: lock}, r"policy > lock is a lock"),
            ([CountingEnv, lambda: lock and CountingEnv()], {}, "create_env_fn > lock is a lock"),
            ([CountingEnv, "CartPole-v1"], {}, "worker 1 collects other data than worker 0"),
            ([CountingEnv, "NoSuchEnv-v0"], {}, r"NoSuchEnv.* \[worker 1\]"),
        ):
            with pytest.raises(UsageError, match=message):
                kind(makers, **{**options, **extra})
    with pytest.raises(UsageError, match="other weights than that of worker 0"):
        MultiSyncCollector(
            [kit.wide] * 2,
            policy_factory=[kit.Telling, lambda: nn.Sequential(kit.Telling())],
            **options,
        )


def test_options_of_another_delivery_are_refused():
    for kind, name, message in (
        (
            MultiSyncCollector,
            "max_lag",
            "no option 'max_lag': .*the option is for MultiAsyncCollector",
        ),
        (MultiAsyncCollector, "collect_ahead", "no option .*it is for MultiSyncCollector"),
        (
            MultiAsyncCollector,
            "cat_results",
            "cat_results=1: a batch holds the rollout of one worker",
        ),
        (AsyncCollector, "num_workers", "no option .*use MultiAsyncCollector"),
    ):
        with pytest.raises(UsageError, match=message):
            kind([CountingEnv], frames_per_batch=10, **{name: 1})


@pytest.mark.parametrize(
    ("makers", "expected"),
    [
        ([CountingEnv, [CountingEnv] * 3], (4, 5)),
        ([[CountingEnv] * 3, CountingEnv], (4, 5)),
        ([CountingEnv, [CountingEnv]], (2, 10)),
        ([[CountingEnv], [CountingEnv]], (2, 10)),
    ],
)
def test_a_lone_env_is_a_row_among_the_envs_of_others(makers, expected):
    with MultiSyncCollector(makers, frames_per_batch=20, cat_results=0, seed=1) as collector:
        batches = [collector.next() for _ in range(3)]
    assert {batch.batch_size for batch in batches} == {expected}
    assert check_transitions(batches) == 60


def test_a_list_of_one_has_a_dimension_of_envs():
    options = {"frames_per_batch": 20, "seed": 1}
    for how, expected in (("stack", (2, 1, 10)), (0, (2, 10)), (-1, (1, 20))):
        with MultiSyncCollector([[CountingEnv]] * 2, cat_results=how, **options) as collector:
            assert collector.next().batch_size == expected
    with MultiAsyncCollector([[CountingEnv], CountingEnv], **options) as collector:
        batches = [collector.next() for _ in range(8)]
    for worker, whole in by_worker(batches).items():
        assert whole.ndim == (2 if worker == 0 else 1)
    assert check_transitions(batches) == 160
    with AsyncCollector([CountingEnv], **options) as collector:
        assert collector.next().batch_size == (1, 20)


# -- state ----------------------------------------------------------------------------------------


def same(a, b):
    ours, theirs = dict(a.items(True, True)), dict(b.items(True, True))
    assert set(ours) == set(theirs)
    return all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("extra", [{}, {"collect_ahead": True}, {"trajs_per_batch": 4}])
def test_resuming_equals_not_having_stopped(extra):
    def build(seed):
        policy = kit.Telling()
        options = {"frames_per_batch": 20, "total_frames": 400, "init_random_frames": 70}
        return policy, MultiSyncCollector(
            [[kit.wide] * 2] * 2, policy, seed=seed, **options, **extra
        )

    policy, collector = build(5)
    with collector:
        for number in range(3):
            collector.next()
            policy.become(number + 1)
            collector.update_policy_weights_()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(4)]
        collector.update_policy_weights_(policy.become(9))
        expected += [collector.next() for _ in range(3)]
        stats = collector.stats()
    policy, resumed = build(6)
    with resumed:
        resumed.next()
        resumed.update_policy_weights_(kit.Telling(77))
        resumed.load_state_dict(state)
        got = [resumed.next() for _ in range(4)]
        resumed.update_policy_weights_(policy.become(9))
        got += [resumed.next() for _ in range(3)]
        again = resumed.stats()
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    for name in ("frames", "batches", "episodes", "policy_version"):
        assert again[name] == stats[name], name


@pytest.mark.parametrize("kind", ["async", "beside"])
def test_resuming_an_async_collector_keeps_undelivered_rollouts(kind):
    makers = [CountingEnv, CountingEnv]
    options = {"frames_per_batch": 10, "total_frames": 300, "seed": 5}
    with make(kind, makers, **options) as collector:
        before = [collector.next() for _ in range(5)]
        time.sleep(0.05)
        state = collector.state_dict()
        expected = list(collector)
    with make(kind, makers, **{**options, "seed": 8}) as resumed:
        resumed.next()
        resumed.load_state_dict(state)
        got = list(resumed)
    assert all(batch.numel() == 10 for batch in [*before, *expected, *got])
    assert check_transitions([*before, *expected]) == 300
    assert check_transitions([*before, *got]) == 300
    if kind == "beside":
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    ours, theirs = by_worker(got), by_worker(expected)
    for worker, whole in theirs.items():
        size = min(whole.shape[-1], ours[worker].shape[-1])
        assert same(ours[worker][..., :size], whole[..., :size])


def test_a_state_of_other_workers_is_refused():
    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=10) as collector:
        state = collector.state_dict()
    with (
        MultiSyncCollector([CountingEnv] * 3, frames_per_batch=15) as other,
        pytest.raises(UsageError, match="state is of 2 workers; this collector has 3"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("other", ["async", "env", "whole", "weights", "envs of a worker"])
def test_a_state_of_another_setup_is_refused_and_changes_nothing(other):
    policy = kit.Telling(5)
    options = {"frames_per_batch": 12, "total_frames": 24}
    kind, makers, module, extra, message = {
        "async": ("async", [kit.wide] * 2, policy, {}, "batches of all workers; .* one worker"),
        "env": ("sync", [kit.Broken] * 2, policy, {}, "2|Broken"),
        "whole": ("sync", [kit.wide] * 2, policy, {"trajs_per_batch": 1}, "trajs_per_batch"),
        "weights": ("sync", [kit.wide] * 2, None, {}, "'(told|mean)"),
        "envs of a worker": ("sync", [[kit.wide] * 2] * 2, policy, {}, "GymGroup of 2"),
    }[other]
    if other == "env":
        makers = [lambda: kit.Broken("step", -1, None, action_space=kit.wide().action_space)] * 2
    with make("sync", [kit.wide] * 2, kit.Telling(7), **options) as collector:
        collector.next()
        state = collector.state_dict()
    with make(kind, makers, module, **options, **extra) as collector:
        with pytest.raises(UsageError, match=message):
            collector.load_state_dict(state)
        assert policy.weight == 5
        assert collector.stats()["frames"] == 0
        assert collector.next() is not None


def test_workers_keep_their_own_weights_over_a_resume():
    policy = kit.Telling()
    with MultiSyncCollector([kit.wide] * 2, policy, frames_per_batch=10) as collector:
        collector.update_policy_weights_(policy.become(1), worker_ids=0)
        state = collector.state_dict()  # the weights are published, but not yet taken
        assert collector.next()["action"][:, 0].tolist() == [1, 0]
    with MultiSyncCollector([kit.wide] * 2, kit.Telling(3), frames_per_batch=10) as resumed:
        resumed.load_state_dict(state)
        batch = resumed.next()
        assert batch["action"][:, 0].tolist() == [1, 0]
        assert batch["collector", "policy_version"][:, 0].tolist() == [1, 0]
        assert resumed.update_policy_weights_(kit.Telling(2)) == 2
        assert kit.told_right(resumed.next())


@pytest.mark.filterwarnings("ignore:total_frames is reached")
def test_whole_trajectories_of_workers_with_unequal_rollouts():
    with MultiSyncCollector(
        [CountingEnv] * 2,
        frames_per_batch=[20, 40],
        total_frames=600,
        trajs_per_batch=4,
        traj_format="cat",
        seed=0,
    ) as collector:
        batches = list(collector)
        left = collector.partial()
    assert check_transitions(batches) + left.numel() == 600
    assert left["next", "reward"].all()  # no row that nobody has written
