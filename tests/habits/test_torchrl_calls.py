"""What TorchRL's users read of a collector and call on it, in process and with workers."""

from __future__ import annotations

import inspect
import math
import pickle
from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.torchrl_attributes import ATTRIBUTES
from swath.collectors.torchrl_calls import ARGUMENTS
from swath.data import ReplayBuffer
from swath.envs import SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
WITH_WORKERS = KINDS[1:]


class Deciding(nn.Module):
    """A policy whose action is a parameter, and says so in an extra."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        act = torch.zeros(observation.shape[:-1], dtype=torch.int64)
        return act, self.bias.expand(*observation.shape[:-1], 1)


def policy():
    return TensorDictModule(Deciding(), in_keys=["observation"], out_keys=["action", "told"])


def made(kind, actor=None, envs=CountingEnv, **options):
    options = {"frames_per_batch": 20, "total_frames": 4000, **options}
    return kind(envs if kind is Collector else [envs] * 2, actor, **options)


def weights(value):
    one = policy()
    nn.init.constant_(one.module.bias, value)
    return one


FORMS = {
    "policy_weights": lambda one: {"policy_weights": TensorDict.from_module(one)},
    "weights": lambda one: {"weights": TensorDict.from_module(one).data},
    "weights of a model": lambda one: {"weights": one.state_dict(), "model_id": "policy"},
    "policy": lambda one: {"policy": one},
    "weights_dict": lambda one: {"weights_dict": {"policy": TensorDict.from_module(one)}},
    "by worker": lambda one: {"policy_or_weights": {0: TensorDict.from_module(one)}},
    "worker_ids": lambda one: {"weights": TensorDict.from_module(one), "worker_ids": [0]},
}


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_weights_are_given_in_every_form(kind):
    with made(kind, policy()) as collector:
        for value, (form, given) in enumerate(FORMS.items(), start=1):
            before = collector.policy_version
            version = collector.update_policy_weights_(**given(weights(value)))
            assert version == collector.policy_version == before + 1, form
            told = collector.next()["told"].reshape(-1, 20 if kind is Collector else 10)
            assert (told[0] == value).all(), form
            if kind is MultiSyncCollector and form in ("by worker", "worker_ids"):
                assert (told[1] == 5).all(), form  # the last that went to all


def test_each_worker_gets_weights_of_its_own():
    with made(MultiSyncCollector, policy()) as collector:
        collector.update_policy_weights_({0: weights(3), 1: TensorDict.from_module(weights(7))})
        assert collector.next()["told"][:, 0, 0].tolist() == [3, 7]
        with pytest.raises(UsageError, match=r"workers \[5\] do not exist; workers are \[0, 1\]"):
            collector.update_policy_weights_({0: weights(1), 5: weights(1)})


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_weights_given_twice_or_of_another_model_are_refused(kind):
    with made(kind, policy()) as collector:
        for given, words in (
            ({"weights": weights(1), "policy": weights(2)}, "as weights and as policy; give only"),
            ({"weights": weights(1), "model_id": "critic"}, r"change \['critic'\] in the workers"),
            ({"weights_dict": {"value": weights(1)}}, r"change \['value'\] in the workers by map"),
        ):
            with pytest.raises(UsageError, match=words):
                collector.update_policy_weights_(**given)
        assert collector.policy_version == 0
    with (
        made(Collector, policy()) as collector,
        pytest.raises(UsageError, match=r"may be named, but got \[1\]"),
    ):
        collector.update_policy_weights_({1: weights(1)})


def test_a_scheme_that_publishes_nothing_lets_the_call_do_nothing():
    class NoWeightSyncScheme:
        pass

    schemes = {"policy": NoWeightSyncScheme()}
    with made(MultiSyncCollector, policy(), weight_sync_schemes=schemes) as collector:
        assert collector.update_policy_weights_(weights(9)) == 0
        assert not collector.next()["told"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_say_what_was_given(kind):
    hook = print
    actor = policy()
    with made(
        kind, actor, max_frames_per_traj=-1, init_random_frames=None, pre_collect_hook=hook
    ) as collector:
        assert collector.total_frames == 4000
        assert collector.requested_frames_per_batch == 20
        assert collector.init_random_frames == collector.max_frames_per_traj == 0
        assert collector.policy is actor
        assert collector.get_model("policy") is actor
        assert collector.pre_collect_hook is hook
        assert (collector.split_trajs, collector.compact_obs) == (False, False)
        assert collector.closed is False
        assert collector.n_env == (1 if kind is Collector else 2)
        assert collector.replay_buffer is None
        expected = None if kind is Collector else (None, None)
        assert collector.storing_device == collector.policy_device == expected
        for row in ATTRIBUTES:
            if row.concerns(kind):
                getattr(collector, row.name)
        assert not hasattr(collector, "weight_updater")
        with pytest.raises(AttributeError, match="has no attribute 'frame_per_batch'"):
            collector.frame_per_batch  # noqa: B018
    assert collector.closed is True
    with made(Collector, total_frames=-1) as endless:
        assert endless.total_frames == math.inf


def test_attributes_are_those_that_torchrls_collector_has():
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import GymWrapper

    env, actor = GymWrapper(gym.make("Pendulum-v1")), nn.Linear(3, 1)
    actor = TensorDictModule(actor, in_keys=["observation"], out_keys=["action"])
    options = {"frames_per_batch": 20, "total_frames": 40, "max_frames_per_traj": 7}
    theirs, ours = TheirCollector(env, actor, **options), Collector(env, actor, **options)
    names = """total_frames frames_per_batch requested_frames_per_batch init_random_frames
        max_frames_per_traj n_env closed split_trajs reset_at_each_iter reset_when_done
        set_truncated exploration_type postproc replay_buffer trajs_per_batch compact_obs"""
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.env is env
    for path in ("policy.in_keys", "env.batch_size", "frames_per_batch"):
        assert ours.get_distant_attr(path) == theirs.get_distant_attr(path)
    calls = {"list_of_args": [("policy.in_keys",), ("frames_per_batch",)]}
    theirs_told = theirs.map_fn("get_distant_attr", **calls)
    assert ours.map_fn("get_distant_attr", **calls) == theirs_told
    assert ours.getattr_env("batch_size") == theirs.getattr_env("batch_size")
    assert ours.getattr_policy("in_keys") == theirs.getattr_policy("in_keys")
    ours.shutdown(close_env=False)
    theirs.shutdown()


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_what_would_change_nothing_cannot_be_set(kind):
    with made(kind) as collector:
        with pytest.raises(AttributeError, match=r"total_frames of a .* is fixed when it is made"):
            collector.total_frames = 3
        assert collector.total_frames == 4000
        collector.anything_else = 3
        assert collector.anything_else == 3


def test_help_shows_none_of_it():
    names = {row.name for row in ATTRIBUTES} | {"iterator", "fake_tensordict", "getattr_env"}
    names -= {"num_workers"}
    for kind in KINDS:
        assert not names & set(dir(kind))
        shown = inspect.signature(kind.update_policy_weights_).parameters
        assert not {"weights", "weights_dict", "model_id"} & set(shown)


@pytest.mark.parametrize("kind", KINDS)
def test_small_calls(kind):
    with made(kind, policy()) as collector:
        assert next(collector.iterator()).numel() == 20
        assert collector.increment_version() == collector.get_policy_version() == 1
        collector.set_post_collect_hook(print)
        assert collector.post_collect_hook is print
        collector.post_collect_hook = None
        collector.load_state_dict(collector.state_dict(), strict=False)
        with pytest.raises(UsageError, match=r"Put torch.profiler.profile\(\) around"):
            collector.enable_profile(num_rollouts=3)
        with collector.pause(timeout=3):
            pass
        if kind is not Collector:
            assert collector.frames_per_batch_worker(worker_idx=1) in (10, 20)
        collector.shutdown(timeout=None, raise_on_error=False)
        collector.async_shutdown(timeout=None)


def test_the_rows_of_workers_are_plain_numbers_when_asked_for():
    with made(MultiSyncCollector) as collector:
        collector.next()
        both = collector.stats(workers="both", timeout=3.0)
        assert both["worker_0/frames"] == both["worker_1/frames"] == 10
        assert both["frames"] == 20
        only = collector.stats(workers="per_worker")
        assert "frames" not in only
        assert (only["worker_1/frames"], only["workers"], only["workers_alive"]) == (10, 2, 2)
        with pytest.raises(UsageError, match=r"workers must be one of aggregate, .*got 'bogus'"):
            collector.stats(workers="bogus")
        with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
            collector.stats(worker="both")


def test_rays_statistics_have_the_frames_of_all_workers():
    row = next(one for one in ARGUMENTS if one.name == "stats" and "RayCollector" in one.owners)
    plain = {"frames": 30, "per_worker": [{"worker": 0, "frames": 20}, {"worker": 1, "frames": 15}]}
    told = row.call(None, lambda: plain, workers="both", timeout=1.0)
    assert (told["worker_frames"], told["worker_1/frames"], told["frames"]) == (35, 15, 30)


class Named(CountingEnv):
    """An env that has something to tell."""

    name = "a counting env"

    def told(self, one, *, two):
        return one, two


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_texts_reach_into_workers(kind):
    buffer = ReplayBuffer(100)
    with made(kind, policy(), Named, replay_buffer=buffer) as collector:
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.get_distant_attr("env.name") == ["a counting env"] * 2
        assert collector.map_fn("get_distant_attr", [("worker_idx",), ("env.name",)]) == [
            0,
            "a counting env",
        ]
        assert collector.map_fn(
            "env.told", list_of_args=[(1,), (3,)], list_of_kwargs=[{"two": 2}, {"two": 4}]
        ) == [(1, 2), (3, 4)]
        assert collector.map_fn("replay_buffer.__len__") == [0, 0]
        assert collector.map_fn("worker_idx") == [0, 1]
        assert collector.map_fn("env.name") == ["a counting env"] * 2
        assert [row["frames"] for row in collector.map_fn("stats")] == [0, 0]
        assert collector.map_fn("get_policy_version") == [0, 0]
        assert collector.map_fn(lambda about: about.worker) == [0, 1]
        assert collector.getattr_env("name") == "a counting env"
        assert collector.getattr_policy("in_keys") == ["observation"]
        assert collector.getattr_rb("storage") == buffer.storage
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            collector.getattr_env("nothing")
        with pytest.raises(UsageError, match="list_of_args must have 2 entries, one for each work"):
            collector.map_fn("get_distant_attr", list_of_args=[("worker_idx",)])
        with pytest.raises(UsageError, match=r"the same length; got \[1, 2\]"):
            collector.map_fn("env.told", list_of_args=[()], list_of_kwargs=[{}, {}])
        assert check_transitions([collector.rollout()])  # they are well


def test_texts_reach_into_a_collector_without_workers():
    with made(Collector, policy(), Named(), worker_idx=5) as collector:
        assert collector.get_distant_attr("worker_idx") == 5
        args = [("worker_idx",), ("frames_per_batch",), ("env.name",)]
        told = collector.map_fn("get_distant_attr", list_of_args=args)
        assert told == [5, 20, "a counting env"]
        assert collector.getattr_env("name") == "a counting env"
        with pytest.raises(UsageError, match=r"list_of_kwargs must have|list_of_args must have"):
            collector.map_fn("stats", list_of_args=[()], list_of_kwargs=[{}, {}])


@pytest.mark.parametrize(
    "more",
    [{}, {"set_truncated": True}, {"compact_obs": True}, {"split_trajs": True}],
    ids=str,
)
@pytest.mark.parametrize("envs", [1, 3])
def test_a_fake_batch_is_like_those_that_come(more, envs):
    make = CountingEnv if envs == 1 else SerialEnv(envs, CountingEnv)
    with made(Collector, policy(), make, frames_per_batch=30, seed=1, **more) as collector:
        fake = collector.fake_tensordict()
        real = collector.next()
        assert fake.names == real.names
        assert set(fake.keys(True, True)) == set(real.keys(True, True))
        for key, value in fake.items(True, True):
            if torch.is_tensor(value) and "mask" not in key:
                assert value.dtype == real[key].dtype
                assert value.is_floating_point() <= (not value.any())
        if "split_trajs" not in more:
            assert fake.batch_size == real.batch_size
        if "set_truncated" in more:
            assert fake["next", "truncated"][..., -1, :].all()
            assert fake["next", "truncated"].sum() == envs


def test_a_fake_batch_takes_nothing_of_the_data():
    batches = []
    for fakes in (0, 2):
        with made(Collector, policy(), seed=3) as collector:
            for _ in range(fakes):
                collector.fake_tensordict()
            batches.append(collector.next())
    assert (batches[0] == batches[1]).all()
    with made(MultiSyncCollector) as collector:
        with pytest.raises(NotImplementedError, match="there is no fake_tensordict"):
            collector.fake_tensordict()
    with (
        made(Collector, trajs_per_batch=2) as collector,
        pytest.raises(UsageError, match="with trajs_per_batch the length of the trajectories"),
    ):
        collector.fake_tensordict()


class Closing(CountingEnv):
    closed = 0

    def close(self):
        self.closed += 1
        super().close()


def test_an_env_that_was_passed_can_stay_open():
    env = Closing()
    collector = made(Collector, envs=env)
    collector.next()
    collector.shutdown(close_env=False)
    assert env.closed == 0
    with made(Collector, envs=env) as collector:
        collector.next()
    assert env.closed == 1
    with (
        made(MultiSyncCollector) as collector,
        pytest.raises(UsageError, match="close_env=False is for Collector"),
    ):
        collector.shutdown(close_env=False)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_one_seed_for_all_envs(kind):
    envs = SerialEnv(3, "CartPole-v1") if kind is Collector else "CartPole-v1"
    with made(kind, envs=envs, frames_per_batch=12) as collector:
        assert collector.set_seed(4, static_seed=True) == 4
        first = collector.next()["observation"][..., 0, :]
        assert (first == first[0]).all()
        collector.set_seed(4)
        first = collector.next()["observation"][..., 0, :]
        assert not (first == first[0]).all()


def test_some_envs_start_anew_and_others_go_on():
    with made(Collector, envs=SerialEnv(3, CountingEnv), frames_per_batch=6, seed=0) as collector:
        before = collector.next()
        collector.reset([1])
        state = collector.state_dict()
        after = collector.next()
        for env in (0, 2):
            assert check_transitions([before[env : env + 1], after[env : env + 1]]) == 4
        assert after["observation"][1, 0, 2] == 0
        ids = after["collector", "traj_ids"][1]
        assert ids.min() > before["collector", "traj_ids"].max()
        ended = [batch["next", "done"].sum().item() for batch in (before, after)]
        assert len(collector.take_episodes()["length"]) == sum(ended)
        rest = [collector.next() for _ in range(20)]
        assert check_transitions([after[1:2], *(batch[1:2] for batch in rest)])
        collector.load_state_dict(state)
        assert (collector.next() == after).all()
        for index in (torch.tensor([False, False, True]), slice(2, 3), 2):
            last = collector.next()
            collector.reset(index)
            fresh = collector.next()["collector", "traj_ids"][:, 0]
            assert fresh[2] not in last["collector", "traj_ids"][2]
        with pytest.raises(UsageError, match=r"index is 7, which selects none of \[0, 1, 2\]"):
            collector.reset(7)


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_some_workers_start_anew_and_others_go_on(kind):
    long = partial(CountingEnv, longest=10**9)
    with made(kind, envs=long, frames_per_batch=4, seed=0) as collector:
        batches = [collector.next() for _ in range(3)]
        collector.reset([False, True])
        with pytest.raises(UsageError, match="workers is 5, which selects none"):
            collector.reset(5)
        batches += [collector.next() for _ in range(12)]
    frames = torch.cat([batch.reshape(-1) for batch in batches])
    for worker in (0, 1):
        own = frames[frames["collector", "traj_ids"] >> 40 == worker]
        ids, done = own["collector", "traj_ids"], own["next", "done"][:, 0]
        cut = (ids[1:] != ids[:-1]) & ~done[:-1]
        assert cut.sum() == worker


def test_they_pass_for_torchrls_collectors_and_for_data_sets():
    import torchrl.collectors
    from torch.utils.data import DataLoader, IterableDataset

    for kind in KINDS:
        with made(kind, total_frames=40) as collector:
            assert isinstance(collector, torchrl.collectors.BaseCollector)
            assert isinstance(collector, IterableDataset)
            if kind is Collector:
                loader = DataLoader(collector, batch_size=None, collate_fn=lambda one: one)
                assert sum(batch.numel() for batch in loader) == 40


def test_a_collector_that_could_not_be_made_has_no_attributes():
    collector = object.__new__(Collector)
    with pytest.raises(AttributeError, match="'options'"):
        collector.total_frames  # noqa: B018
    assert "not made yet" in repr(collector)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(made(Collector))
