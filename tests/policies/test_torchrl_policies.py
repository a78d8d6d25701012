"""TorchRL's actors as policies, as its users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_kit import TORQUE, assert_equal, collect, make_collector, make_envs, net
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions as dist
from torch import nn
from torchrl.data import Bounded, Categorical
from torchrl.modules import (
    ActorValueOperator,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    SafeModule,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import ParallelEnv, SerialEnv
from swath.errors import PolicyError

PAIR = spaces.Dict({"push": spaces.Box(-np.inf, np.inf, (2,)), "gear": spaces.Discrete(3)})


def hidden() -> TensorDictModule:
    return TensorDictModule(net(), ["observation"], ["logits"])


def categorical_actor(**kwargs: Any) -> Any:
    return ProbabilisticActor(
        hidden(), ["logits"], distribution_class=dist.Categorical, return_log_prob=True, **kwargs
    )


def tanh_actor() -> Any:
    layers = nn.Sequential(net(), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )


def actor_and_value() -> Any:
    common = SafeModule(net(3, 4), ["observation"], ["hidden"])
    actor = ProbabilisticActor(
        SafeModule(net(4, 2), ["hidden"], ["logits"]),
        ["logits"],
        distribution_class=dist.Categorical,
        return_log_prob=True,
    )
    return ActorValueOperator(common, actor, ValueOperator(net(4, 1), ["hidden"]))


def composite_actor() -> Any:
    def split(observation: torch.Tensor) -> Any:
        return observation[..., :2], observation[..., :2].exp(), observation

    keys = [("params", "push", "loc"), ("params", "push", "scale"), ("params", "gear", "logits")]
    return ProbabilisticActor(
        TensorDictModule(split, ["observation"], keys),
        ["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"push": dist.Normal, "gear": dist.Categorical},
            "name_map": {"push": ("action", "push"), "gear": ("action", "gear")},
        },
        return_log_prob=True,
    )


def q_values() -> Any:
    return QValueActor(net(), in_keys=["observation"], action_space="categorical")


def greedy() -> Any:
    return TensorDictSequential(q_values(), EGreedyModule(Categorical(2), eps_init=0.5))


def safe_actor() -> Any:
    return SafeModule(
        net(3, 1),
        ["observation"],
        ["action"],
        spec=Bounded(-0.1, 0.1, (1,)),
        safe=True,
    )


CASES: dict[str, tuple[Callable[[], Any], Any, bool, set[Any]]] = {
    "categorical": (categorical_actor, None, True, {"logits", "action_log_prob"}),
    "tanh": (tanh_actor, TORQUE, True, {"loc", "scale", "action_log_prob"}),
    "actor and value": (
        actor_and_value,
        None,
        True,
        {"hidden", "logits", "action_log_prob", "state_value"},
    ),
    "composite": (
        composite_actor,
        PAIR,
        False,
        {
            ("params", "push", "loc"),
            ("params", "push", "scale"),
            ("params", "gear", "logits"),
            ("action", "push_log_prob"),
            ("action", "gear_log_prob"),
        },
    ),
    "q values": (q_values, None, False, {"action_value", "chosen_action_value"}),
    "greedy": (greedy, None, False, {"action_value", "chosen_action_value"}),
    "safe": (safe_actor, TORQUE, False, set()),
}
OWN = {"observation", "done", "terminated", "truncated", "action", ("action", "push")}
OWN |= {("action", "gear")}


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_an_actor_gives_the_same_bits_taken_apart_or_not(name, num_envs, monkeypatch):
    make, space, unwrapped, extras = CASES[name]
    with make_collector(make(), make_envs(num_envs, space)) as collector:
        assert collector._runner.policy.unwrapped is unwrapped
    data = collect(make(), make_envs(num_envs, space), batches=3)
    stored = {key for key in data.keys(True, True) if key[0] not in ("next", "collector")}
    assert stored - OWN == extras
    monkeypatch.setattr("swath.policies.tensordicts.unwrap", lambda module: None)
    assert_equal(data, collect(make(), make_envs(num_envs, space), batches=3))


def test_the_log_prob_of_a_frame_is_that_of_its_action():
    policy = tanh_actor()
    data = collect(policy, make_envs(3, TORQUE))
    with torch.no_grad():
        expected = policy.get_dist(data.select("observation")).log_prob(data["action"])
    torch.testing.assert_close(data["action_log_prob"], expected, atol=1e-4, rtol=1e-4)
    assert data["action_log_prob"].std() > 0


def test_epsilon_can_fall_between_batches():
    policy = greedy()
    with make_collector(policy, make_envs(2), frames_per_batch=80) as collector:
        first = collector.next().clone()
        policy[1].eps.fill_(0.0)
        second = collector.next()
    assert not torch.equal(first["action"], first["action_value"].argmax(-1))
    assert torch.equal(second["action"], second["action_value"].argmax(-1))


def test_exploration_modules_obey_the_exploration_type():
    data = collect(greedy(), make_envs(2), exploration_type="deterministic")
    assert torch.equal(data["action"], data["action_value"].argmax(-1))


def recurrent(kind: str, **kwargs: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "lstm":
            keys = ["rs_h", "rs_c"]
            cell: Any = LSTMModule(
                input_size=3,
                hidden_size=4,
                num_layers=2,
                in_keys=["observation", *keys],
                out_keys=["embedded", *(("next", key) for key in keys)],
            )
        else:
            keys = ["rs_h"]
            cell = GRUModule(
                input_size=3,
                hidden_size=4,
                in_keys=["observation", "rs_h"],
                out_keys=["embedded", ("next", "rs_h")],
            )
    head = TensorDictModule(net(4), ["embedded"], ["logits"])
    return TensorDictSequential(
        cell, head, TensorDictModule(lambda x: x.argmax(-1), ["logits"], ["action"])
    )


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_training_replays_a_recurrent_policy_over_whole_batches(kind, num_envs):
    policy = recurrent(kind)
    data = collect(policy, make_envs(num_envs, longest=5), batches=3)
    assert data["is_init"].sum() > 3 * (num_envs or 1)
    # TorchRL's own way: whole sequences in one call, from the state that is stored at their start.
    with torch.no_grad(), set_recurrent_mode(True):
        replayed = policy(
            data.select("observation", "is_init", "rs_h", *["rs_c"] * (kind == "lstm"))
        )
    torch.testing.assert_close(replayed["logits"], data["logits"])
    assert torch.equal(replayed["action"], data["action"])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_state_that_came_out_goes_in_until_an_episode_ends(kind):
    data = collect(recurrent(kind), make_envs(3, longest=5), batches=3)
    went_in, came_out = data["rs_h"][:, 1:], data["next", "rs_h"][:, :-1]
    starts = data["is_init"][:, 1:, 0]
    assert starts.any()
    assert torch.equal(starts, data["next", "done"][:, :-1, 0])
    assert not went_in[starts].any()
    assert torch.equal(went_in[~starts], came_out[~starts])
    assert came_out.all()


PRIMED = spaces.Dict(
    {
        "observation": spaces.Box(-1, 1, (3,)),
        "is_init": spaces.Box(0, 1, (1,), bool),
        "rs_h": spaces.Box(0, 9, (1, 4)),
    }
)


class Primed(gym.Env):
    """Says how a state starts: as the number of the episode. What it gives after steps is noise."""

    observation_space, action_space = PRIMED, spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.step_number = self.episode + 1, 0
        return self._seen(np.full((1, 4), self.episode % 9), True), {}

    def step(self, action: Any) -> Any:
        self.step_number += 1
        ended = self.step_number == 4
        return self._seen(np.full((1, 4), 9.0), False), 0.0, ended, False, {}

    def _seen(self, state: np.ndarray, starts: bool) -> Any:
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        is_init = np.array([starts])
        return {"observation": observation, "is_init": is_init, "rs_h": state.astype(np.float32)}


def gated(chooses: Any) -> Any:
    """A cell that adds to its state, so that all of it can be seen."""

    def step(observation: torch.Tensor, state: torch.Tensor) -> Any:
        return chooses(observation), state + 0.5

    return TensorDictModule(step, ["observation", "rs_h"], ["action", ("next", "rs_h")])


def a_function(td: TensorDict) -> TensorDict:
    td["next", "rs_h"] = td["rs_h"] + 0.5
    return td.set("action", td["observation"].argmax(-1) % 2)


@pytest.mark.parametrize("where", ["here", "processes"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", [gated(lambda x: x.argmax(-1) % 2), a_function])
def test_an_env_may_say_how_a_state_starts_and_the_policy_how_it_goes_on(policy, compact, where):
    envs = SerialEnv(2, Primed) if where == "here" else ParallelEnv(2, Primed)
    data = collect(policy, envs, batches=3, compact_obs=compact)
    state = data["rs_h"][..., 0, 0]
    steps = torch.arange(21)
    first = 1 if where == "here" else None
    assert torch.equal(state - state[:, :1], ((steps // 4) % 9 + 0.5 * (steps % 4)).expand(2, -1))
    assert first is None or state[0, 0] == 1
    assert torch.equal(data["is_init"][0, :, 0], steps % 4 == 0)
    if not compact:
        assert torch.equal(data["next", "rs_h"], data["rs_h"] + 0.5)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_torchrls_random_policy_draws_from_its_spec(num_envs):
    shape = (1,) if num_envs is None else (num_envs, 1)
    data = collect(
        RandomPolicy(Bounded(0.5, 1.0, shape)), make_envs(num_envs, TORQUE), frames_per_batch=90
    )
    assert 0.5 <= data["action"].min() < 0.6 < 0.9 < data["action"].max() <= 1.0


def test_torchrls_random_policy_without_spec_takes_the_action_space():
    assert_equal(collect(RandomPolicy(), make_envs(2)), collect(None, make_envs(2)))


def test_a_spec_for_another_number_of_envs_is_an_error_of_the_policy():
    with pytest.raises(PolicyError, match=r"the policy raised .*called with \{'observation': \(3"):
        make_collector(RandomPolicy(Bounded(0.0, 1.0, (2, 1))), make_envs(3, TORQUE))


def test_a_compatible_object_that_is_no_module_is_called_with_a_tensordict():
    class Duck:
        in_keys = ("observation",)
        out_keys = ("action",)

        def __call__(self, data: TensorDict) -> TensorDict:
            return data.set("action", data["observation"].argmax(-1))

    data = collect(Duck(), make_envs(3, spaces.Discrete(3)))
    assert torch.equal(data["action"], data["observation"].argmax(-1))


@pytest.mark.parametrize("workers", [False, True])
def test_an_index_stands_for_the_one_hot_vector_that_torchrls_env_wants(workers):
    from torchrl.envs import GymEnv

    def make() -> Any:
        return GymEnv("CartPole-v1")

    policy = TensorDictModule(lambda x: (x[..., 2] > 0).long(), ["observation"], ["action"])
    options: Any = {"frames_per_batch": 40, "seed": 0}
    kind = MultiSyncCollector if workers else Collector
    with kind([make] if workers else make(), policy, **options) as collector:
        data = collector.next()
    index = (data["observation"][..., 2] > 0).long()
    assert torch.equal(data["action"], nn.functional.one_hot(index, 2).to(data["action"].dtype))
    assert 0 < index.sum() < 40
