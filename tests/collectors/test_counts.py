"""Counts are exact, options do what they say."""

from __future__ import annotations

import warnings

import gymnasium as gym
import multi_kit as kit
import numpy as np
import pytest
import torch

from swath.collectors import Collector
from swath.collectors.utils import restore_next, split_trajectories
from swath.envs import SerialEnv
from swath.testing import CountingEnv


class Steps(gym.Env):
    """Observation: (episode, step). Episode k lasts `length(k)` steps, odd ones truncate."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length=lambda k: 3 + k % 4):
        self.length, self.episode = length, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.length(self.episode)
        odd = bool(self.episode % 2)
        return self._obs(), float(self.episode * 100 + self.t), end and not odd, end and odd, {}

    def _obs(self):
        return np.array([self.episode, self.t], np.float32)


def check_steps(batch, usual_lengths=True):
    """Every row is the transition that `Steps` makes there."""
    obs, nxt = batch["observation"], batch["next", "observation"]
    assert (nxt[..., 0] == obs[..., 0]).all()
    assert (nxt[..., 1] == obs[..., 1] + 1).all()
    assert (batch["next", "reward"][..., 0] == obs[..., 0] * 100 + nxt[..., 1]).all()
    episode = obs[..., 0].long()
    if usual_lengths:
        assert (batch["next", "done"][..., 0] >= (nxt[..., 1] == 3 + episode % 4)).all()
    assert (batch["next", "terminated"][..., 0] <= (episode % 2 == 0)).all()


def endless(n):
    return SerialEnv(n, lambda: Steps(lambda k: 10**9))


@pytest.mark.parametrize("total", [1, 7, 40, 41, 100, 101])
@pytest.mark.parametrize("envs", [1, 4])
def test_total_frames_is_met_exactly(total, envs):
    env = Steps if envs == 1 else SerialEnv(envs, Steps)
    with Collector(env, frames_per_batch=20, total_frames=total) as collector:
        sizes = [batch.numel() for batch in collector]
        assert sum(sizes) == -(-total // envs) * envs
        assert all(size == 20 for size in sizes[:-1])
        assert len(sizes) == len(collector)
        assert collector.next() is None
        assert list(collector) == []
        assert collector.stats()["frames"] == sum(sizes)


def test_frames_per_batch_is_rounded_up_with_one_warning_that_says_to_what():
    with pytest.warns(UserWarning, match="frames_per_batch=42 .* rounded up to 44") as caught:
        collector = Collector(SerialEnv(4, Steps), frames_per_batch=42, total_frames=88)
    assert len(caught) == 1
    assert [batch.batch_size for batch in collector] == [(4, 11), (4, 11)]
    collector.shutdown()


def test_without_total_frames_it_never_ends_and_has_no_length():
    with Collector(Steps, frames_per_batch=10) as collector:
        for count, _ in enumerate(collector):
            if count == 50:
                break
        with pytest.raises(TypeError, match="never ends"):
            len(collector)


def test_iterating_again_after_a_break_loses_nothing():
    with Collector(Steps, frames_per_batch=5, total_frames=50) as collector:
        seen = []
        for batch in collector:
            seen.append(batch)
            if len(seen) == 3:
                break
        seen.append(collector.next())
        seen.extend(collector)
    whole = torch.cat(seen)
    assert whole.numel() == 50
    check_steps(whole)
    continues = whole["observation"][1:] == whole["next", "observation"][:-1]
    assert (continues.all(-1) | whole["next", "done"][:-1, 0]).all()


@pytest.mark.parametrize("envs", [1, 3])
def test_an_episode_keeps_its_id_across_batches_and_no_other_has_it(envs):
    with Collector(SerialEnv(envs, Steps), frames_per_batch=4 * envs, total_frames=80 * envs) as c:
        whole = torch.cat(list(c), 1)
    ids, episodes = whole["collector", "traj_ids"], whole["observation"][..., 0]
    seen = {}
    for env in range(envs):
        for t in range(ids.shape[1]):
            key = seen.setdefault(ids[env, t].item(), (env, episodes[env, t].item()))
            assert key == (env, episodes[env, t].item())
    assert sorted(seen) == list(range(len(seen)))


def test_max_frames_per_traj_truncates_and_resets():
    with Collector(SerialEnv(2, Steps), frames_per_batch=60, max_frames_per_traj=4) as collector:
        batch = collector.next()
        more = collector.next()
    whole = torch.cat([batch, more], 1)
    length = whole["next", "observation"][..., 1]
    done = whole["next", "done"][..., 0]
    episode = whole["observation"][..., 0].long()
    assert length.max() == 4
    assert (done == ((length == 4) | (length == 3 + episode % 4))).all()
    natural = length == 3 + episode % 4
    terminated = whole["next", "terminated"][..., 0]
    assert (terminated == (natural & (episode % 2 == 0))).all()
    assert (
        whole["next", "truncated"][..., 0] == (done & ~terminated | (natural & (episode % 2 == 1)))
    ).all()
    assert whole["collector", "traj_ids"].unique().numel() >= done.sum()


def test_reset_at_each_iter_starts_anew_and_marks_what_was_cut():
    with Collector(endless(2), frames_per_batch=10, reset_at_each_iter=True) as collector:
        for number in range(3):
            batch = collector.next()
            assert batch["observation"][:, 0, 1].tolist() == [0, 0]
            assert batch["observation"][:, 0, 0].tolist() == [number, number]
            assert batch["next", "truncated"][..., 0].tolist() == [[False] * 4 + [True]] * 2
            assert not batch["next", "terminated"].any()
        assert collector.stats()["episodes"] == 6
        assert collector.stats()["length"]["mean"] == 5


def test_set_truncated_marks_the_last_step_while_the_episode_goes_on():
    with Collector(endless(2), frames_per_batch=10, set_truncated=True) as collector:
        first, second = collector.next(), collector.next()
        assert collector.stats()["episodes"] == 0
    for batch in (first, second):
        assert batch["next", "truncated"][..., 0].tolist() == [[False] * 4 + [True]] * 2
        assert batch["next", "done"][:, -1].all()
    assert (second["observation"][:, 0] == first["next", "observation"][:, -1]).all()
    assert (second["collector", "traj_ids"] == first["collector", "traj_ids"]).all()


@pytest.mark.parametrize("then", ["go on", "reset", "set_seed"])
def test_a_rollout_or_a_partial_between_whole_trajectories_tears_none(then):
    options = {"trajs_per_batch": 2, "traj_format": "cat"}
    options["postproc"] = lambda batch: batch.set("seen", batch["action"])
    with Collector([CountingEnv] * 2, frames_per_batch=8, seed=0, **options) as collector:
        whole, others = [], []
        for number in range(12):
            whole.append(collector.next())
            if number % 3 == 1:
                others.append(collector.rollout())
                assert others[-1].batch_size == (2, 4)
                assert "seen" not in others[-1].keys()
            if number % 5 == 4:
                others.append(collector.partial())
                if then == "reset":
                    collector.reset()
                elif then == "set_seed":
                    collector.set_seed(number)
        others.append(collector.partial())
        assert kit.each_once(whole, others) == collector.stats()["frames"]


def test_parts_that_reset_each_iter_truncates_are_whole_trajectories():
    options = {"reset_at_each_iter": True, "set_truncated": True}
    with Collector(endless(2), frames_per_batch=10, trajs_per_batch=4, **options) as collector:
        batch = collector.next()
    assert batch.batch_size == (4, 5)
    assert batch["collector", "traj_ids"].unique().numel() == 4


def test_an_env_that_is_not_reset_stays_ended_and_is_masked():
    env = SerialEnv(3, [lambda n=n: Steps(lambda k: n) for n in (2, 5, 9)])
    with Collector(env, frames_per_batch=12, reset_when_done=False) as collector:
        batches = list(collector)
        assert collector.stats()["frames"] == 16
        assert collector.stats()["episodes"] == 3
        assert collector.stats()["length"] == {
            "mean": 16 / 3,
            "min": 2,
            "max": 9,
            "last_100": 16 / 3,
        }
        collector.reset()
        assert collector.next()["observation"][:, 0].tolist() == [[1, 0]] * 3
    whole = torch.cat(batches, 1)
    mask = whole["collector", "mask"]
    assert mask.sum(1).tolist() == [2, 5, 9]
    check_steps(whole[mask], usual_lengths=False)
    assert not whole["next", "reward"][~mask].any()
    assert whole["done"][~mask].all()
    assert not whole["done"][mask].any()
    assert whole["observation"][0, 3].tolist() == [0, 2]


def test_whole_trajectories_come_exactly_n_at_a_time_and_what_is_left_is_reported():
    options = {"frames_per_batch": 21, "total_frames": 210, "trajs_per_batch": 3, "seed": 0}
    with Collector(SerialEnv(3, Steps), **options, traj_format="cat") as collector:
        with pytest.warns(UserWarning, match="left over; partial"):
            batches = list(collector)
        rest = collector.partial()
    for batch in batches:
        check_steps(batch)
        assert batch["next", "done"].sum() == 3
        assert batch["collector", "traj_ids"].unique().numel() == 3
    assert sum(batch.numel() for batch in batches) + rest.numel() == 210
    with Collector(SerialEnv(3, Steps), **options) as collector:
        padded = collector.next()
    mask = padded["collector", "mask"]
    assert padded.batch_size[0] == 3
    check_steps(padded[mask])
    assert (padded.exclude(("collector", "mask"))[mask] == batches[0]).all()


def test_split_trajs_delivers_padded_trajectories():
    with Collector(SerialEnv(2, Steps), frames_per_batch=20, split_trajs=True, seed=0) as collector:
        batch = collector.next()
    with Collector(SerialEnv(2, Steps), frames_per_batch=20, seed=0) as collector:
        plain = collector.next()
    assert (batch == split_trajectories(plain)).all()
    check_steps(batch[batch["collector", "mask"]])
    assert batch["collector", "mask"].sum() == 20


@pytest.mark.parametrize("extra", [{}, {"set_truncated": True}, {"split_trajs": True}])
@pytest.mark.parametrize("envs", [1, 3])
def test_a_compact_batch_can_be_made_whole_again(extra, envs):
    env = Steps if envs == 1 else SerialEnv(envs, Steps)
    with Collector(env, frames_per_batch=33, compact_obs=True, **extra) as collector:
        compact = [collector.next() for _ in range(3)]
    env = Steps if envs == 1 else SerialEnv(envs, Steps)
    with Collector(env, frames_per_batch=33, **extra) as collector:
        plain = [collector.next() for _ in range(3)]
    for one, other in zip(compact, plain, strict=True):
        assert ("next", "observation") not in one.keys(True)
        mask = other["collector", "mask"] if "split_trajs" in extra else slice(None)
        restored = restore_next(one)
        assert (restored["next", "observation"][mask] == other["next", "observation"][mask]).all()
        assert (restored["observation"] == other["observation"]).all()


def test_the_padding_of_a_compact_batch_stays_zero():
    with Collector(SerialEnv(3, Steps), frames_per_batch=33, compact_obs=True) as collector:
        compact = collector.next()
    compact["observation"].add_(100)  # so that nothing real is zero
    compact["collector", "final_obs"]["observation"].add_(100)
    expected = split_trajectories(restore_next(compact))
    restored = restore_next(split_trajectories(compact))
    padding = ~restored["collector", "mask"]
    assert padding[:, -1].any()
    assert not restored["next", "observation"][padding].any()
    assert torch.equal(restored["next", "observation"], expected["next", "observation"])


def test_a_compact_batch_without_frames_is_made_whole_all_the_same():
    with Collector(SerialEnv(3, Steps), frames_per_batch=33, compact_obs=True) as collector:
        compact = collector.next()
    nothing = torch.zeros(compact.batch_size, dtype=torch.bool)
    split = split_trajectories(compact.copy().update({"collector": {"mask": nothing}}))
    assert restore_next(split)["next", "observation"].shape == (0, 0, 2)
    assert restore_next(compact[:0])["next", "observation"].shape == (0, 11, 2)


def test_a_compact_batch_cut_over_time_is_refused():
    from swath.errors import UsageError

    with Collector(endless(2), frames_per_batch=20, compact_obs=True) as collector:
        batch = collector.next()
    with pytest.raises(UsageError, match="before you slice a batch over time"):
        restore_next(batch[:, :5])
    assert restore_next(batch[1:])["next", "observation"][0, -1].tolist() == [0, 10]


def test_hooks_and_postproc_run_in_order_and_see_the_batch():
    calls = []
    with Collector(
        Steps,
        frames_per_batch=6,
        total_frames=12,
        pre_collect_hook=lambda: calls.append("before"),
        postproc=lambda batch: calls.append("postproc") or batch.set("new", batch["action"] * 2),
        post_collect_hook=lambda batch: calls.append("new" in batch.keys()),
    ) as collector:
        batches = list(collector)
    assert calls == ["before", "postproc", True] * 2
    assert all((batch["new"] == 2 * batch["action"]).all() for batch in batches)


def test_a_replay_buffer_gets_the_batches_and_iteration_yields_none():
    class Buffer(list):
        def extend(self, batch):
            self.append(batch)

    buffer = Buffer()
    with Collector(Steps, frames_per_batch=6, total_frames=18, replay_buffer=buffer) as collector:
        assert list(collector) == [None] * 3
    check_steps(torch.cat(buffer))


def test_time_and_batch_order_deliver_the_same():
    orders = []
    for order in ("time", "batch"):
        with Collector(SerialEnv(3, Steps), frames_per_batch=30, memory_order=order, seed=1) as c:
            orders.append([c.next() for _ in range(3)])
    assert all((a == b).all() for a, b in zip(*orders, strict=True))
    assert orders[1][0]["observation"][:, :5].stride(1) == 2
    assert orders[0][0]["observation"].stride(0) == 2


def test_a_kept_batch_never_changes():
    with Collector(SerialEnv(2, Steps), frames_per_batch=10) as collector:
        kept = [collector.next() for _ in range(20)]
        copies = [batch.clone() for batch in kept]
        for _ in range(20):
            collector.next()
        assert all((a == b).all() for a, b in zip(kept, copies, strict=True))
    check_steps(torch.cat(kept, 1))


def test_what_the_user_does_to_a_batch_does_not_reach_the_next():
    with Collector(SerialEnv(2, Steps), frames_per_batch=20) as collector:
        for _ in range(5):
            batch = collector.next()
            check_steps(batch)
            assert not batch["done"].any()
            for leaf in batch.values(True, True):
                leaf.fill_(1)
            del batch, leaf


def test_nothing_is_warned_in_an_ordinary_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Collector(SerialEnv(2, Steps), frames_per_batch=20, total_frames=40) as collector:
            assert len(list(collector)) == 2
