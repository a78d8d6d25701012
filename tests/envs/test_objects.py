"""Envs by themselves: values equal to stepping gymnasium by hand, one env or many."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from swath.envs import Env, GymEnv, SerialEnv, TorchCartPole, as_group
from swath.errors import ClosedError, EnvError, PolicyError, UsageError
from swath.seeding import env_seed
from swath.testing import CountingEnv, CrashingEnv, check_replay, check_transitions

SEED = 17
R = spaces.Box(-np.inf, np.inf, (), np.float64)
SAME_STEP = AutoresetMode.SAME_STEP


@pytest.fixture
def opened():
    """Make envs that are closed at the end."""
    made = []

    def make(env):
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()


def test_one_env_steps_as_gymnasium_does(opened):
    env = opened(GymEnv("Pendulum-v1"))
    by_hand = gym.make("Pendulum-v1", max_episode_steps=200)
    td = env.reset(seed=SEED)
    observation, _ = by_hand.reset(seed=env_seed(SEED, 0))
    assert td.batch_size == ()
    assert np.array_equal(td["observation"], observation)
    assert set(td.keys()) == {"observation", "done", "terminated", "truncated"}
    for _ in range(210):
        td = env.rand_step(td)
        assert td["action"].shape == (1,)
        observation, reward, terminated, truncated, _ = by_hand.step(td["action"].numpy())
        after = td["next"]
        assert np.array_equal(after["observation"], observation)
        assert after["reward"].item() == np.float32(reward)
        assert after["reward"].shape == after["done"].shape == (1,)
        flags = [after[name].item() for name in ("terminated", "truncated", "done")]
        assert flags == [terminated, truncated, terminated or truncated]
        td = after.exclude("reward")
        if truncated:
            td = env.reset()
            observation, _ = by_hand.reset()
            assert np.array_equal(td["observation"], observation)


def test_many_envs_step_and_reset_as_gymnasium_does(opened):
    env = opened(SerialEnv(3, lambda: CountingEnv(longest=4)))
    td = env.reset(seed=SEED)
    rows, ends = [], []
    for _ in range(30):
        td = env.rand_step(td)
        rows.append(td.clone())
        done = td["next", "done"][:, 0]
        ends.append(done)
        td = env.reset(mask=done)
        assert not td["done"].any()
        assert torch.equal(td["observation"][~done], rows[-1]["next", "observation"][~done])
        assert (td["observation"][done, 2] == 0).all()
    check_replay(torch.stack(rows, 1), lambda: CountingEnv(longest=4), SEED)
    assert torch.stack(ends).sum() > 10


def test_a_partial_reset_leaves_the_flags_of_the_others(opened):
    env = opened(SerialEnv(3, lambda: CountingEnv(longest=1)))
    env.rand_step(env.reset(seed=SEED))
    td = env.reset(mask=torch.tensor([True, False, False]))
    assert td["done"][:, 0].tolist() == [False, True, True]
    assert torch.equal(td["done"], td["terminated"] | td["truncated"])
    nothing = env.reset(mask=torch.zeros(3, 1, dtype=torch.bool))
    assert (nothing == td).all()


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_a_vector_env_by_itself_resets_only_when_asked(opened, mode):
    env = opened(GymEnv(SyncVectorEnv([CountingEnv] * 3, autoreset_mode=mode)))
    td, rows = env.reset(seed=SEED), []
    for _ in range(30):
        rows.append(env.rand_step(td).clone())
        td = env.reset(mask=rows[-1]["next", "done"])
    check_replay(torch.stack(rows, 1), CountingEnv, SEED)
    assert (env.reset(mask=torch.zeros(3, dtype=torch.bool)) == td).all()


def test_a_vector_env_that_was_reset_forgets_what_it_had_begun_by_itself(opened):
    vector = SyncVectorEnv(
        [lambda: CountingEnv(longest=1)] * 2, autoreset_mode=AutoresetMode.SAME_STEP
    )
    env = opened(GymEnv(vector))
    env.rand_step(env.reset(seed=SEED))
    everywhere = env.reset()["observation"][:, 1]
    first = env.reset(mask=torch.tensor([True, False]))["observation"][:, 1]
    assert (first - everywhere).tolist() == [1, 0]


def test_what_step_returns_never_changes_and_its_input_gains_next_alone(opened):
    env = opened(SerialEnv(2, CountingEnv))
    td = env.reset(seed=SEED)
    before = td.clone()
    td["action"] = torch.tensor([0, 1])
    out = env.step(td)
    assert out is td
    assert (td.exclude("next", "action") == before).all()
    kept = out.clone()
    env.step(TensorDict({"action": torch.tensor([1, 1])}, [2]))
    assert (out == kept).all()


ACTIONS = [
    ({}, UsageError, r"step\(\) needs 'action' in its TensorDict; it has \[\]"),
    (
        {"action": torch.zeros(2, 1, dtype=torch.int64)},
        UsageError,
        r"shape \(2, 1\) .* needs \(2,\)",
    ),
    ({"action": torch.zeros(2)}, UsageError, r"dtype float32; .* needs \(2,\) and int64"),
    ({"action": torch.tensor([0, 5])}, PolicyError, r"outside the action space Discrete\(2\)"),
]


@pytest.mark.parametrize(("content", "error", "message"), ACTIONS)
def test_an_action_that_does_not_fit_is_refused(opened, content, error, message):
    env = opened(SerialEnv(2, CountingEnv))
    env.reset()
    with pytest.raises(error, match=message):
        env.step(TensorDict(content, [2]))


@pytest.mark.parametrize("make", [lambda: GymEnv(CountingEnv()), lambda: SerialEnv(3, CountingEnv)])
def test_a_rollout_stops_when_the_first_episode_ends(opened, make):
    env = opened(make())
    for seed in range(5):
        batch = env.rollout(100, seed=seed)
        check_replay(batch, CountingEnv, seed)
        done = batch["next", "done"].reshape(env.num_envs, -1)
        assert done[:, -1].any()
        assert not done[:, :-1].any()
        assert env.rollout(1, seed=seed).batch_size == (*env.batch_size, 1)


@pytest.mark.parametrize("make", [lambda: GymEnv(CountingEnv()), lambda: SerialEnv(3, CountingEnv)])
def test_a_rollout_goes_on_over_ends_on_demand(opened, make):
    env = opened(make())
    batch = env.rollout(50, break_when_any_done=False, seed=SEED)
    assert batch.batch_size == (*env.batch_size, 50)
    assert check_transitions(batch) == 50 * env.num_envs


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_rollout_takes_a_policy(opened, seed):
    env = opened(SerialEnv(2, CountingEnv))

    def policy(observation):
        return {"action": observation[..., 2] % 2, "value": observation[..., 1].float()}

    batch = env.rollout(40, policy, break_when_any_done=False, seed=seed)
    assert torch.equal(batch["action"], batch["observation"][..., 2] % 2)
    assert torch.equal(batch["value"], batch["observation"][..., 1].float())
    check_transitions(batch)


def test_random_actions_go_on_from_rollout_to_rollout_and_start_again_with_a_seed(opened):
    env = opened(GymEnv(CountingEnv(longest=1)))
    env.set_seed(SEED)
    singles = [env.rand_step(env.reset())["action"].item() for _ in range(5)]
    rolled = env.rollout(20, break_when_any_done=False)["action"].tolist()
    env.set_seed(SEED)
    assert env.rollout(25, break_when_any_done=False)["action"].tolist() == singles + rolled
    assert env.rollout(25, break_when_any_done=False, seed=SEED)["action"].tolist() == (
        singles + rolled
    )


def test_a_seed_counts_from_the_next_reset(opened):
    env = opened(SerialEnv(2, CountingEnv))
    env.set_seed(SEED)
    stamps = env.reset()["observation"][:, 0].tolist()
    assert stamps == [env_seed(SEED, 0), env_seed(SEED, 1)]
    assert env.reset()["observation"][:, 1].tolist() == [1, 1]
    assert env.reset(seed=SEED)["observation"][:, 1].tolist() == [0, 0]


def test_a_rollout_of_no_steps_is_refused(opened):
    env = opened(GymEnv("CartPole-v1"))
    with pytest.raises(UsageError, match="max_steps must be at least 1; got 0"):
        env.rollout(0)


@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.reset(),
        lambda env: env.rand_step(),
        lambda env: env.step(TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2])),
        lambda env: env.rollout(3),
        lambda env: env.set_seed(1),
    ],
)
def test_a_closed_env_says_so(use):
    env = SerialEnv(2, CountingEnv)
    env.reset()
    env.close()
    env.close()
    with pytest.raises(ClosedError, match="this env is closed"):
        use(env)


def test_an_exception_in_an_env_by_itself_keeps_its_cause(opened):
    env = opened(SerialEnv(2, [CountingEnv, lambda: CrashingEnv(at_step=0, at_reset=1)]))
    td = env.reset()
    with pytest.raises(EnvError, match=r"raised RuntimeError: crashed.*\[env 1\]") as caught:
        env.rand_step(td)
    assert caught.value.env == 1
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EnvError, match="crashed"):
        env.reset()


def test_an_env_that_went_on_by_itself_is_reset_when_asked(opened):
    env = opened(GymEnv(SyncVectorEnv([lambda: CountingEnv(longest=3)], autoreset_mode=SAME_STEP)))
    td = env.reset(seed=SEED)
    ended = False
    while not ended or td["next", "done"].any():  # a step after an end that ends no episode
        ended = ended or bool(td.get(("next", "done"), torch.tensor(False)).any())
        td = env.rand_step(td)
    episode, step = td["next", "observation"][0, 1:].tolist()
    assert episode > 0
    assert step > 0
    assert env.reset(torch.tensor([True]))["observation"][0, 1:].tolist() == [episode + 1, 0]


@pytest.mark.parametrize("make", [lambda env: env(), lambda env: SyncVectorEnv([env])])
def test_a_first_reset_that_fails_while_infos_are_learnt_keeps_its_cause(make):
    env = make(lambda: CrashingEnv(at_reset=0))
    with pytest.raises(EnvError, match="raised RuntimeError: crashed") as caught:
        GymEnv(env, info_keys=["step"])
    assert isinstance(caught.value.__cause__, RuntimeError)
    env.close()


INFOS = {"step": spaces.Box(0, 99, (), np.int32), "none": spaces.Discrete(5)}


@pytest.mark.filterwarnings("ignore:info_keys names")  # one of them never comes
@pytest.mark.parametrize("keys", [["step", "none"], INFOS], ids=["names", "spaces"])
@pytest.mark.parametrize(
    "make",
    [
        lambda keys: GymEnv(CountingEnv(), info_keys=keys),
        lambda keys: SerialEnv(2, CountingEnv, info_keys=keys),
        lambda keys: SerialEnv(2, [lambda: GymEnv(CountingEnv(), info_keys=keys)] * 2),
        lambda keys: GymEnv(SyncVectorEnv([CountingEnv] * 2), info_keys=keys),
        lambda keys: Env(as_group([CountingEnv, SyncVectorEnv([CountingEnv])], None, keys)),
    ],
    ids=["one", "serial", "serial of GymEnvs", "vector", "joined"],
)
def test_infos_are_stored_below_next(opened, make, keys):
    env = opened(make(keys))
    batch = env.rollout(30, break_when_any_done=False, seed=SEED)
    check_replay(batch, CountingEnv, SEED)
    info = batch["next", "info"]
    step = batch["next", "observation"][..., 2]
    if keys is INFOS:
        assert torch.equal(info["step"], step.int())
        assert (info["none"] == 0).all()
    else:
        assert torch.equal(info["step"], step.double())
        assert info["none"].isnan().all()
    td = env.rand_step(env.reset())
    assert td["next", "info", "step"].shape == env.batch_size


def _recorded():
    return gym.wrappers.RecordEpisodeStatistics(CountingEnv())


@pytest.mark.parametrize("keys", [[("episode", "r"), "step"], {("episode", "r"): R}])
@pytest.mark.parametrize(
    "make",
    [
        lambda keys: GymEnv(_recorded(), info_keys=keys),
        lambda keys: SerialEnv(2, _recorded, info_keys=keys),
        lambda keys: GymEnv(SyncVectorEnv([_recorded] * 2), info_keys=keys),
        lambda keys: GymEnv(
            SyncVectorEnv([_recorded] * 2, autoreset_mode=SAME_STEP), info_keys=keys
        ),
    ],
    ids=["one", "serial", "vector", "same step"],
)
def test_a_tuple_of_names_leads_into_infos_that_hold_dicts(opened, make, keys):
    batch = opened(make(keys)).rollout(60, break_when_any_done=False, seed=SEED)
    ends = 0
    for row in batch if batch.ndim > 1 else [batch]:
        total = 0.0
        for frame in row:
            total += frame["next", "reward"].item()
            found = frame["next", "info", "episode", "r"].item()
            if frame["next", "done"]:
                assert found == pytest.approx(total)
                ends, total = ends + 1, 0.0
            else:
                assert np.isnan(found)
    assert ends


def test_asking_for_infos_costs_no_episode(opened):
    env = opened(SerialEnv(2, CountingEnv, info_keys=["step"]))
    assert env.reset()["observation"][:, 1].tolist() == [0, 0]
    assert env.reset()["observation"][:, 1].tolist() == [1, 1]


def test_infos_are_for_gymnasium_envs():
    for source in (TorchCartPole(2), GymEnv("CartPole-v1")):
        with pytest.raises(UsageError, match="info_keys are only for gymnasium envs"):
            SerialEnv(2, source, info_keys=["x"])


def test_an_env_tells_what_it_is(opened):
    env = opened(SerialEnv(2, CountingEnv))
    assert repr(env).startswith("SerialEnv(num_envs=2, observation_space=Box(")
    assert env.batch_size == (2,)
    assert env.action_space == spaces.Discrete(2)
