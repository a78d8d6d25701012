"""Gymnasium vector envs: all auto-reset modes, wrappers, and envs that reset as they please."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from swath.collectors import Collector
from swath.envs import GymEnv, as_group
from swath.errors import EnvError, UsageError
from swath.policies import RecurrentPolicy
from swath.testing import CountingEnv, check_replay, check_transitions
from swath.testing.envs import episode_plan

SEED = 4
# TorchRL, once imported, makes "spawn" the default, which is right but slow for a test.
forked = functools.partial(AsyncVectorEnv, context="fork")
MODES = list(AutoresetMode)
all_modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)


class Stubborn(VectorEnv):
    """Resets in the next step, whatever it is asked; the way of most vector envs out there."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs, mode=AutoresetMode.NEXT_STEP, make=CountingEnv):
        self._inner = SyncVectorEnv([make] * num_envs, autoreset_mode=mode)
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space
        self.observation_space, self.action_space = (
            self._inner.observation_space,
            self._inner.action_space,
        )

    def reset(self, *, seed=None, options=None):
        assert options is None, "a reset_mask was passed to an env that ignores it"
        return self._inner.reset(seed=seed)

    def step(self, actions):
        return self._inner.step(actions)


@all_modes
@pytest.mark.parametrize("kind", [SyncVectorEnv, forked], ids=["sync", "async"])
@pytest.mark.parametrize("wrap", [lambda env: env, wrappers.RecordEpisodeStatistics])
def test_no_row_of_a_reset_is_delivered_in_any_mode(kind, mode, wrap):
    env = wrap(kind([CountingEnv] * 3, autoreset_mode=mode))
    with Collector(env, frames_per_batch=3 * 17, seed=SEED) as collector:
        batches = [collector.next() for _ in range(3)]
    assert ("collector", "mask") not in batches[0].keys(True)
    assert check_transitions(batches) == 153
    check_replay(batches, CountingEnv, SEED)


@all_modes
def test_trajectories_are_cut_in_any_mode(mode):
    env = SyncVectorEnv([CountingEnv] * 3, autoreset_mode=mode)
    with Collector(env, frames_per_batch=51, seed=SEED, max_frames_per_traj=4) as collector:
        assert check_transitions([collector.next() for _ in range(3)], max_frames_per_traj=4) == 153


@all_modes
def test_statistics_of_a_wrapper_stay_right_when_envs_are_reset_one_by_one(mode):
    env = wrappers.RecordEpisodeStatistics(
        SyncVectorEnv([CountingEnv] * 3, autoreset_mode=mode), buffer_length=1000
    )
    with Collector(env, frames_per_batch=300, seed=SEED) as collector:
        batch = collector.next()
    rows, ends = batch["next", "done"][..., 0].nonzero(as_tuple=True)
    starts = {row: 0 for row in range(3)}
    lengths, returns = [], []
    for t, row in sorted(zip(ends.tolist(), rows.tolist(), strict=True)):
        lengths.append(t + 1 - starts[row])
        returns.append(batch["next", "reward"][row, starts[row] : t + 1].sum().item())
        starts[row] = t + 1
    assert list(env.length_queue) == lengths
    assert list(env.return_queue) == returns


def test_vector_envs_that_share_their_metadata_have_modes_of_their_own():
    """As Gymnasium's do up to 1.3: there the mode of the last one would be that of all."""
    modes = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
    envs = [SyncVectorEnv([CountingEnv] * 2, autoreset_mode=mode) for mode in modes]
    for env in envs:
        env.metadata = envs[-1].metadata
    assert [as_group(env).mode for env in envs] == modes
    with Collector(envs, frames_per_batch=120, seed=0) as collector:
        assert check_transitions([collector.next()]) == 120


def test_rows_in_which_a_stubborn_env_resets_are_masked():
    with Collector(Stubborn(3), frames_per_batch=3 * 40, seed=SEED) as collector:
        batches = [collector.next() for _ in range(3)]
        stats = collector.stats()
    masks = [batch["collector", "mask"] for batch in batches]
    assert check_transitions(batches) == sum(mask.sum() for mask in masks) == stats["frames"]
    for batch, mask in zip(batches, masks, strict=True):
        after_an_end = batch["next", "done"][:, :-1, 0] & mask[:, :-1]
        assert torch.equal(~mask[:, 1:], after_an_end)
        assert (batch["next", "reward"][~mask] == 0).all()


def test_an_episode_that_a_stubborn_env_began_in_a_masked_row_is_none_if_cut_there():
    options = {"frames_per_batch": 3 * 40, "reset_at_each_iter": True}
    with Collector(Stubborn(3), seed=SEED, **options) as collector:
        batches = [collector.next() for _ in range(3)]
        stats = collector.stats()
    check_transitions(batches, reset_at_each_iter=True)
    frames = torch.cat([batch[batch["collector", "mask"]] for batch in batches])
    assert stats["episodes"] == frames["next", "done"].sum()
    assert stats["length"]["min"] >= 1


def test_a_reset_of_all_makes_up_for_the_row_of_a_reset():
    env = Stubborn(2, make=lambda: CountingEnv(longest=1))
    with Collector(env, frames_per_batch=2 * 5, seed=SEED) as collector:
        for _ in range(2):
            mask = collector.next()["collector", "mask"]
            assert mask.tolist() == [[True, False, True, False, True]] * 2
            collector.reset()


def test_the_random_frames_and_the_total_of_a_stubborn_env_are_frames():
    with Collector(
        Stubborn(2), lambda o: o[..., 2] % 2, frames_per_batch=60, total_frames=150, seed=SEED
    ) as collector:
        batches = list(collector)
    masked = sum((~batch["collector", "mask"]).sum() for batch in batches)
    assert 150 <= check_transitions(batches) < 152
    assert masked > 10


def test_a_stubborn_env_cannot_have_a_recurrent_policy():
    policy = RecurrentPolicy(
        lambda o, n: (o[..., 2] % 2, n + 1), torch.zeros((), dtype=torch.int64)
    )
    with pytest.raises(UsageError, match="a recurrent policy cannot be used with a vector env"):
        Collector(Stubborn(3), policy, frames_per_batch=30)


def test_a_stubborn_env_cannot_cut_trajectories_or_reset_one_by_one():
    with pytest.raises(UsageError, match="max_frames_per_traj needs envs that can be reset"):
        Collector(Stubborn(2), frames_per_batch=10, max_frames_per_traj=4)
    env = GymEnv(Stubborn(2))
    with pytest.raises(UsageError, match="cannot reset single envs"):
        env.reset(mask=torch.tensor([True, False]))


def test_a_third_party_env_that_resets_in_the_same_step_gives_its_last_observations():
    with Collector(Stubborn(3, AutoresetMode.SAME_STEP), frames_per_batch=51, seed=SEED) as c:
        batches = [c.next() for _ in range(3)]
    assert check_transitions(batches) == 153


def test_an_env_that_takes_one_seed_gets_one():
    def collect(seed):
        env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
        with Collector(env, frames_per_batch=300, seed=seed) as collector:
            return collector.next().clone()

    first, mask = collect(SEED), collect(SEED)["collector", "mask"]
    assert (first == collect(SEED)).all()
    assert not torch.equal(first["observation"], collect(SEED + 1)["observation"])
    assert torch.equal(~mask[:, 1:], first["next", "done"][:, :-1, 0] & mask[:, :-1])
    position = first["next", "observation"][mask][:, [0, 2]].abs()
    fallen = (position > torch.tensor([2.4, 12 * 2 * np.pi / 360])).any(-1)
    assert torch.equal(fallen, first["next", "terminated"][mask][:, 0])


def test_a_wrapper_that_cannot_reset_some_envs_gets_masked_rows():
    env = wrappers.NormalizeObservation(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3))
    with Collector(env, frames_per_batch=300, seed=SEED) as collector:
        batch = collector.next()
    mask = batch["collector", "mask"]
    assert torch.equal(~mask[:, 1:], batch["next", "done"][:, :-1, 0] & mask[:, :-1])


def test_observation_and_reward_wrappers_are_what_is_seen():
    env = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    doubled = wrappers.TransformObservation(env, lambda observation: observation * 2)
    halved = wrappers.TransformReward(doubled, lambda reward: reward / 2)
    with Collector(halved, frames_per_batch=40, seed=SEED) as collector:
        batch = collector.next()
    batch["observation"] //= 2
    batch["next", "observation"] //= 2
    batch["next", "reward"] *= 2
    check_transitions(batch)


NESTED = spaces.Dict(
    image=spaces.Box(0, 255, (2, 3), np.uint8),
    rest=spaces.Tuple([spaces.Discrete(5), spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float64))]),
)


@all_modes
@pytest.mark.parametrize("kind", [SyncVectorEnv, forked], ids=["sync", "async"])
def test_nested_spaces_keep_their_values_in_any_mode(kind, mode):
    def make():
        return CountingEnv(NESTED, NESTED)

    with Collector(
        kind([make] * 2, autoreset_mode=mode), frames_per_batch=60, seed=SEED
    ) as collector:
        check_replay([collector.next(), collector.next()], make, SEED)


class Telling(CountingEnv):
    """Tells numbers, lists and arrays in its infos; some of them only now and then."""

    def step(self, action):
        *rest, info = super().step(action)
        pair = [self.count, self.episode]
        info |= {"pair": np.array(pair), "listed": pair, "stamp": self.stamp}
        return *rest, info | ({"even": self.count} if self.count % 2 == 0 else {})

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        return observation, {"step": 0, "pair": np.zeros(2), "listed": [0, 0], "stamp": -1}


INFOS = ["step", "pair", "listed", "even", "missing", "stamp"]


@pytest.mark.filterwarnings("ignore:info_keys names")  # one of them never comes
@all_modes
@pytest.mark.parametrize("kind", [SyncVectorEnv, forked], ids=["sync", "async"])
def test_infos_are_those_of_the_step_in_any_mode(kind, mode):
    env = GymEnv(kind([Telling] * 3, autoreset_mode=mode), info_keys=INFOS)
    with Collector(env, frames_per_batch=120, seed=SEED) as collector:
        batch = collector.next()
    check_transitions(batch)
    stamp, episode, step = batch["next", "observation"].double().unbind(-1)
    info = batch["next", "info"]
    assert torch.equal(info["step"], step)
    assert torch.equal(info["stamp"], stamp)
    for name in ("pair", "listed"):
        assert torch.equal(info[name], torch.stack([step, episode], -1))
    even = step % 2 == 0
    assert torch.equal(info["even"][even], step[even])
    assert info["even"][~even].isnan().all()
    assert info["missing"].isnan().all()


def test_infos_take_the_form_of_their_spaces():
    keys = {"even": spaces.Discrete(9), "pair": spaces.Box(0, 99, (2,), np.int32)}
    env = GymEnv(SyncVectorEnv([Telling] * 2), info_keys=keys)
    with Collector(env, frames_per_batch=40, seed=SEED) as collector:
        batch = collector.next()
    step = batch["next", "observation"][..., 2]
    info = batch["next", "info"]
    assert torch.equal(info["even"], torch.where(step % 2 == 0, step, 0))
    assert info["pair"].dtype == torch.int32
    assert torch.equal(info["pair"][..., 0], step.int())


def test_an_info_of_another_form_is_an_error():
    env = GymEnv(
        SyncVectorEnv([Telling] * 2), info_keys={"pair": spaces.Box(0, 9, (3,), np.float32)}
    )
    with Collector(env, frames_per_batch=40, seed=SEED) as collector:
        with pytest.raises(EnvError, match=r"info\['pair'\] is a ndarray of shape \(2, 2\)"):
            collector.next()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda o, *rest: (o[:1], *rest), r"has shape \(1, 3\) and dtype int64.*declares \(2, 3\)"),
        (lambda o, *rest: (o / 2, *rest), r"dtype float64.*declares \(2, 3\) and int64"),
        (lambda o, *rest: (None, *rest), r"has shape \(\) and dtype object"),
        (lambda *answer: answer[:4], r"not enough values to unpack"),
        (lambda o, r, *rest: (o, r[:, None], *rest), r"could not broadcast"),
        (lambda *answer: None, r"cannot unpack"),
    ],
)
def test_a_vector_env_that_leaves_its_form_is_blamed(spoil, message):
    class Leaving(gym.vector.VectorWrapper):
        steps = 0

        def step(self, actions):
            self.steps += 1
            answer = super().step(actions)
            return answer if self.steps < 5 else spoil(*answer)

    env = Leaving(SyncVectorEnv([CountingEnv] * 2))
    with Collector(env, frames_per_batch=40, seed=SEED) as collector:
        with pytest.raises(EnvError, match=message) as caught:
            collector.next()
        assert (caught.value.step, caught.value.seed) == (4, SEED)
        assert check_transitions(collector.partial()) == 8


def test_a_vector_env_must_say_when_it_resets_and_what_was_last():
    env = Stubborn(2)
    env.metadata = {}
    with pytest.raises(UsageError, match="no 'autoreset_mode'"):
        as_group(env)

    class Forgetting(gym.vector.VectorWrapper):
        def step(self, actions):
            *answer, _ = super().step(actions)
            return *answer, {}

    env = Forgetting(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    with Collector(env, frames_per_batch=40, seed=SEED) as collector:
        with pytest.raises(EnvError, match="gives no 'final_obs'"):
            collector.next()


def test_an_env_that_ends_cannot_be_left_alone():
    with pytest.raises(UsageError, match="reset_when_done=False needs envs that can be stepped"):
        Collector(SyncVectorEnv([CountingEnv]), frames_per_batch=10, reset_when_done=False)


def test_the_counting_env_ends_where_it_was_planned():
    with Collector(SyncVectorEnv([CountingEnv] * 2), frames_per_batch=100, seed=SEED) as collector:
        batch = collector.next()
    for stamp, episode, step in batch["next", "observation"][
        batch["next", "done"][..., 0]
    ].tolist():
        assert step == episode_plan(stamp, episode, 9)[0]
