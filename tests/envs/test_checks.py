"""The checks of `swath.testing`: they pass what is right and find every kind of wrong."""

from time import perf_counter

import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from swath.collectors import Collector
from swath.errors import UsageError
from swath.testing import CountingEnv, CrashingEnv, SlowEnv, check_replay, check_transitions
from swath.testing.envs import episode_plan

SEED = 5


@pytest.fixture
def batches():
    with Collector([CountingEnv] * 3, frames_per_batch=51, seed=SEED) as collector:
        return [collector.next().clone() for _ in range(3)]


def test_what_a_collector_delivers_is_right(batches):
    assert check_transitions(batches) == 153
    check_replay(batches, CountingEnv, SEED)


def test_the_order_of_rows_and_the_shape_of_batches_do_not_matter(batches):
    assert check_transitions([batch[[2, 0, 1]] for batch in batches]) == 153
    assert check_transitions([batch.reshape(-1) for batch in batches]) == 153


def test_masked_frames_are_left_out(batches):
    batch = batches[0]
    mask = torch.ones(batch.batch_size, dtype=torch.bool)
    mask[1, -4:] = False
    batch["next", "observation"][1, -4:] = 0
    assert check_transitions(batch.set(("collector", "mask"), mask)) == 47


def at_an_end(batch):
    """Row and column of a frame that ends an episode, not the last of its row."""
    rows, columns = batch["next", "done"][..., :-1, 0].nonzero(as_tuple=True)
    return rows[0], columns[0]


def set_at_an_end(key, value):
    return lambda batches: batches[0].get(key).__setitem__(at_an_end(batches[0]), value)


def show_the_first_of_the_next_episode(batches):
    row, t = at_an_end(batches[0])
    batches[0]["next", "observation"][row, t] = batches[0]["observation"][row, t + 1]


def give_two_envs_one_id(batches):
    batches[0]["collector", "traj_ids"][1] = batches[0]["collector", "traj_ids"][0]


def swap_two_frames(batches):
    batches[0] = batches[0][:, [1, 0, *range(2, batches[0].shape[1])]]


def change_an_action(batches):
    batches[1]["action"][2, 7] = 1 - batches[1]["action"][2, 7]


def renew_the_ids(batches):
    batches[1]["collector", "traj_ids"] += 1000


WRONGS = {
    "a lost batch": (lambda batches: batches.pop(1), "observation after"),
    "a batch twice": (lambda batches: batches.insert(1, batches[0]), "observation after"),
    "swapped frames": (swap_two_frames, "observation after"),
    "a lost frame": (lambda b: b.__setitem__(0, b[0][:, 1:-1]), "observation after"),
    "the next episode shown": (show_the_first_of_the_next_episode, "next observation is"),
    "no end": (set_at_an_end(("next", "done"), False), "terminated, truncated, done"),
    "termination for truncation": (
        set_at_an_end(("next", "terminated"), False),
        "terminated, truncated, done",
    ),
    "a wrong reward": (set_at_an_end(("next", "reward"), -1.0), "reward is -1"),
    "another action than was made": (change_an_action, "reward is"),
    "an id for two envs": (give_two_envs_one_id, "of this id"),
    "an id that changes": (renew_the_ids, "same id as the frame before"),
    "a frame that starts done": (set_at_an_end("done", True), "a flag at the root"),
}


@pytest.mark.parametrize(("spoil", "message"), WRONGS.values(), ids=WRONGS)
def test_every_wrong_is_found(batches, spoil, message):
    spoil(batches)
    with pytest.raises(AssertionError, match=message):
        check_transitions(batches)


@pytest.mark.parametrize(
    "key",
    ["observation", ("next", "observation"), ("next", "reward"), ("next", "truncated"), "action"],
)
def test_a_replay_finds_every_wrong(batches, key):
    wrong = batches[1].get(key)[1, 4]
    batches[1].get(key)[1, 4] = ~wrong if wrong.dtype == torch.bool else 1 - wrong
    with pytest.raises(AssertionError, match="env 1, batch 1, step"):
        check_replay(batches, CountingEnv, SEED)


def test_a_replay_tells_seeds_apart(batches):
    with pytest.raises(AssertionError, match="env 0, batch 0, step 0"):
        check_replay(batches, CountingEnv, SEED + 1)


def test_episodes_end_in_every_way_and_at_every_length():
    plans = {episode_plan(stamp, n, 4) for stamp in range(20) for n in range(20)}
    endings = {(True, False), (False, True), (True, True)}
    assert plans == {(length, *ending) for length in range(1, 5) for ending in endings}


def test_a_counting_env_is_a_gymnasium_env():
    check_env(CountingEnv(), skip_render_check=True)


def test_unseeded_counting_envs_have_different_stamps():
    assert len({CountingEnv().stamp for _ in range(100)}) == 100


def test_a_counting_env_refuses_wrong_actions_and_steps_after_the_end():
    env = CountingEnv(spaces.Dict(push=spaces.Discrete(2)), longest=1)
    with pytest.raises(UsageError, match="reset"):
        env.step({"push": 1})
    env.reset()
    for action in (1, {"push": 2}, {"pull": 1}):
        with pytest.raises(UsageError, match="not in"):
            env.step(action)
    env.step({"push": 1})
    with pytest.raises(UsageError, match="reset"):
        env.step({"push": 1})


def test_a_slow_env_takes_its_time():
    with Collector(SlowEnv(0.005), frames_per_batch=20, seed=0) as collector:
        started = perf_counter()
        check_transitions(collector.next())
    assert perf_counter() - started >= 20 * 0.005


def test_a_crashing_env_crashes_once():
    env = CrashingEnv(at_reset=1, at_step=2, exception=OSError("gone"))
    env.reset(seed=1)
    outcomes = []
    for call in (env.reset, env.reset, lambda: env.step(0), lambda: env.step(0)):
        try:
            outcomes.append(call() is not None)
        except OSError as error:
            outcomes.append(str(error))
    assert outcomes == ["gone", True, True, True]
