"""Random frames at the start: exactly so many, whole, marked, and rated as what they are."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from policy_kit import BOX, TORQUE, assert_equal, collect, discrete, make_collector, make_envs
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from torch import distributions as dist

from swath.envs import SerialEnv
from swath.errors import EnvError
from swath.policies import RecurrentPolicy
from swath.testing import CountingEnv, CrashingEnv

SEVEN = spaces.Discrete(7)


def valued(x: torch.Tensor) -> Any:
    return {"action": discrete(x) + 5, "value": x.sum(-1), "log_prob": x[..., 0]}


def in_order(data: Any) -> Any:
    """Frames in order of time and then of env, `[frames]`."""
    return data if data.ndim == 1 else data.transpose(0, 1).reshape(-1)


@pytest.mark.parametrize("num_envs", [None, 1, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 20, 24, 37, 1000])
def test_exactly_the_first_frames_are_random(count, num_envs):
    n = num_envs or 1
    envs = make_envs(num_envs, SEVEN)
    options = {"frames_per_batch": 5 * n, "batches": 10, "init_random_frames": count}
    frames = in_order(collect(valued, envs, **options))
    random = frames["collector", "random"]
    count = min(count, 50 * n)
    assert random[:count].all()
    assert not random[count:].any()
    own = discrete(frames["observation"]) + 5
    assert torch.equal(frames["action"][count:], own[count:])
    if count >= 20:
        assert (frames["action"][:count] < 5).float().mean() > 0.4


def test_batches_of_any_size_get_the_same_random_frames():
    runs = []
    for frames, batches in [(3, 12), (12, 3), (36, 1)]:
        options = {"frames_per_batch": frames, "batches": batches, "init_random_frames": 17}
        runs.append(collect(valued, make_envs(3, SEVEN), **options))
    assert_equal(runs[0], runs[1])
    assert_equal(runs[0], runs[2])


def test_random_frames_have_all_keys_and_what_the_policy_says_of_them():
    frames = in_order(collect(valued, make_envs(3, SEVEN), init_random_frames=11))
    assert torch.equal(frames["value"], frames["observation"].sum(-1))
    assert torch.allclose(frames["log_prob"][:11], torch.tensor(-math.log(7)))
    assert torch.equal(frames["log_prob"][11:], frames["observation"][11:, 0])


def test_a_policy_without_extras_is_not_asked_for_random_frames():
    calls = []

    def policy(x):
        calls.append(1)
        return discrete(x)

    with make_collector(policy, make_envs(2), init_random_frames=13) as collector:
        calls.clear()
        collector.next()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(5), -math.log(5)),
        (spaces.MultiDiscrete([2, 3]), -math.log(6)),
        (spaces.MultiBinary(4), -4 * math.log(2)),
        (spaces.Box(-2, 3, (2,)), -2 * math.log(5)),
        (spaces.Box(0, 9, (1,), np.int64), -math.log(10)),
        (spaces.Dict({"a": spaces.Discrete(3), "b": TORQUE}), -math.log(3) - math.log(4)),
        (spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]), -2 * math.log(3)),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_log_prob_of_a_random_frame_is_that_of_the_draw(space, expected, shape):
    space.seed(0)
    action = space.sample()

    def policy(x):
        return {"action": action, "policy_log_prob": torch.zeros(shape)}

    data = collect(policy, make_envs(None, space), init_random_frames=9)
    assert data["policy_log_prob"].shape == (14, *shape)
    assert torch.allclose(data["policy_log_prob"][:9], torch.tensor(expected))
    assert not data["policy_log_prob"][9:].any()


def test_log_probs_of_each_number_of_an_action_stay_so():
    space = spaces.Box(np.array([0.0, 0.0]), np.array([1.0, 8.0]), dtype=np.float64)
    policy = ProbSeq(
        Mod(
            lambda x: (x[..., :2].double(), x[..., :2].double().exp()),
            ["observation"],
            ["loc", "scale"],
        ),
        Prob(["loc", "scale"], ["action"], distribution_class=dist.Normal, return_log_prob=True),
    )
    wide = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    data = collect(policy, make_envs(3, wide), init_random_frames=21, batches=1)
    expected = dist.Normal(0, 1).log_prob(data["action"])
    assert torch.allclose(data["action_log_prob"], expected)
    narrow = {"action": torch.zeros(2).double(), "log_prob": torch.zeros(2)}
    data = collect(lambda x: narrow, make_envs(None, space), init_random_frames=7, batches=1)
    assert torch.allclose(data["log_prob"], torch.tensor([0.0, -math.log(8)]))


def test_unbounded_draws_are_rated_by_their_own_density():
    space = spaces.Box(np.array([-np.inf, 1.0]), np.array([np.inf, np.inf]), dtype=np.float64)

    def policy(x):
        return {"action": torch.ones(2).double(), "log_prob": torch.zeros(()).double()}

    data = collect(policy, make_envs(None, space), init_random_frames=7, batches=1)
    normal, tail = data["action"].unbind(-1)
    assert torch.allclose(data["log_prob"], dist.Normal(0, 1).log_prob(normal) - (tail - 1))


def test_parts_of_an_action_have_log_probs_of_their_own():
    space = spaces.Dict({"a": spaces.Discrete(3), "b": TORQUE})

    module = Mod(
        lambda x: (torch.tensor(0), torch.zeros(1), torch.zeros(()), torch.zeros(1)),
        ["observation"],
        [("action", "a"), ("action", "b"), ("action", "a_log_prob"), ("action", "b_log_prob")],
    )
    data = collect(module, make_envs(None, space), init_random_frames=14)
    assert torch.allclose(data["action", "a_log_prob"], torch.tensor(-math.log(3)))
    assert torch.allclose(data["action", "b_log_prob"], torch.tensor(-math.log(4)))


def test_a_log_prob_in_an_unknown_form_is_not_made_up():
    def policy(x):
        return {"action": torch.tensor(1), "log_prob": torch.zeros(5)}

    data = collect(policy, init_random_frames=3)
    assert data["log_prob"][:3].isnan().all()
    assert not data["log_prob"][3:].any()


def test_the_state_of_a_recurrent_policy_moves_on_through_random_frames():
    policy = RecurrentPolicy(lambda x, n: (discrete(x) + 5, n + 1), torch.zeros(()))
    data = collect(policy, make_envs(3, SEVEN), init_random_frames=20, batches=3)
    ids = data["collector", "traj_ids"]
    same = ids[:, 1:] == ids[:, :-1]
    assert torch.equal(data["policy_state"][:, 1:][same], data["policy_state"][:, :-1][same] + 1)
    assert not data["policy_state"][:, 1:][~same].any()
    random = in_order(data)["collector", "random"]
    assert random[:20].all()
    assert not random[20:].any()


def test_a_resume_continues_with_the_random_frames_that_are_left():
    def make() -> Any:
        return make_collector(valued, make_envs(3, SEVEN), init_random_frames=29)

    with make() as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next().clone() for _ in range(2)]
    assert expected[0]["collector", "random"].any()
    with make() as collector:
        collector.load_state_dict(state)
        for batch in expected:
            assert_equal(collector.next(), batch)


def test_frames_of_envs_that_have_ended_are_not_counted():
    options = {"reset_when_done": False, "init_random_frames": 12, "frames_per_batch": 30}
    data = collect(valued, make_envs(3, SEVEN, longest=12), batches=1, **options)
    frames = in_order(data)
    real, random = frames["collector", "mask"], frames["collector", "random"]
    assert not real[:12].all(), "an env should end among the first frames"
    assert not random[~real].any()
    assert random[real][:12].all()
    assert not random[real][12:].any()


def test_frames_that_a_failure_cut_off_are_not_counted():
    def make(at_step: int | None = None) -> Any:
        return lambda: CrashingEnv(at_step=at_step, action_space=SEVEN, observation_space=BOX)

    envs = SerialEnv(3, [make(), make(4), make()])
    with make_collector(valued, envs, init_random_frames=30) as collector:
        with pytest.raises(EnvError, match="crashed as asked"):
            collector.next()
        broken = in_order(collector.partial())
        whole = in_order(torch.cat([collector.next() for _ in range(2)], 1))
    real = broken["collector", "mask"]
    assert real.sum() == 13
    assert torch.equal(broken["collector", "random"], real)
    assert whole["collector", "random"].tolist() == [True] * 17 + [False] * 25


class Stubborn(gym.vector.VectorEnv):
    """Resets in the next step, in a row that is no frame."""

    def __init__(self) -> None:
        mode = AutoresetMode.NEXT_STEP
        make = [lambda: CountingEnv(SEVEN, BOX, longest=3)] * 3
        self.inner = gym.vector.SyncVectorEnv(make, autoreset_mode=mode)
        self.metadata, self.num_envs = {"autoreset_mode": mode}, 3
        self.single_observation_space, self.observation_space = BOX, self.inner.observation_space
        self.single_action_space, self.action_space = SEVEN, self.inner.action_space
        self.reset, self.step = self.inner.reset, self.inner.step


@pytest.mark.parametrize("count", [*range(4, 16), 30])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_rows_in_which_an_env_resets_are_not_counted(count, steps):
    options = {"frames_per_batch": 3 * steps, "batches": 60 // steps, "init_random_frames": count}
    frames = in_order(collect(valued, Stubborn(), **options))
    real, random = frames["collector", "mask"], frames["collector", "random"]
    assert not real[:30].all()
    assert random[real].tolist() == [True] * count + [False] * (int(real.sum()) - count)
    assert not random[~real].any()


def test_all_frames_of_a_random_policy_are_random():
    data = collect(None, make_envs(3), init_random_frames=4, batches=3)
    assert data["collector", "random"].all()


def test_without_random_frames_there_is_no_such_key():
    assert ("collector", "random") not in collect(valued, make_envs(3, SEVEN)).keys(True)
