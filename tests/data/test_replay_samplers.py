"""Samplers: each frame as likely as it should be; slices that never leave a trajectory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_kit import check, numbered, trajectories
from tensordict import TensorDict

from swath.collectors import Collector
from swath.data import PrioritizedSampler, ReplayBuffer, SliceSampler, UniformSampler, samplers
from swath.data.samplers import _SumTree
from swath.envs import SerialEnv
from swath.errors import UsageError


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how many standard deviations chi-square lies above its mean."""
    value = ((counts - expected) ** 2 / expected).sum().item()
    free = len(counts) - 1
    return (value - free) / (2 * free) ** 0.5


def drawn(buffer: ReplayBuffer, times: int, frames: int) -> torch.Tensor:
    counts = torch.zeros(frames)
    for _ in range(times):
        counts += torch.bincount(check_index(buffer.sample()), minlength=frames)
    return counts


def check_index(batch: TensorDict) -> torch.Tensor:
    return batch["index"].flatten()


@pytest.mark.parametrize("written", [100, 160])
def test_every_frame_is_as_likely_as_any_other(written: int) -> None:
    buffer = ReplayBuffer(130, batch_size=1000, seed=0)
    buffer.extend(numbered(0, written))
    buffer.empty()
    buffer.extend(numbered(0, written))
    low = max(written, 2 * written - 130)
    counts = drawn(buffer, 100, 2 * written)[low:]
    assert abs(chi_square(counts, torch.full_like(counts, counts.mean()))) < 4
    assert counts.sum() == 100_000  # and none of the others


def test_frames_that_are_being_written_are_as_if_not_there() -> None:
    buffer = ReplayBuffer(100, batch_size=1000, seed=0)
    buffer.extend(numbered(0, 100))
    ring = buffer._ring
    ring.claim(97, lambda: True)
    counts = drawn(buffer, 20, 100)
    assert counts[:97].sum() == 0
    assert abs(chi_square(counts[97:], torch.full((3,), 20_000 / 3))) < 4


def test_without_replacement_all_come_before_one_comes_again() -> None:
    buffer = ReplayBuffer(100, sampler=UniformSampler(replacement=False), batch_size=7, seed=0)
    buffer.extend(numbered(0, 70))
    rounds = [torch.cat([check(buffer.sample()) for _ in range(10)]) for _ in range(3)]
    for counts in rounds:
        assert counts.sort().values.tolist() == list(range(70))
    assert not torch.equal(rounds[0], rounds[1])
    buffer.extend(numbered(70, 100))  # what it was to draw next is gone
    assert len(check(buffer.sample(100)).unique()) == 100
    with pytest.raises(UsageError, match="cannot draw"):
        buffer.sample(101)


def test_a_batch_that_ends_a_round_takes_no_frame_out_of_the_next_one() -> None:
    buffer = ReplayBuffer(10, sampler=UniformSampler(replacement=False), batch_size=3, seed=0)
    buffer.extend(numbered(0, 10))
    drawn = torch.cat([check(buffer.sample()) for _ in range(40)])
    for one in drawn.reshape(12, 10):  # a round each
        assert one.sort().values.tolist() == list(range(10))


def test_iteration_gives_each_frame_once() -> None:
    buffer = ReplayBuffer(100, batch_size=30, seed=0)
    buffer.extend(numbered(0, 130))
    batches = list(buffer)
    assert [len(batch) for batch in batches] == [30, 30, 30, 10]
    assert sorted(check(torch.cat(batches)).tolist()) == list(range(30, 130))


# -- priorities ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 10**6))
def test_the_sum_tree_finds_what_a_cumulative_sum_does(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, values = _SumTree(size), np.zeros(size)
    for _ in range(4):
        rows = rng.integers(0, size, rng.integers(1, 40))
        new = rng.integers(0, 4, len(rows)).astype(float)
        tree.set(rows, new)
        values[rows] = new
    assert tree.total() == values.sum()
    if values.sum():
        shares = rng.random(200)
        expected = np.searchsorted(values.cumsum(), shares * values.sum(), side="right")
        assert np.array_equal(tree.find(shares), expected)


def test_frames_come_in_proportion_to_their_priority() -> None:
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5, eps=0.0)
    buffer = ReplayBuffer(100, sampler=sampler, batch_size=1000, seed=0)
    buffer.extend(numbered(0, 100))
    priority = torch.rand(100) * 3 + 0.01
    buffer.update_priority(torch.arange(100), priority)
    counts = drawn(buffer, 200, 100)
    share = priority**0.7 / (priority**0.7).sum()
    assert abs(chi_square(counts, 200_000 * share)) < 4
    batch = buffer.sample()
    weight = (100 * share[batch["index"]]) ** -0.5
    torch.testing.assert_close(batch["priority_weight"], weight / weight.max())


def test_a_new_frame_has_the_highest_priority() -> None:
    sampler = PrioritizedSampler(alpha=1.0)
    buffer = ReplayBuffer(1000, sampler=sampler, batch_size=1000, seed=0)
    buffer.extend(numbered(0, 50))
    buffer.update_priority(np.arange(50), np.full(50, 5.0))
    buffer.update_priority(np.arange(50), 0.05)
    buffer.extend(numbered(50, 50))
    new = (check_index(buffer.sample()) >= 50).float().mean()
    assert new == pytest.approx(100 / 101, abs=0.02)


def test_the_priority_of_a_frame_that_is_gone_is_ignored() -> None:
    buffer = ReplayBuffer(10, sampler="prioritized", batch_size=400, seed=0)
    buffer.extend(numbered(0, 10))
    old = buffer.sample()["index"]
    buffer.extend(numbered(10, 9))  # only frame 9 stays
    buffer.update_priority(old, torch.where(old == 9, 1.0, 1e6))
    counts = torch.bincount(check(buffer.sample()), minlength=19)
    assert counts[9:].min() > 0
    assert chi_square(counts[9:].float(), torch.full((10,), 40.0)) < 4
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="finite"):
            buffer.update_priority(old, bad)
    buffer.empty()
    buffer.extend(numbered(50, 2))
    assert set(check(buffer.sample()).tolist()) == {50, 51}


# -- slices ----------------------------------------------------------------------------------------


def check_slices(batch: TensorDict) -> None:
    assert batch.names == [None, "time"]
    ids, time = batch["collector", "traj_ids"], batch["time"]
    assert (ids == ids[:, :1]).all()
    assert (time.diff(dim=1) == 1).all()
    assert not batch["next", "done"][:, :-1].any()


class Envs:
    """Envs whose episodes end whenever hypothesis likes; remembers what was written."""

    def __init__(self, data, count: int) -> None:
        self._data, self._fresh = data, count
        self._ids, self._times = list(range(count)), [0] * count
        self.written: list[tuple[int, int]] = []

    def batch(self, steps: int) -> TensorDict:
        rows = [[self._step(env) for _ in range(steps)] for env in range(len(self._ids))]
        ids, time, done = torch.tensor(rows).unbind(-1)
        source = {"time": time, "next": {"done": done.bool()[..., None]}}
        return TensorDict({**source, "collector": {"traj_ids": ids}}, time.shape)

    def _step(self, env: int) -> tuple[int, int, bool]:
        one, time, ends = self._ids[env], self._times[env], self._data.draw(st.integers(0, 3)) == 0
        self._times[env] += 1
        if ends:
            self._ids[env], self._times[env], self._fresh = self._fresh, 0, self._fresh + 1
        return one, time, ends

    def note(self, batch: TensorDict) -> None:
        ids, time = batch["collector", "traj_ids"].flatten(), batch["time"].flatten()
        self.written += zip(ids.tolist(), time.tolist(), strict=True)


def masked(batch: TensorDict) -> TensorDict:
    """Return more rows and steps than there are, of which a mask has those of the batch."""
    envs, steps = batch.shape
    wide = TensorDict.cat([batch, batch[:, :1]], 1)
    mask = torch.ones(envs, steps + 1, dtype=torch.bool)
    mask[:, -1] = False
    return wide.set(("collector", "mask"), mask)


FORMS = {
    "rows": lambda batch: [batch],
    "flat": lambda batch: [batch.reshape(-1)],
    "by step": lambda batch: list(batch.unbind(1)),
    "frame by frame": lambda batch: [one[None] for row in batch.unbind(0) for one in row],
    "masked": lambda batch: [masked(batch)],
}


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    capacity=st.integers(4, 60),
    length=st.integers(1, 6),
    form=st.sampled_from(sorted(FORMS)),
)
def test_slices_stay_within_a_trajectory_and_all_are_found(data, capacity, length, form) -> None:
    buffer = ReplayBuffer(
        capacity, sampler=SliceSampler(slice_len=length), batch_size=64 * length, seed=0
    )
    envs = Envs(data, data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 8))):
        batch = envs.batch(data.draw(st.integers(1, 5)))
        for part in FORMS[form](batch):
            buffer.extend(part)
            envs.note(part if form != "masked" else batch)
        held = set(envs.written[-capacity:])
        possible = {
            (one, time)
            for one, time in held
            if all((one, time - back) in held for back in range(length))
        }
        if not possible:
            with pytest.raises(UsageError, match="cannot draw"):
                buffer.sample()
            continue
        seen = set()
        for _ in range(3):
            batch = buffer.sample()
            assert batch.batch_size == (64, length)
            check_slices(batch)
            ends = (batch["collector", "traj_ids"][:, -1], batch["time"][:, -1])
            seen |= set(map(tuple, torch.stack(ends, 1).tolist()))
        assert seen <= possible
        if len(possible) <= 6:  # missing one of them in 192 draws happens once in 10^14
            assert seen == possible


def test_the_only_slice_that_is_whole_is_found() -> None:
    buffer = ReplayBuffer(10, sampler=SliceSampler(slice_len=4), batch_size=16, seed=0)
    for start in (0, 3):  # of three envs only the last has four frames left
        buffer.extend(trajectories([0, 1, 2], [start] * 3, 3, set()))
    batch = buffer.sample()
    check_slices(batch)
    assert (batch["collector", "traj_ids"] == 2).all()
    assert (batch["time"] == torch.arange(2, 6)).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_one_slice_among_very_many_frames_is_found(rows: int) -> None:
    buffer = ReplayBuffer(20_000, sampler=SliceSampler(slice_len=4), batch_size=8, seed=0)
    short = trajectories([99] * 3000, [0] * 3000, 1, {99})
    buffer.extend(short)
    for start in (0, 2):  # of three envs, or one, the last alone goes on
        batch = trajectories(list(range(rows)), [start] * rows, 2, set(range(rows - 1)))
        buffer.extend(batch if start == 0 else batch[-1:])
        buffer.extend(short)
    batch = buffer.sample()
    check_slices(batch)
    assert (batch["time"] == torch.arange(4)).all()


def test_a_row_goes_on_after_one_that_ended_with_the_batch() -> None:
    buffer = ReplayBuffer(100, sampler=SliceSampler(slice_len=4), batch_size=256, seed=0)
    buffer.extend(trajectories([0, 1], [0, 0], 2, set()))
    buffer.extend(trajectories([0, 1], [2, 2], 2, {0}))
    seen = {tuple(ids) for ids in buffer.sample()["collector", "traj_ids"].tolist()}
    assert seen == {(0,) * 4, (1,) * 4}


def test_frames_may_be_overwritten_while_slices_are_looked_for(monkeypatch) -> None:
    buffer = ReplayBuffer(20, sampler=SliceSampler(slice_len=4), batch_size=64, seed=0)
    buffer.extend(trajectories([0], [0], 20, set()))
    later = iter([trajectories([0], [20], 12, set())])
    random = samplers._random

    def overtaken(*args):
        found = random(*args)
        for batch in later:
            buffer.extend(batch)
        return found

    monkeypatch.setattr(samplers, "_random", overtaken)
    batch = buffer.sample()
    check_slices(batch)
    assert batch["time"].min() >= 12


def test_slices_end_where_the_id_changes_though_no_episode_ended() -> None:
    buffer = ReplayBuffer(100, sampler=SliceSampler(slice_len=2), batch_size=64, seed=0)
    batch = trajectories([1, 2], [0, 0], 6, set()).clone()
    batch["collector", "traj_ids"][0, 3:] = 3  # the env was started anew, say
    buffer.extend(batch)
    buffer.extend(trajectories([3, 2], [6, 6], 6, set()))
    batches = [buffer.sample() for _ in range(20)]
    seen = {
        (*pair, one)
        for b in batches
        for pair, one in zip(
            b["time"].tolist(), b["collector", "traj_ids"][:, 0].tolist(), strict=True
        )
    }
    for batch in batches:
        check_slices(batch)
    within = {1: range(2), 2: range(11), 3: range(3, 11)}
    assert seen == {(i, i + 1, one) for one, times in within.items() for i in times}


def test_slices_end_with_an_episode_though_its_id_goes_on() -> None:
    buffer = ReplayBuffer(100, sampler=SliceSampler(slice_len=2), batch_size=64, seed=0)
    for start in (0, 3, 6):
        buffer.extend(trajectories([7], [start], 3, {7} if start == 3 else set()))
    seen = {tuple(pair) for _ in range(5) for pair in buffer.sample()["time"].tolist()}
    assert seen == {(i, i + 1) for i in range(8)} - {(5, 6)}


def test_all_slices_are_equally_likely() -> None:
    buffer = ReplayBuffer(60, sampler=SliceSampler(num_slices=250), batch_size=1000, seed=0)
    for start in range(0, 30, 5):  # two envs, of which one ends every ten steps
        ids = [0, 1000 + start // 10]
        buffer.extend(trajectories(ids, [start, start % 10], 5, {ids[1]} if start % 10 else set()))
    counts: dict[tuple[int, int], int] = {}
    for _ in range(40):
        batch = buffer.sample()
        check_slices(batch)
        starts = (batch["collector", "traj_ids"][:, 0], batch["time"][:, 0])
        for pair in map(tuple, torch.stack(starts, 1).tolist()):
            counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 27 + 3 * 7
    found = torch.tensor(list(counts.values())).float()
    assert abs(chi_square(found, torch.full_like(found, 10_000 / 48))) < 4


def test_slices_do_not_jump_over_frames_that_were_refused() -> None:
    buffer = ReplayBuffer(60, sampler=SliceSampler(slice_len=3), batch_size=300, seed=0)
    buffer.extend(trajectories([7], [0], 4, set()))
    with pytest.raises(UsageError, match="has a new key"):
        buffer.extend(trajectories([7], [4], 4, set()).set("more", torch.zeros(1, 4)))
    buffer.extend(trajectories([7], [8], 4, set()))
    batch = buffer.sample()
    check_slices(batch)
    assert set(batch["time"][:, 0].tolist()) == {0, 1, 8, 9}


def test_slices_do_not_jump_over_frames_that_were_refused_after_a_load_either() -> None:
    def fresh() -> ReplayBuffer:
        return ReplayBuffer(60, sampler=SliceSampler(slice_len=3), batch_size=300, seed=0)

    buffer, other = fresh(), fresh()
    buffer.extend(trajectories([7], [0], 4, set()))
    with pytest.raises(UsageError, match="has a new key"):
        buffer.extend(trajectories([7], [4], 4, set()).set("more", torch.zeros(1, 4)))
    buffer.extend(trajectories([7], [8], 4, set()))
    other.load_state_dict(buffer.state_dict())
    batch = other.sample()
    check_slices(batch)
    assert set(batch["time"][:, 0].tolist()) == {0, 1, 8, 9}


@pytest.mark.processes
def test_slices_are_right_whoever_wrote_and_whichever_sampler_they_have() -> None:
    """Who attached before slices were wanted keeps count of trajectories from then on, too."""
    maker = ReplayBuffer(60, storage="shared")
    maker.extend(trajectories([1, 2], [0, 0], 4, set()))
    memory = maker.handle()
    writer = ReplayBuffer.attached(*memory)
    writer.extend(trajectories([11, 12], [0, 0], 4, set()))
    sampler = SliceSampler(slice_len=3)
    reader = ReplayBuffer.attached(*memory, sampler=sampler, batch_size=600, seed=0)
    for start in (4, 8):
        maker.extend(trajectories([1, 2], [start] * 2, 4, set()))
        writer.extend(trajectories([11, 12], [start] * 2, 4, set()))
    batch = reader.sample()
    check_slices(batch)
    assert len(torch.unique(batch["collector", "traj_ids"])) == 4


@pytest.mark.processes
def test_a_writer_elsewhere_continues_nothing_across_a_state_that_was_loaded() -> None:
    """The number of its last frame is that of another one now."""
    sampler = SliceSampler(slice_len=3)
    buffer = ReplayBuffer(60, storage="shared", sampler=sampler, batch_size=300, seed=0)
    buffer.extend(trajectories([1], [0], 4, set()))
    writer = ReplayBuffer.attached(*buffer.handle())
    state = buffer.state_dict()
    writer.extend(trajectories([2], [0], 4, set()))
    buffer.load_state_dict(state)
    buffer.extend(trajectories([1], [4], 4, set()))
    writer.extend(trajectories([2], [4], 4, set()))
    check_slices(buffer.sample())


def test_a_prioritized_buffer_that_was_never_drawn_from_is_restored() -> None:
    buffer, other = (ReplayBuffer(20, sampler="prioritized", batch_size=200, seed=0) for _ in "ab")
    buffer.extend(numbered(0, 10))
    other.load_state_dict(buffer.state_dict())
    assert set(check(other.sample()).tolist()) == set(range(10))


@pytest.mark.processes
def test_slices_of_a_collector_and_of_a_restored_buffer(tmp_path) -> None:
    def fresh(**options: object) -> ReplayBuffer:
        sampler = SliceSampler(slice_len=20)
        return ReplayBuffer(500, sampler=sampler, batch_size=200, seed=0, **options)

    buffer = fresh(storage="memmap", directory=tmp_path / "files")
    with Collector(
        SerialEnv(4, "CartPole-v1"), frames_per_batch=48, total_frames=960, replay_buffer=buffer
    ) as collector:
        list(collector)
    buffer.save(tmp_path / "saved")
    other = fresh()
    other.load(tmp_path / "saved")
    buffer.close()
    again = fresh(storage="memmap", directory=tmp_path / "files")
    for one in (other, again):
        batch = one.sample()
        assert batch.batch_size == (10, 20)
        assert torch.equal(batch["observation"][:, 1:], batch["next", "observation"][:, :-1])
    again.close()


def stored(buffer: ReplayBuffer, seed: int, envs: int = 2) -> Collector:
    """Return a collector that writes to a buffer; its episodes rarely end with a batch."""
    env = SerialEnv(envs, "CartPole-v1")
    return Collector(env, frames_per_batch=6 * envs, seed=seed, replay_buffer=buffer)


def of_slices(frames: int = 4) -> ReplayBuffer:
    sampler = SliceSampler(slice_len=frames)
    return ReplayBuffer(2_000, sampler=sampler, batch_size=200 * frames, seed=0)


def check_transitions(batch) -> None:
    """Fail if a frame of a slice does not begin where the one before it has ended."""
    ends, begins = batch["next", "observation"][:, :-1], batch["observation"][:, 1:]
    assert torch.equal(ends, begins)


def test_slices_keep_to_one_of_several_collectors_whose_ids_are_the_same() -> None:
    buffer = of_slices()
    with stored(buffer, 1) as one, stored(buffer, 2) as other:
        for which in (one, other, one, one, other, other, one):
            which.next()
    check_transitions(buffer.sample())
    batch = buffer.sample()
    check_transitions(batch)
    assert (batch["index"].diff(dim=1) > 1).any()  # trajectories of both went on across batches


def test_slices_keep_to_one_writer_where_you_write_for_several() -> None:
    buffer = of_slices()
    for start in (0, 3, 6):
        for writer, far in (("a", 0), ("b", 1000)):
            buffer.extend(trajectories([1, 2], [start + far] * 2, 3, set()), writer=writer)
    batch = buffer.sample()
    check_slices(batch)
    assert set(batch["time"][:, 0].tolist()) == {one + far for one in range(6) for far in (0, 1000)}


@pytest.mark.parametrize("gone", ["rollout", "partial"])
def test_slices_do_not_jump_over_frames_that_went_elsewhere(gone: str) -> None:
    buffer = of_slices()
    with stored(buffer, 1) as collector:
        collector.next()
        if gone == "rollout":
            assert collector.rollout() is not None
        else:
            collector._way.raw, kept = collector._rollout(), collector  # as Ctrl-C leaves it
            assert kept.partial() is not None
        collector.next()
    check_transitions(buffer.sample())


def test_a_collector_that_goes_back_to_a_state_does_not_continue_what_it_wrote_since() -> None:
    buffer = of_slices()
    with stored(buffer, 1) as collector:
        collector.next()
        state = collector.state_dict()
        collector.next()
        collector.load_state_dict(state)
        collector.next()
    check_transitions(buffer.sample())


def test_a_new_collector_continues_nothing_of_a_buffer_that_was_loaded(tmp_path) -> None:
    buffer, other = of_slices(), of_slices()
    with stored(buffer, 1) as collector:
        collector.next()
    buffer.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    with stored(other, 2) as collector:
        collector.next()
    check_transitions(other.sample())


@pytest.mark.parametrize(
    ("sampler", "other", "message"),
    [
        (UniformSampler(), PrioritizedSampler(), "PrioritizedSampler continues from .*'values'"),
        (PrioritizedSampler(), UniformSampler(), r"UniformSampler continues from \['left'\]"),
        (SliceSampler(slice_len=2), PrioritizedSampler(), r"and it has \[\]"),
    ],
)
def test_the_state_of_another_sampler_is_refused_before_anything_is_changed(
    tmp_path, sampler, other, message
) -> None:
    buffer = ReplayBuffer(20, sampler=sampler, batch_size=4)
    buffer.extend(trajectories([1], [0], 6, set()))
    buffer.save(tmp_path / "saved")
    second = ReplayBuffer(20, sampler=other, batch_size=4)
    with pytest.raises(UsageError, match=message):
        second.load(tmp_path / "saved")
    assert len(second) == 0
    second.extend(trajectories([1], [0], 6, set()))
    second.sample()


@pytest.mark.parametrize("form", ["state", "files"])
def test_slices_of_a_run_that_was_resumed_are_those_of_one_that_was_not(tmp_path, form) -> None:
    buffer, other = of_slices(8), of_slices(8)
    with stored(buffer, 1) as first, stored(other, 5) as second:
        first.next()
        second.next()
        second.load_state_dict(first.state_dict())
        if form == "files":
            buffer.save(tmp_path / "saved")
            other.load(tmp_path / "saved")
        else:
            other.load_state_dict(buffer.state_dict())
        for collector in (first, second, first, second):
            collector.next()
    batch = buffer.sample()
    check_transitions(batch)
    assert torch.equal(batch["observation"], other.sample()["observation"])
    assert (batch["index"][:, 0] < 12).any()  # and some of them cross the seam


def test_priorities_of_a_buffer_that_has_drawn_nothing_yet_are_restored() -> None:
    buffer, other = (ReplayBuffer(20, sampler="prioritized", batch_size=50) for _ in range(2))
    buffer.extend(numbered(0, 15))
    other.load_state_dict(buffer.state_dict())
    assert set(check(other.sample()).tolist()) <= set(range(15))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs one of"),
        ({"num_slices": 2, "slice_len": 2}, "needs one of"),
        ({"slice_len": 0}, "at least 1"),
    ],
)
def test_slices_of_impossible_sizes_are_refused(options, message) -> None:
    with pytest.raises(UsageError, match=message):
        SliceSampler(**options)
    with pytest.raises(UsageError, match="batch_size=10 is not a multiple of slice_len=3"):
        ReplayBuffer(10, sampler=SliceSampler(slice_len=3), batch_size=10)
    buffer = ReplayBuffer(10, sampler=SliceSampler(slice_len=3))
    with pytest.raises(UsageError, match="traj_ids"):
        buffer.extend(numbered(0, 4))
