"""Vector envs with their own engines: EnvPool and ale_py."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium.wrappers import vector as wrappers

from swath.collectors import Collector
from swath.envs import GymEnv, as_group
from swath.errors import UsageError
from swath.seeding import env_seed

ENVPOOL_WARNS = "ignore:.*Box (low|high)'s precision lowered:UserWarning"
N, T = 4, 60


@pytest.fixture
def make_pool():
    envpool = pytest.importorskip("envpool")

    def make(**kwargs):
        return envpool.make(
            "CartPole-v1", env_type="gymnasium", **{"num_envs": N, "seed": 3, **kwargs}
        )

    return make


def collect(env, seed=None, batches=3, frames=N * T, **options):
    """Collect a few batches, laid end to end: `[N, batches * T]`."""
    with Collector(env, frames_per_batch=frames, seed=seed, **options) as collector:
        return torch.cat([collector.next() for _ in range(batches)], 1)


def check_cart_pole(data):
    """Check flags and observations by what is known of the game."""
    observation, following = data["observation"], data["next", "observation"]
    limits = torch.tensor([2.4, 12 * 2 * np.pi / 360])
    fallen = (following[..., [0, 2]].abs() > limits).any(-1)
    assert torch.equal(data["next", "terminated"][..., 0], fallen)
    assert not (observation[..., [0, 2]].abs() > limits).any()
    # A step moves the cart by its speed: what follows is no observation of another episode.
    moved = observation[..., 0] + 0.02 * observation[..., 1]
    torch.testing.assert_close(following[..., 0], moved, atol=1e-5, rtol=0)
    ended = data["next", "done"][:, :-1, 0]
    assert ended.sum() > N
    assert torch.equal(observation[:, 1:][~ended], following[:, :-1][~ended])
    assert (observation[:, 1:][ended].abs() <= 0.05).all()
    ids = data["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], ended)
    assert (data["next", "reward"] == 1).all()


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
@pytest.mark.parametrize("wrap", [lambda env: env, wrappers.RecordEpisodeStatistics])
def test_envpool_delivers_whole_episodes_and_no_row_of_a_reset(make_pool, wrap):
    data = collect(wrap(make_pool()))
    assert data.batch_size == (N, 3 * T)
    assert ("collector", "mask") not in data.keys(True)
    check_cart_pole(data)


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_envpool_tells_truncation_from_termination(make_pool):
    data = collect(make_pool(max_episode_steps=5))
    check_cart_pole(data)
    assert data["next", "truncated"].sum() > N
    cut = collect(make_pool(), max_frames_per_traj=5)
    check_cart_pole(cut)
    assert torch.equal(data["next", "truncated"], cut["next", "truncated"])


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_envpool_stands_beside_gymnasium_envs(make_pool):
    data = collect([make_pool(num_envs=2), "CartPole-v1", "CartPole-v1"])
    check_cart_pole(data)


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_a_seed_does_not_reach_envpool_and_that_is_said(make_pool):
    with pytest.warns(UserWarning, match="EnvPool's envs are seeded when they are made"):
        first = collect(make_pool(), seed=7)
    with pytest.warns(UserWarning, match="Pass it to envpool.make"):
        second = collect(make_pool(), seed=7)
    assert torch.equal(first["observation"], second["observation"])
    assert torch.equal(first["action"], second["action"])


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_infos_of_envpool_are_stored(make_pool):
    env = GymEnv(make_pool(), info_keys=["elapsed_step", "env_id"])
    data = collect(env)
    check_cart_pole(data)
    info = data["next", "info"]
    assert torch.equal(info["env_id"], torch.arange(N).double()[:, None].expand(N, 3 * T))
    ended = data["next", "done"][:, :-1, 0]
    counted = torch.where(ended, 0, info["elapsed_step"][:, :-1]) + 1
    assert torch.equal(info["elapsed_step"][:, 1:], counted)
    with pytest.raises(UsageError, match=r"info\['players'\] is a dict"):
        GymEnv(make_pool(), info_keys=["players"])


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_a_pool_that_steps_some_envs_at_a_time_is_refused(make_pool):
    with pytest.raises(UsageError, match="steps 2 of its 4 envs at a time"):
        as_group(make_pool(batch_size=2))


@pytest.mark.filterwarnings(ENVPOOL_WARNS)
def test_envpool_cannot_be_pickled_and_that_is_said(make_pool):
    with Collector(make_pool(), frames_per_batch=N * T) as collector:
        collector.next()
        with pytest.warns(UserWarning, match="cannot be pickled.*starts new episodes"):
            state = collector.state_dict()
        with pytest.warns(UserWarning, match="has no envs"):
            collector.load_state_dict(state)
        start = collector.next()["observation"][:, 0]
    assert (start.abs() <= 0.05).all()


@pytest.fixture
def make_atari():
    pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    def make(mode="NextStep", **kwargs):
        sizes = {"img_height": 12, "img_width": 12, "stack_num": 2, "noop_max": 4}
        return AtariVectorEnv(
            "pong",
            **{"num_envs": 2, "max_num_frames_per_episode": 40, "autoreset_mode": mode},
            **sizes,
            **kwargs,
        )

    return make


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_atari_envs_deliver_what_stepping_them_by_hand_gives(make_atari, mode):
    env = GymEnv(make_atari(mode), info_keys=["episode_frame_number"])
    data = collect(env, seed=1, frames=50, batches=2)
    assert data.batch_size == (2, 50)
    assert ("collector", "mask") not in data.keys(True)
    assert data["next", "truncated"].sum() >= 6
    assert torch.equal(data["next", "done"], data["next", "truncated"])
    # In the mode that resets at once, ale_py keeps the last infos of an episode to itself.
    number, done = data["next", "info", "episode_frame_number"], data["next", "done"][..., 0]
    assert torch.equal(number.isnan(), done & (mode == "SameStep"))
    counted = ~done[:, :-1] & ~number[:, 1:].isnan()
    assert torch.equal(number[:, 1:][counted], number[:, :-1][counted] + 4)

    by_hand = make_atari("SameStep")
    seeds = np.array([env_seed(1, index) % 2**31 for index in range(2)])
    observation, _ = by_hand.reset(seed=seeds)
    for t in range(50):
        assert np.array_equal(data["observation"][:, t], observation)
        following, *_, infos = by_hand.step(data["action"][:, t].numpy())
        observation, done = following, data["next", "done"][:, t].numpy()
        if done.any():
            following = np.where(done[..., None, None], infos["final_obs"], following)
        assert np.array_equal(data["next", "observation"][:, t], following)
    by_hand.close()


def test_another_seed_gives_other_atari_games(make_atari):
    first, other = (collect(make_atari(), seed=seed, frames=50, batches=1) for seed in (1, 2))
    assert not torch.equal(first["observation"], other["observation"])


def test_atari_envs_that_step_some_at_a_time_are_refused(make_atari):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = make_atari(batch_size=1)
    with pytest.raises(UsageError, match="steps 1 of its 2 envs at a time"):
        as_group(env)
