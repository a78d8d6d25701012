"""What TorchRL envs give and take: dtypes of the specs, actions that fit, masks, steps counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule

from swath.collectors import Collector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.envs import ParallelEnv
from swath.errors import EnvError, PolicyError

torchrl_envs = pytest.importorskip("torchrl.envs")
from torchrl.data import (  # noqa: E402
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Plain(torchrl_envs.EnvBase):
    """Ends every fourth step and gives what its specs say."""

    def __init__(self, action=None, reward=None, done=None, batch_size=(), **more):
        super().__init__(batch_size=batch_size)
        seen = Unbounded((*batch_size, 3))
        self.observation_spec = Composite(observation=seen, **more, shape=batch_size)
        self.action_spec = Bounded(-1, 1, (*batch_size, 1)) if action is None else action
        self.reward_spec = Unbounded((*batch_size, 1)) if reward is None else reward
        if done is not None:
            self.done_spec = Composite(done=done, shape=batch_size)
        self.steps = 0

    def _reset(self, tensordict=None, **kwargs):
        self.steps = 0
        return self.observation_spec.rand()

    def _step(self, tensordict):
        self.steps += 1
        out = self.observation_spec.rand()
        flags = self.full_done_spec.zero()
        if self.steps == 4:
            flags = flags.apply(torch.ones_like)
        return out.update(flags).update(self.full_reward_spec.one())

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def first(env, policy=None, frames=12, **options):
    with Collector(env, policy, frames_per_batch=frames, seed=0, **options) as collector:
        return collector.next()


SPECS = {
    "bool": Categorical(2, (1,), dtype=torch.bool),
    "bool, no dimension": Categorical(2, dtype=torch.bool),
    "uint8": Categorical(2, dtype=torch.uint8),
    "int8": Categorical(2, (2,), dtype=torch.int8),
    "int32": Categorical(4, dtype=torch.int32),
    "int64": Categorical(4),
    "one-hot": OneHot(3),
    "binary": Binary(4),
    "pixels": Bounded(0, 255, (2, 2), dtype=torch.uint8),
    "float64": Unbounded((2,), dtype=torch.float64),
    "float16": Unbounded((2,), dtype=torch.float16),
    "bfloat16": Unbounded((2,), dtype=torch.bfloat16),
}


def test_observations_have_the_dtypes_of_their_specs():
    batch = first(Plain(**SPECS))
    for name, spec in SPECS.items():
        for key in (name, ("next", name)):
            assert batch[key].dtype == spec.dtype, name
            assert batch[key].shape == (12, *spec.shape), name
    assert len(batch["bfloat16"].unique()) > 2


def test_rewards_have_the_dtype_and_shape_of_their_spec():
    reward = Unbounded((1,), dtype=torch.float64)
    assert first(Plain(reward=reward))["next", "reward"].dtype == torch.float64
    with Collector(Plain(reward=Unbounded((2,))), frames_per_batch=12) as collector:
        assert collector.next()["next", "reward"].shape == (12, 2)
        assert collector.stats()["return"]["mean"] == 8  # four steps of two ones each


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_done_of_any_dtype_is_compared_with_zero(dtype):
    batch = first(Plain(done=Unbounded((1,), dtype=dtype)))
    assert batch["next", "done"].dtype == torch.bool
    assert batch["next", "done"][:, 0].nonzero()[:, 0].tolist() == [3, 7, 11]


def test_the_first_step_is_told_by_a_transform_as_bool():
    env = torchrl_envs.TransformedEnv(Plain(), torchrl_envs.InitTracker())
    batch = first(env)
    assert batch["is_init"].dtype == torch.bool
    assert batch["is_init"][:, 0].nonzero()[:, 0].tolist() == [0, 4, 8]


ONE = torch.nn.functional.one_hot(torch.tensor(2), 7)
FITTING = {
    "whole numbers for one-hot bools": (OneHot(7, dtype=torch.bool), ONE),
    "floats for one-hot bools": (OneHot(7, dtype=torch.bool), ONE.float()),
    "bools for one-hot numbers": (OneHot(7), ONE.bool()),
    "floats for one-hot numbers": (OneHot(7), ONE.float()),
    "a float for an index": (Categorical(5), torch.tensor(2.0)),
    "a number of another size": (Categorical(5, dtype=torch.int32), torch.tensor(2)),
    "floats for bits": (Binary(3), torch.ones(3)),
    "no last dimension": (Bounded(-1, 1, (1,)), torch.tensor(0.5)),
    "one dimension more": (Categorical(5), torch.tensor([2])),
    "coarse floats": (Bounded(-1, 1, (2,)), torch.tensor([0.5, 1.0], dtype=torch.bfloat16)),
}


def always(action):
    return TensorDictModule(lambda seen: action, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize(("spec", "action"), FITTING.values(), ids=FITTING)
def test_actions_that_the_spec_holds_exactly_are_taken(spec, action):
    batch = first(Plain(spec), always(action))
    assert batch["action"].dtype == spec.dtype
    assert batch["action"].shape == (12, *spec.shape)
    given = action.to(torch.float64).reshape(spec.shape).expand(batch["action"].shape)
    assert torch.equal(batch["action"].to(torch.float64), given)


UNFIT = {
    "no whole number": (Categorical(5), torch.tensor(2.5)),
    "no bool": (OneHot(7, dtype=torch.bool), 2 * ONE),
    "not finite": (Categorical(5), torch.tensor(torch.nan)),
    "too large": (Categorical(5, dtype=torch.uint8), torch.tensor(258)),
    "another shape": (Bounded(-1, 1, (2,)), torch.tensor([0.5])),
}


@pytest.mark.parametrize(("spec", "action"), UNFIT.values(), ids=UNFIT)
def test_actions_of_which_something_would_be_lost_are_refused(spec, action):
    with pytest.raises(PolicyError, match=r"'action' has (dtype|shape)"):
        first(Plain(spec), always(action))


class Masked(Plain):
    """Allows only what the mask says, another choice at each step; and notes what it was given."""

    def __init__(self, action, choices, batch_size=()):
        mask = Binary(choices, (*batch_size, choices), dtype=torch.bool)
        super().__init__(action, batch_size=batch_size, mask=mask)
        self.choices = choices

    def _mask(self, tensordict):
        mask = torch.zeros(*self.batch_size, self.choices, dtype=torch.bool)
        envs = torch.arange(max(1, self.batch_size.numel())).reshape(self.batch_size)
        for further in (0, 2):
            place = ((self.steps + envs + further) % self.choices)[..., None]
            mask.scatter_(-1, place, True)
        return tensordict.set("mask", mask)

    def _reset(self, tensordict=None, **kwargs):
        return self._mask(super()._reset(tensordict))

    def _step(self, tensordict):
        return self._mask(super()._step(tensordict))


def masked(kind="index", batch_size=()):
    spec = {
        "index": lambda: Categorical(5, batch_size),
        "one-hot": lambda: OneHot(5, (*batch_size, 5)),
    }[kind]()
    transform = torchrl_envs.ActionMask(mask_key="mask")
    return torchrl_envs.TransformedEnv(Masked(spec, 5, batch_size), transform)


def check_masks(batch):
    action = batch["action"]
    if action.shape != batch["mask"].shape:
        action = torch.nn.functional.one_hot(action, 5)
    assert torch.equal(action.sum(-1), torch.ones_like(action.sum(-1)))
    assert not (action.bool() & ~batch["mask"]).any()
    assert len(action.flatten(0, -2).unique(dim=0)) == 5  # all are chosen that ever may be


@pytest.mark.parametrize("kind", ["index", "one-hot"])
@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)], ids=str)
def test_random_actions_keep_to_the_masks_of_torchrl_envs(kind, batch_size):
    frames = 60 * max(1, torch.Size(batch_size).numel())
    check_masks(first(masked(kind, batch_size), None, frames))


def test_random_frames_keep_to_the_masks_and_know_their_probability():
    def act(seen):
        return torch.zeros(seen.shape[:-1], dtype=torch.int64), torch.zeros(seen.shape[:-1])

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action", "action_log_prob"])
    batch = first(masked(batch_size=(3,)), policy, 180, init_random_frames=150)
    random = batch["collector", "random"]
    assert random.sum() == 150
    check_masks(batch[random])
    two = torch.tensor(0.5).log()
    torch.testing.assert_close(batch["action_log_prob"][random], two.expand(150))
    assert (batch["action"][~random] == 0).all()


@pytest.mark.parametrize(
    "make", [lambda m: [m, m], lambda m: ParallelEnv(2, m)], ids=["list", "processes"]
)
def test_random_actions_keep_to_the_masks_of_several_envs(make):
    check_masks(first(make(masked), None, 120))


def test_a_mask_that_allows_nothing_is_blamed_on_the_env():
    env = masked()
    env.base_env._mask = lambda td: td.set("mask", torch.zeros(5, dtype=torch.bool))
    with pytest.raises(EnvError, match="the action mask of env 0 allows no action"):
        first(env)


@pytest.mark.parametrize(
    "spec",
    [MultiCategorical([2, 3]), MultiOneHot([2, 3]), Categorical(4, (2,)), OneHot(4, (2, 4))],
    ids=repr,
)
def test_random_actions_of_several_choices_fit_the_spec(spec):
    batch = first(Plain(spec), frames=200)
    assert all(spec.is_in(action) for action in batch["action"])
    choices = 6 if spec.shape[-1] in (2, 5) and "Multi" in type(spec).__name__ else 16
    assert len(batch["action"].unique(dim=0)) == choices


# -- steps counted --------------------------------------------------------------------------------


def test_a_limit_counts_steps_as_torchrls_collector_does():
    from torchrl.collectors import Collector as TheirCollector

    options = {"frames_per_batch": 50, "max_frames_per_traj": 7}
    their = TheirCollector(torchrl_envs.GymEnv("Pendulum-v1"), total_frames=-1, **options)
    expected = [their.next() for _ in range(2)]
    their.shutdown()
    with Collector("Pendulum-v1", **options) as collector:
        for others in expected:
            batch = collector.next()
            for key in ("step_count", ("next", "step_count"), ("next", "truncated")):
                assert batch[key].dtype == others[key].dtype
                assert torch.equal(batch[key], others[key]), key


def test_steps_are_counted_over_batches_in_workers_and_not_twice():
    options = {"frames_per_batch": 60, "max_frames_per_traj": 17, "seed": 0}
    with MultiSyncCollector(["CartPole-v1"] * 2, **options) as collector:
        data = torch.cat([collector.next() for _ in range(3)], 1)
    ids = data["collector", "traj_ids"]
    for row, count in zip(ids, data["step_count"][..., 0], strict=True):
        sizes = row.unique_consecutive(return_counts=True)[1].tolist()
        assert count.tolist() == [step for size in sizes for step in range(size)]
    assert torch.equal(data["next", "step_count"], data["step_count"] + 1)
    assert "step_count" not in first("CartPole-v1").keys()
    env = torchrl_envs.TransformedEnv(Plain(), torchrl_envs.StepCounter())
    assert first(env, max_frames_per_traj=3)["step_count"].max() == 2


# -- the end --------------------------------------------------------------------------------------

_OPEN = """
import warnings; warnings.simplefilter("ignore")
from test_torchrl_values import Plain
from swath.collectors import Collector
class Told(Plain):
    def close(self, **kwargs):
        super().close(**kwargs)
        print("closed", flush=True)
env = Told()
env.is_closed = False
for _ in Collector(env, frames_per_batch=4, total_frames=8): pass
print("end")
"""


def test_an_env_that_nobody_closed_is_closed_at_exit():
    done = subprocess.run(
        [sys.executable, "-c", _OPEN],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert (done.returncode, done.stdout) == (0, "end\nclosed\n"), done.stderr


@pytest.mark.cluster
def test_envs_of_any_form_over_gloo():
    from kits import torchrl_kit as kit

    def make():
        return kit.Teams((2, 3), at_root=False)

    options = {"frames_per_batch": 60, "seed": 0, "launcher": "mp", "backend": "gloo"}
    with DistributedCollector([make] * 2, kit.teams_policy(), **options) as collector:
        batch = collector.next()
    with Collector(make(), kit.teams_policy(), frames_per_batch=60, seed=0) as alone:
        expected = alone.next()
    assert batch.batch_size == (2, 3, 10)
    for key in expected.keys(True, True):
        if key[0] != "collector":
            assert torch.equal(batch[key], expected[key]), key
