"""Bad input: a message with the value, what was expected and what to do; nothing is lost."""

from __future__ import annotations

import gc
import os
import signal
import threading

import gymnasium as gym
import pytest
import torch

from swath.collectors import Collector, SyncDataCollector
from swath.envs import SerialEnv
from swath.errors import ClosedError, EnvError, PolicyError, SwathError, UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"frames_per_batch is missing: give Collector the number of frames in one batch"),
        ({"frames_per_batch": None}, r"frames_per_batch is missing"),
        ({"frames_per_batch": 0}, r"frames_per_batch .*got 0"),
        ({"frames_per_batch": -3}, r"frames_per_batch .*got -3"),
        ({"frames_per_batch": 10.5}, r"frames_per_batch must be an int .*got 10.5"),
        ({"frames_per_batch": True}, r"frames_per_batch .*got True"),
        ({"total_frames": 0}, r"total_frames .*-1 to collect for ever.*got 0"),
        (
            {"frame_per_batch": 10},
            r"no option 'frame_per_batch'. Did you mean 'frames_per_batch'\?",
        ),
        ({"whatever_else": 10}, r"no option 'whatever_else'\.$"),
        ({"cat_results": "stack"}, r"no option 'cat_results': .*collectors with workers"),
        ({"max_frames_per_traj": 0.5}, r"max_frames_per_traj .*at least 1 \(or None\); got 0.5"),
        ({"init_random_frames": "1"}, r"init_random_frames .*got '1'"),
        ({"trajs_per_batch": 0}, r"trajs_per_batch .*got 0"),
        ({"seed": -1}, r"seed .*got -1"),
        ({"seed": "x"}, r"seed .*got 'x'"),
        ({"split_trajs": 1}, r"split_trajs must be True or False; got 1"),
        ({"traj_format": "flat"}, r"traj_format must be one of padded, cat; got 'flat'"),
        ({"traj_format": "cat"}, r"traj_format goes with trajs_per_batch"),
        ({"exploration_type": "randm"}, r"exploration_type must be one of .*Did you mean 'random'"),
        ({"exploration_mode": 3}, r"exploration_mode must be one of .*got 3"),
        ({"memory_order": "env"}, r"memory_order must be one of time, batch; got 'env'"),
        ({"postproc": 3}, r"postproc must be callable; got int 3"),
        ({"post_collect_hook": "f"}, r"post_collect_hook must be callable; got str 'f'"),
        ({"replay_buffer": 3}, r"replay_buffer must have a method extend\(batch\); got int"),
        (
            {"device": "gpu0"},
            r"device is 'gpu0', which is not a torch device. Did you mean 'cuda:0'",
        ),
        ({"device": "gpu"}, r"device is 'gpu', which is not a torch device. Did you mean 'cuda'"),
        ({"device": "cdua"}, r"device is 'cdua', which is not a torch device. Did you mean 'cuda'"),
        ({"policy_device": "cuda:99"}, r"'cuda:99', and this machine has no such device"),
        ({"cudagraph_policy": True}, r"cudagraph_policy needs"),
        ({"trajs_per_batch": 2, "split_trajs": True}, r"trajs_per_batch and split_trajs do not go"),
        ({"trajs_per_batch": 2, "compact_obs": True}, r"trajs_per_batch and compact_obs do not go"),
        ({"reset_at_each_iter": True, "reset_when_done": False}, r"do not go together"),
        (
            {"trajs_per_batch": 2, "set_truncated": True},
            r"trajs_per_batch and set_truncated do not go together: .*reset_at_each_iter=True",
        ),
        ({"exploration_mode": "mode", "exploration_type": "mean"}, r"give only one of them"),
        ({"n_envs": 4}, r"no option 'n_envs': .*SerialEnv\(8, make\)"),
        ({"num_steps": 4}, r"no option 'num_steps': give frames_per_batch"),
        ({"policy_factory": 3}, r"policy_factory must be callable; got int 3"),
        ({"policy_factory": lambda: None}, r"policy_factory .* returned None"),
    ],
)
def test_a_wrong_option_is_refused_at_construction(options, message):
    options = {"frames_per_batch": 10, **options} if options else options
    with pytest.raises(UsageError, match=message):
        Collector("CartPole-v1", **options)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("NoSuchEnv-v0", r"cannot make the env 'NoSuchEnv-v0'"),
        (None, r"create_env_fn is None; expected a gymnasium id"),
        (3, r"create_env_fn is 3; expected"),
        (lambda: None, r"returned NoneType; expected a gymnasium id"),
        (lambda: 1 / 0, r"raised ZeroDivisionError: division by zero"),
        ([], r"list of envs is empty"),
        (["CartPole-v1", "Pendulum-v1"], r"env 1 has observation_space .*equal spaces"),
    ],
)
def test_what_is_no_env_is_refused(env, message):
    with pytest.raises(UsageError, match=message):
        Collector(env, frames_per_batch=10)


def test_a_policy_and_a_factory_are_one_too_many():
    with pytest.raises(UsageError, match="policy and policy_factory are both given"):
        Collector("CartPole-v1", torch.nn.Linear(4, 2), frames_per_batch=10, policy_factory=list)


def test_errors_are_value_errors_of_one_family():
    with pytest.raises(ValueError, match="frames_per_batch") as caught:
        Collector("CartPole-v1")
    assert isinstance(caught.value, SwathError)


def test_an_env_is_closed_when_the_constructor_fails():
    closed = []

    class Noting(gym.Wrapper):
        def close(self):
            closed.append(True)
            super().close()

    with pytest.raises(PolicyError):
        Collector(
            lambda: Noting(gym.make("CartPole-v1")), lambda o: torch.zeros(7), frames_per_batch=10
        )
    assert closed == [True]


class Failing(gym.Wrapper):
    """Raises at step n of its life, or at reset n."""

    def __init__(self, step=None, reset=None):
        super().__init__(gym.make("CartPole-v1"))
        self.left, self.resets = step, reset

    def step(self, action):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise KeyError("mass")
        return super().step(action)

    def reset(self, **kwargs):
        if self.resets is not None:
            self.resets -= 1
            if self.resets == 0:
                raise KeyError("mass")
        return super().reset(**kwargs)


def test_an_exception_in_an_env_names_the_place_and_loses_no_frame():
    envs = [Failing, lambda: Failing(step=26), Failing]
    with Collector(envs, frames_per_batch=60, seed=3) as collector:
        good = collector.next()
        with pytest.raises(
            EnvError, match=r"KeyError: 'mass' in step\(\).*env 1, step 25"
        ) as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, KeyError)
        assert (caught.value.env, caught.value.step) == (1, 25)
        assert caught.value.seed is not None
        rest = collector.partial()
        assert collector.partial() is None
        assert rest.batch_size == (3, 6)
        mask = rest["collector", "mask"]
        assert mask[:, :5].all()
        assert mask[:, 5].tolist() == [True, False, False]
        whole = torch.cat([good, rest.exclude(("collector", "mask"))], 1)
        follows = (whole["observation"][:, 1:] == whole["next", "observation"][:, :-1]).all(-1)
        ended = whole["next", "done"][:, :-1, 0]
        assert (follows | ended)[:, :-1].all()
        assert (follows | ended)[0, -1]
        assert collector.stats()["frames"] == 60 + 16
        after = collector.next()  # new episodes
    assert not set(after["collector", "traj_ids"].flatten().tolist()) & set(
        whole["collector", "traj_ids"].flatten().tolist()
    )


def test_an_exception_in_a_reset_keeps_the_step_before_it():
    with Collector(lambda: Failing(reset=3), frames_per_batch=500, seed=0) as collector:
        with pytest.raises(EnvError, match=r"in reset\(\)") as caught:
            collector.next()
        rest = collector.partial()
    assert caught.value.step == rest.numel()
    assert rest["next", "done"][-1]
    assert rest["next", "done"].sum() == 2


def test_a_reset_that_fails_beside_a_vector_env_adds_no_row():
    beside = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    with Collector([beside, Failing(reset=3)], frames_per_batch=600, seed=0) as collector:
        with pytest.raises(EnvError, match=r"in reset\(\)") as caught:
            collector.next()
        rest = collector.partial()
    assert rest.batch_size == (3, caught.value.step)
    assert ("collector", "mask") not in rest.keys(True)
    assert rest["next", "done"][2, -1]


def test_a_constructor_reset_that_fails_says_so():
    with pytest.raises(EnvError, match=r"in reset\(\).*env 0, step 0"):
        Collector(lambda: Failing(reset=1), frames_per_batch=5)


def test_a_policy_that_raises_later_is_the_cause_and_frames_are_kept():
    calls = []

    def policy(observation):
        calls.append(1)
        if len(calls) == 14:
            raise RuntimeError("no more")
        return torch.zeros(2, dtype=torch.int64)

    with Collector(SerialEnv(2, "CartPole-v1"), policy, frames_per_batch=100) as collector:
        with pytest.raises(PolicyError, match=r"RuntimeError: no more.*step 12") as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert collector.partial().batch_size == (2, 12)


def test_ctrl_c_in_the_middle_of_a_batch_keeps_what_was_collected():
    def policy(observation):
        calls.append(1)
        if len(calls) == 50:
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return torch.tensor(len(calls) % 2)

    calls = []
    with Collector("CartPole-v1", policy, frames_per_batch=10**6) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        partial = collector.partial()
        assert partial.numel() >= 40
        assert collector.stats()["frames"] == partial.numel()


def test_after_shutdown_there_is_a_clear_error_and_shutting_down_again_is_nothing():
    collector = SyncDataCollector("CartPole-v1", frames_per_batch=10)
    collector.next()
    collector.shutdown()
    collector.shutdown()
    calls = (collector.next, collector.rollout, collector.reset, collector.state_dict)
    for call in (*calls, lambda: list(collector), lambda: collector.set_seed(3)):
        with pytest.raises(ClosedError, match="was shut down; make a new one"):
            call()
    with pytest.raises(ClosedError):
        collector.__enter__()


def test_a_collector_that_is_dropped_without_shutdown_is_collected():
    import weakref

    collector = Collector("CartPole-v1", frames_per_batch=10)
    collector.next()
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
