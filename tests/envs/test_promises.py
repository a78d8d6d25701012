"""What a batch promises, proved with counting envs over every option that bends trajectories."""

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from swath.collectors import Collector
from swath.collectors.utils import restore_next
from swath.envs import GymEnv, SerialEnv
from swath.testing import CountingEnv, check_replay, check_transitions

SEED = 8
ODD = [1, 2, 7, 23, 50]


def sync(n, mode=AutoresetMode.SAME_STEP):
    return SyncVectorEnv([CountingEnv] * n, autoreset_mode=mode)


KINDS = {
    "one": (lambda: GymEnv(CountingEnv()), 1),
    "serial": (lambda: SerialEnv(3, CountingEnv), 3),
    "vector, same step": (lambda: sync(3), 3),
    "vector, next step": (lambda: sync(3, AutoresetMode.NEXT_STEP), 3),
    "joined": (lambda: [CountingEnv, sync(2, AutoresetMode.DISABLED)], 3),
}
every_kind = pytest.mark.parametrize(("make", "n"), KINDS.values(), ids=KINDS)
serial_kinds = pytest.mark.parametrize(
    ("make", "n"), [KINDS["one"], KINDS["serial"]], ids=["one", "serial"]
)


def act(observation):
    """A policy that depends on what it sees."""
    return (observation[..., 1] + observation[..., 2]) % 2


def collect(env, steps, n, batches=4, policy=act, **options):
    with Collector(env, policy, frames_per_batch=steps * n, seed=SEED, **options) as collector:
        return [collector.next() for _ in range(batches)]


@every_kind
@pytest.mark.parametrize("steps", ODD)
def test_every_frame_is_delivered_once_and_in_order_in_batches_of_any_size(make, n, steps):
    batches = collect(make(), steps, n)
    assert check_transitions(batches) == 4 * steps * n
    check_replay(batches, CountingEnv, SEED)
    for batch in batches:
        assert torch.equal(batch["action"], act(batch["observation"]))


@every_kind
@pytest.mark.parametrize("limit", [1, 2, 5, 9, 100])
def test_a_limit_truncates_and_is_counted_across_batches(make, n, limit):
    batches = collect(make(), 7, n, batches=6, max_frames_per_traj=limit)
    assert check_transitions(batches, max_frames_per_traj=limit) == 42 * n


@every_kind
@pytest.mark.parametrize("steps", [1, 7, 23])
@pytest.mark.parametrize("limit", [None, 3])
def test_each_batch_starts_new_episodes_on_demand(make, n, steps, limit):
    batches = collect(make(), steps, n, reset_at_each_iter=True, max_frames_per_traj=limit)
    check_transitions(batches, reset_at_each_iter=True, max_frames_per_traj=limit)
    for batch in batches:
        assert (batch["observation"].reshape(n, steps, 3)[:, 0, 2] == 0).all()
        assert batch["next", "done"].reshape(n, steps)[:, -1].all()


@every_kind
@pytest.mark.parametrize("steps", [1, 7, 23])
@pytest.mark.parametrize("limit", [None, 3])
def test_the_last_row_is_marked_truncated_on_demand_though_episodes_go_on(make, n, steps, limit):
    batches = collect(make(), steps, n, set_truncated=True, max_frames_per_traj=limit)
    check_transitions(batches, set_truncated=True, max_frames_per_traj=limit)
    assert all(batch["next", "done"].reshape(n, steps)[:, -1].all() for batch in batches)


@serial_kinds
@pytest.mark.parametrize("steps", [1, 3, 50])
@pytest.mark.parametrize("limit", [None, 3])
def test_an_env_that_ended_stays_ended_on_demand(make, n, steps, limit):
    with Collector(
        make(),
        act,
        frames_per_batch=steps * n,
        seed=SEED,
        reset_when_done=False,
        max_frames_per_traj=limit,
    ) as collector:
        batches = list(collector)
        frames = collector.stats()["frames"]
        assert collector.next() is None
        collector.reset()
        again = list(collector)
    assert check_transitions(batches, max_frames_per_traj=limit) == frames
    assert check_transitions([*batches, *again], max_frames_per_traj=limit) > frames
    data = torch.cat(batches, -1).reshape(n, -1)
    mask = data["collector", "mask"]
    lengths = mask.sum(1)
    assert torch.equal(mask, torch.arange(data.shape[1]) < lengths[:, None])
    assert frames == lengths.sum()
    rows = torch.arange(n)
    assert data["next", "done"][rows, lengths - 1].all()
    assert (data["observation"][..., 1] == 0).all()  # the first episode, and nothing else
    for row in rows:
        last = data["next", "observation"][row, lengths[row] - 1]
        assert (data["observation"][row, lengths[row] :] == last).all()
        assert (data["next", "observation"][row, lengths[row] :] == last).all()
        assert (data["next", "reward"][row, lengths[row] :] == 0).all()
        assert data["collector", "traj_ids"][row].unique().numel() == 1


def test_infos_of_an_env_that_stays_ended_are_missing():
    env = SerialEnv(3, CountingEnv, info_keys=["step"])
    with Collector(env, act, frames_per_batch=60, seed=SEED, reset_when_done=False) as collector:
        batch = collector.next()
    mask, steps = batch["collector", "mask"], batch["next", "info", "step"]
    assert torch.equal(steps.isnan(), ~mask)
    assert torch.equal(steps[mask], batch["next", "observation"][mask][:, 2].double())
    assert not mask.all()


@every_kind
@pytest.mark.parametrize(
    "options",
    [{}, {"max_frames_per_traj": 4}, {"reset_at_each_iter": True}, {"set_truncated": True}],
    ids=str,
)
def test_compact_batches_hold_every_next_observation(make, n, options):
    batches = collect(make(), 23, n, compact_obs=True, **options)
    assert ("next", "observation") not in batches[0].keys(True)
    whole = [restore_next(batch) for batch in batches]
    assert check_transitions(whole, **options) == 92 * n
    plain = collect(make(), 23, n, **options)
    for one, other in zip(whole, plain, strict=True):
        assert torch.equal(one["next", "observation"], other["next", "observation"])


@every_kind
@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 4}], ids=str)
def test_the_order_in_memory_changes_no_value(make, n, options):
    for policy in (act, None):
        batches = collect(make(), 17, n, policy=policy, memory_order="batch", **options)
        assert check_transitions(batches, **options) == 68 * n
        assert batches[0]["action"].is_contiguous()
        for one, other in zip(
            batches, collect(make(), 17, n, policy=policy, **options), strict=True
        ):
            assert (one == other).all()


@every_kind
def test_whole_trajectories_and_split_ones_hold_the_same_frames(make, n):
    split = collect(make(), 23, n, split_trajs=True)
    assert check_transitions(split) == 92 * n
    with Collector(make(), act, frames_per_batch=10 * n, seed=SEED, trajs_per_batch=5) as collector:
        whole = [collector.next() for _ in range(4)]
    check_transitions(whole)
    assert all(batch.batch_size[0] == 5 for batch in whole)


@every_kind
def test_random_frames_are_real_frames(make, n):
    batches = collect(make(), 11, n, init_random_frames=15)
    assert check_transitions(batches) == 44 * n
    random = torch.cat([batch["collector", "random"].reshape(n, -1) for batch in batches], 1)
    assert random.sum() == 15
    for batch in batches:
        own = ~batch["collector", "random"]
        assert torch.equal(batch["action"][own], act(batch["observation"])[own])


@every_kind
def test_a_batch_never_changes_afterwards(make, n):
    with Collector(make(), act, frames_per_batch=9 * n, seed=SEED) as collector:
        kept = [collector.next() for _ in range(3)]
        copies = [batch.clone() for batch in kept]
        for _ in range(10):
            collector.next()
        assert all((one == other).all() for one, other in zip(kept, copies, strict=True))


@every_kind
def test_a_reset_begins_new_episodes_with_new_ids(make, n):
    with Collector(make(), act, frames_per_batch=9 * n, seed=SEED) as collector:
        before = collector.next()
        collector.reset()
        after = collector.next()
    check_transitions(before)
    check_transitions(after)
    assert (after["observation"].reshape(n, 9, 3)[:, 0, 2] == 0).all()
    assert after["collector", "traj_ids"].min() > before["collector", "traj_ids"].max()
