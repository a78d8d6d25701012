"""The model notices what is wrong: a tester that finds nothing is worth what it could find."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from model_kit import Model, Promises, Wrong, checksum
from telling_kit import COUNTING, HistoryEnv, policy_of

from swath.collectors import Collector

OPTIONS = {"frames_per_batch": 20, "seed": 1, "init_random_frames": 6, "max_frames_per_traj": 3}
PROMISES = Promises(
    form="numbers",
    action="discrete",
    longest=5,
    policy="recurrent",
    num_envs=2,
    limit=3,
    seed=1,
    random=6,
    strict=True,
    counted=True,
    lead=(2,),
)


@pytest.fixture
def batches():
    policy = policy_of("recurrent", "discrete", "numbers")
    with Collector([HistoryEnv] * 2, policy, **OPTIONS) as collector:
        return [collector.next().clone() for _ in range(3)]


def taken(batches) -> Model:
    model = Model(PROMISES)
    for batch in batches:
        model.take(batch)
    return model


def change(key, what, batch, lane=1, t=4):
    batch[key][lane, t] = what(batch[key][lane, t])


def swap_rows(batch):
    batch[:, [3, 4]] = batch[:, [4, 3]].clone()


def cut_by_one(batch):
    row = batch[0].clone()
    row[:-1] = batch[0, 1:].clone()
    batch[0] = row


CHANGES = {
    "reward": functools.partial(change, ("next", "reward"), lambda value: value + 0.5),
    "action": functools.partial(change, "action", lambda value: value + 1),
    "observation": functools.partial(change, "observation", lambda value: value + 1),
    "next observation": functools.partial(change, ("next", "observation"), lambda value: value - 1),
    "terminated": functools.partial(change, ("next", "terminated"), torch.logical_not),
    "truncated": functools.partial(change, ("next", "truncated"), torch.logical_not),
    "done": functools.partial(change, ("next", "done"), torch.logical_not),
    "done at the root": functools.partial(change, "done", torch.logical_not),
    "id": functools.partial(change, ("collector", "traj_ids"), lambda value: value + 1),
    "version": functools.partial(change, ("collector", "policy_version"), lambda value: value + 1),
    "random": functools.partial(change, ("collector", "random"), torch.logical_not),
    "state": functools.partial(change, "policy_state", lambda value: value + 1),
    "next state": functools.partial(change, ("next", "policy_state"), lambda value: value + 1),
    "told": functools.partial(change, "told", lambda value: value + 1),
    "order": swap_rows,
    "a lost row": cut_by_one,
    "step count": functools.partial(change, "step_count", lambda value: value + 1),
    "next step count": functools.partial(change, ("next", "step_count"), lambda value: value - 1),
}


def test_batches_as_they_are_pass(batches):
    assert taken(batches).frames == 60


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_any_change_of_a_row_is_noticed(batches, changed):
    changed(batches[1])
    with pytest.raises(Wrong):
        taken(batches)


@pytest.mark.parametrize("order", [(0, 2), (0, 1, 1), (1, 0, 2), (0, 0)], ids=str)
def test_lost_and_doubled_batches_are_noticed(batches, order):
    with pytest.raises(Wrong):
        taken([batches[number] for number in order])


def test_a_batch_of_another_shape_is_noticed(batches):
    with pytest.raises(Wrong, match="the batch size is"):
        taken([batches[0][:, None]])


def test_episodes_that_nobody_tells_of_and_those_that_never_were_are_noticed(batches):
    model = taken(batches)
    told = [(value, length) for (value, length), n in model.ended.items() for _ in range(n)]
    names = ("return", "length")
    model.note_told(dict(zip(names, map(list, zip(*told, strict=True)), strict=True)))
    with pytest.raises(Wrong, match="never were"):
        model.note_told({"return": [0.25], "length": [2]})
    with pytest.raises(Wrong, match="nobody tells of"):
        taken(batches).note_told({"return": [], "length": []})


def test_an_env_that_was_to_begin_anew_and_goes_on_is_noticed():
    made = {"frames_per_batch": 2, "seed": 1}
    with Collector([HistoryEnv] * 2, policy_of("module", "discrete", "numbers"), **made) as one:
        batches = [one.next().clone() for _ in range(20)]
    model = Model(replace(PROMISES, policy="module", limit=None, counted=False, random=0))
    for batch in batches:
        there = [n for n, at in model.lanes.items() if model.places[at].open]
        if there:
            model.note_reset(there[:1])
            with pytest.raises(Wrong, match="it was to begin anew"):
                model.take(batch)
            return
        model.take(batch)
    raise AssertionError("no episode went on")


COUNTS = {"as it is": 0, "one is left out": 1, "one comes twice": -1}


@pytest.mark.parametrize("how", COUNTING)
@pytest.mark.parametrize("shift", COUNTS.values(), ids=COUNTS)
def test_a_policy_that_does_not_count_on_is_noticed(how, shift):
    made = {"frames_per_batch": 12, "seed": 1}
    policy = policy_of(how, "discrete", "numbers")
    with Collector([HistoryEnv] * 2, policy, **made) as collector:
        batches = [collector.next().clone() for _ in range(2)]
    model = Model(replace(PROMISES, policy=how, limit=None, counted=False, random=0))
    key = "count" if how == "private" else ("memory", "count")
    batches[1][key] += shift
    model.take(batches[0])
    with pytest.raises(Wrong, match="of the policy") if shift else contextlib.nullcontext():
        model.take(batches[1])


def test_a_count_that_is_not_exact_is_noticed(batches):
    with pytest.raises(Wrong, match="59 frames counted, 60 delivered"):
        taken(batches).check_counts({"frames": 59, "policy_version": 0}, 0)


def test_any_bit_of_a_kept_batch_is_noticed(batches):
    before = checksum(batches[0])
    batches[0]["next", "done"][0, 3] ^= True
    assert checksum(batches[0]) != before
