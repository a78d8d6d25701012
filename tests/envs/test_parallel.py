"""`ParallelEnv`: the same data as in one process, and what happens when a process fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import GymEnv, ParallelEnv, SerialEnv, parallel
from swath.errors import EnvError, UsageError, WorkerError
from swath.policies import RecurrentPolicy
from swath.testing import CountingEnv, CrashingEnv, check_replay, check_transitions


class Nested(gym.Env):
    """Dict observations, infos, episodes of 3 to 6 steps."""

    observation_space = spaces.Dict(
        {"at": spaces.Box(-10, 10, (2,), np.float64), "n": spaces.Discrete(100)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def _seen(self):
        return {"at": self._at.copy(), "n": self._n}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at, self._n = self.np_random.uniform(-1, 1, 2), 0
        self._last = int(self.np_random.integers(3, 7))
        return self._seen(), {"speed": 0.0}

    def step(self, action):
        self._at += action
        self._n += 1
        over = self._n >= self._last
        return self._seen(), float(self._at[0]), over, False, {"speed": float(action[1])}


class Sleeping(CountingEnv):
    """Never comes back from its fifth step."""

    def step(self, action):
        self.made = getattr(self, "made", 0) + 1
        if self.made == 5:
            time.sleep(1000)
        return super().step(action)


class Killing(CountingEnv):
    """Ends its process in the given call, as a crash in native code would."""

    def __init__(self, call="step", at=5, how=signal.SIGKILL):
        super().__init__()
        self.call, self.left, self.how = call, at, how

    def _count(self, call):
        self.left -= call == self.call
        if not self.left:
            os.kill(os.getpid(), self.how) if self.how else os._exit(3)

    def reset(self, **kwargs):
        self._count("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self._count("step")
        return super().step(action)


def collected(env, policy=None, **options):
    steps = 80 // env.num_envs
    options = {"frames_per_batch": steps * env.num_envs, "total_frames": 400, **options}
    options.setdefault("seed", 5)
    with Collector(env, policy, **options) as collector:
        return [batch.clone() for batch in collector]


def counting_policy(observation):
    return torch.ones(observation.shape[0], dtype=torch.int64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 7},
        {"reset_at_each_iter": True},
        {"reset_when_done": False},
        {"set_truncated": True},
        {"compact_obs": True},
        {"init_random_frames": 101},
        {"memory_order": "batch"},
        {"trajs_per_batch": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:total_frames is reached")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_data_is_that_of_a_serial_env(options, workers):
    alone = collected(SerialEnv(4, "CartPole-v1"), **options)
    apart = collected(ParallelEnv(4, "CartPole-v1", num_workers=workers), **options)
    assert len(alone) == len(apart)
    for one, other in zip(alone, apart, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key, value in one.items(True, True):
            assert torch.equal(value, other[key]), key


def test_nested_observations_and_infos_come_too():
    serial = SerialEnv(3, Nested, info_keys=["speed"])
    apart = ParallelEnv(3, Nested, num_workers=2, info_keys=["speed"])
    for one, other in zip(collected(serial), collected(apart), strict=True):
        for key, value in one.items(True, True):
            assert torch.equal(value, other[key]), key
    assert ("next", "info", "speed") in one.keys(True, True)


def test_a_recurrent_policy_starts_anew_with_each_episode():
    def fn(observation, count):
        return torch.ones(observation.shape[0], dtype=torch.int64), count + 1

    batches = [
        collected(env, RecurrentPolicy(fn, torch.zeros(())))
        for env in (SerialEnv(3, CountingEnv), ParallelEnv(3, CountingEnv, num_workers=2))
    ]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["policy_state"], other["policy_state"])
        assert torch.equal(one["next", "policy_state"], other["next", "policy_state"])


def test_every_transition_is_real_and_delivered_once():
    batches = collected(ParallelEnv(5, CountingEnv, num_workers=2), total_frames=2000)
    check_transitions(batches)
    check_replay(collected(ParallelEnv(4, Nested, num_workers=2)), Nested, 5)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_processes_spin_on_cores_to_spare_and_then_park(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    env = ParallelEnv(6, CountingEnv, num_workers=3)
    assert env.group.spinning == cores - 1
    with Collector(env, counting_policy, frames_per_batch=600) as collector:
        batches = [collector.next()]
        time.sleep(0.1)
        before = [cpu_time(link.pid) for link in env.group.links]
        time.sleep(0.2)
        after = [cpu_time(link.pid) for link in env.group.links]
        batches.append(collector.next())  # they wake up, and have missed nothing
        collector.reset()  # a message among the steps
        assert check_transitions([collector.next()]) == 600
    assert max(np.subtract(after, before)) <= 2
    assert check_transitions(batches) == 1200


def cpu_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_it_works_by_itself():
    env = ParallelEnv(3, "CartPole-v1", num_workers=2)
    serial = SerialEnv(3, "CartPole-v1")
    for each in (env, serial):
        each.set_seed(4)
    first, expected = env.reset(), serial.reset()
    assert first.batch_size == (3,)
    for _ in range(30):
        first["action"] = expected["action"] = torch.tensor([0, 1, 1])
        first, expected = env.step(first), serial.step(expected)
        for key, value in expected.items(True, True):
            assert torch.equal(first[key], value), key
        mask = first["next", "done"][:, 0]
        first, expected = (
            (env.reset(mask), serial.reset(mask))
            if mask.any()
            else (first["next"], expected["next"])
        )
    assert env.rand_step()["next", "reward"].shape == (3, 1)
    assert env.rollout(20).batch_size[0] == 3
    env.close()
    env.close()
    serial.close()


def test_the_example_of_the_readme():
    env = ParallelEnv(4, lambda: GymEnv("Pendulum-v1"))
    policy = torch.nn.Linear(3, 1)
    shapes = []
    with Collector(env, policy, frames_per_batch=200, total_frames=600) as collector:
        for data in collector:
            shapes.append(tuple(data.batch_size))
            collector.update_policy_weights_()
    assert shapes == [(4, 50)] * 3


def test_envs_are_made_where_they_live_and_nowhere_else(tmp_path):
    def make():
        (tmp_path / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        return CountingEnv()

    env = ParallelEnv(4, make, num_workers=2)
    made = [int(path.name.split("-")[0]) for path in tmp_path.iterdir()]
    assert len(made) == 4
    assert len(set(made)) == 2
    assert os.getpid() not in made
    env.close()


def test_different_envs_with_equal_spaces():
    env = ParallelEnv(2, [lambda: CountingEnv(), lambda: CrashingEnv(at_step=10**9)])
    assert collected(env)[0].batch_size == (2, 40)


def test_a_vector_of_pixels_is_written_in_place():
    space = spaces.Box(0, 255, (4, 8, 8), np.uint8)

    def make():
        return CountingEnv(observation_space=space)

    check_replay(collected(ParallelEnv(2, make)), make, 5)


def test_states_resume_exactly():
    kept = []
    for stop in (None, 2):
        env = ParallelEnv(3, "CartPole-v1", num_workers=2)
        with Collector(env, frames_per_batch=60, seed=1) as collector:
            batches = [collector.next().clone() for _ in range(stop or 4)]
            state = collector.state_dict()
        if stop:
            env = ParallelEnv(3, "CartPole-v1", num_workers=3)
            again = ParallelEnv(3, "CartPole-v1", num_workers=2)
            env.close()
            with Collector(again, frames_per_batch=60, seed=9) as collector:
                collector.load_state_dict(state)
                batches += [collector.next().clone() for _ in range(2)]
        kept.append(torch.stack(batches))
    for key, value in kept[0].items(True, True):
        assert torch.equal(kept[1][key], value), key


def test_it_lives_in_a_worker_of_a_collector():
    makers = [lambda: ParallelEnv(2, CountingEnv, num_workers=2)] * 2
    with MultiSyncCollector(
        makers, frames_per_batch=80, total_frames=400, cat_results=0, seed=0
    ) as collector:
        batches = [batch.clone() for batch in collector]
    assert batches[0].batch_size == (4, 20)
    check_transitions(batches)


def test_memory_is_used_again_and_kept_batches_stay():
    with Collector(ParallelEnv(2, CountingEnv), frames_per_batch=20, seed=0) as collector:
        kept = [collector.next() for _ in range(80)]
        copies = [batch.clone() for batch in kept]
        for _ in range(20):
            collector.next()
        assert all((a == b).all() for a, b in zip(kept, copies, strict=True))
        assert len(os.listdir("/proc/self/fd")) < 160
        del kept
        made = collector.stats()["slabs"]
        for _ in range(20):
            collector.next()
        assert collector.stats()["slabs"] <= made + 1


@pytest.mark.parametrize("at", [0, 7])
def test_an_env_that_raises_is_named_and_nothing_is_lost(at):
    makers = [CountingEnv, CountingEnv, CountingEnv, lambda: CrashingEnv(at_step=at)]
    env = ParallelEnv(4, makers, num_workers=2)
    with Collector(env, frames_per_batch=400, seed=0) as collector:
        with pytest.raises(EnvError, match=r"env 3, step \d+, seed \d+") as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "Traceback" in str(caught.value.__cause__.__cause__)
        part = collector.partial()
        assert part["collector", "mask"].sum() == 4 * at + 3


def test_an_env_that_raises_in_a_reset_loses_nothing():
    class Once(CountingEnv):
        resets = 0

        def reset(self, **kwargs):
            Once.resets += 1
            if Once.resets > 3:
                raise ValueError("no more")
            return super().reset(**kwargs)

    env = ParallelEnv(2, [CountingEnv, Once], num_workers=2)
    with Collector(env, frames_per_batch=400, seed=0) as collector:
        with pytest.raises(EnvError, match="no more"):
            collector.next()
        part = collector.partial()
        assert part["collector", "mask"].all()
        check_transitions([part])


@pytest.mark.parametrize("call", ["step", "reset"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, None])
def test_a_killed_process_is_named(call, how):
    name = "exit code 3" if how is None else how.name
    env = ParallelEnv(4, [CountingEnv] * 3 + [lambda: Killing(call, 3, how)], num_workers=2)
    with Collector(env, frames_per_batch=400) as collector:
        with pytest.raises(EnvError, match=rf"envs 2 to 3 .*{name}") as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, WorkerError)
        with pytest.raises(EnvError, match=name):
            collector.next()


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_killed_while_idle_is_seen(number):
    env = ParallelEnv(4, CountingEnv, num_workers=2)
    with Collector(env, frames_per_batch=40) as collector:
        collector.next()
        os.kill(env.group.links[number].pid, signal.SIGKILL)
        with pytest.raises(EnvError, match="SIGKILL"):
            collector.next()


def test_closing_does_not_wait_for_an_env_that_blocks():
    env = ParallelEnv(2, [CountingEnv, Sleeping], num_workers=2)
    collector = Collector(env, frames_per_batch=100)
    main = threading.main_thread().ident
    ctrl_c = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        ctrl_c.start()
        collector.next()
    collector.shutdown(0.3)


@pytest.mark.parametrize("in_collector", [True, False])
def test_closing_lets_the_envs_close_themselves(tmp_path, monkeypatch, in_collector):
    monkeypatch.setattr(parallel, "_GRACE", 600.0)  # more than a test may take

    class Closing(CountingEnv):
        def close(self):
            (tmp_path / f"{id(self)}-{os.getpid()}").touch()

    env = ParallelEnv(4, Closing, num_workers=2)
    if in_collector:
        collector = Collector(env, frames_per_batch=40)
        collector.next()
        collector.shutdown(600.0)
    else:
        env.rollout(3)
        env.close()
    assert len(list(tmp_path.iterdir())) == 4


def test_it_goes_on_after_ctrl_c():
    class Slow(CountingEnv):
        def step(self, action):
            time.sleep(0.005)
            return super().step(action)

    with Collector(ParallelEnv(2, Slow), frames_per_batch=400, seed=0) as collector:
        main = threading.main_thread().ident
        ctrl_c = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            ctrl_c.start()
            while True:  # a second each
                collector.next()
        part = collector.partial()
        check_transitions([part])
        check_transitions(collector.next())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, CountingEnv), "num_envs must be an int of at least 1; got 0"),
        ((2, CountingEnv, 0), "num_workers must be an int of at least 1; got 0"),
        ((2, [CountingEnv]), "num_envs is 2, but 1 env makers"),
        ((2, 3), "the env maker is 3"),
        ((2, CountingEnv()), "the env maker is"),
        ((2, ["CartPole-v1", "Pendulum-v1"], 2), "equal spaces"),
        ((2, "CartPole-v9"), "CartPole-v9"),
        ((1, lambda: SerialEnv(2, CountingEnv)), "each must make one"),
        ((1, lambda: None), "returned NoneType"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        ParallelEnv(*arguments)


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"create_env_fn.* > lock is a lock"):
        ParallelEnv(1, lambda: lock)


def test_a_copy_is_refused_and_closes_nothing_of_the_original():
    with contextlib.closing(ParallelEnv(2, CountingEnv)) as env:
        for copied in (copy.deepcopy, pickle.dumps):
            for part in (env, env.group._board, env.group.bells[0]):
                with pytest.raises(TypeError, match="cannot"):
                    copied(part)
        gc.collect()
        bells = [one for bell in env.group.bells for one in bell.descriptors]
        for descriptor in [env.group._board.descriptor, *bells]:
            os.fstat(descriptor)
        env.rollout(3)
