"""Envs that fail: who, where and when is said, the cause is kept, and no whole frame is lost."""

import functools
import os
import signal
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from swath.collectors import Collector
from swath.collectors.utils import restore_next
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import EnvError, UsageError
from swath.seeding import env_seed
from swath.testing import CountingEnv, CrashingEnv, check_transitions

SEED = 13
# TorchRL, once imported, makes "spawn" the default, which is right but slow for a test.
forked = functools.partial(AsyncVectorEnv, context="fork")


def crashing(**kwargs):
    return lambda: CrashingEnv(exception=KeyError("mass"), **kwargs)


def located(index, step):
    return rf"\[env {index}, step {step}, seed {env_seed(SEED, index)}\]"


KINDS = {
    "alone": (lambda bad: bad, 0, 1),
    "first of a list": (lambda bad: [bad, CountingEnv, CountingEnv], 0, 3),
    "second of a list": (lambda bad: [CountingEnv, bad, CountingEnv], 1, 3),
    "in a SerialEnv": (lambda bad: SerialEnv(3, [CountingEnv, CountingEnv, bad]), 2, 3),
    "in a joined list": (lambda bad: [SyncVectorEnv([CountingEnv] * 2), bad], 2, 3),
}
every_kind = pytest.mark.parametrize(("make", "index", "n"), KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("at", [0, 7, 25])
def test_an_exception_in_step_says_where_and_loses_no_frame(make, index, n, at):
    with Collector(make(crashing(at_step=at)), frames_per_batch=10 * n, seed=SEED) as collector:
        batches = [collector.next() for _ in range(at // 10)]
        with pytest.raises(EnvError, match=r"raised KeyError: 'mass' in step\(\)") as caught:
            collector.next()
        error = caught.value
        assert str(error).endswith(f"[env {index}, step {at}, seed {env_seed(SEED, index)}]")
        assert (error.env, error.step, error.seed) == (index, at, env_seed(SEED, index))
        assert isinstance(error.__cause__, KeyError)
        rest = collector.partial()
        batches += [] if rest is None else [rest]
        # All whole steps, and of the step that failed the envs before the one that failed.
        assert (check_transitions(batches) if batches else 0) == at * n + index
        assert collector.partial() is None
        assert check_transitions(collector.next()) == 10 * n


STEPPED_APART = {
    "in a list": lambda bad: [CountingEnv, bad, CountingEnv],
    "in a joined list": lambda bad: [SyncVectorEnv([CountingEnv]), bad, CountingEnv],
    "in processes": lambda bad: ParallelEnv(3, [CountingEnv, bad, CountingEnv], num_workers=2),
}
stepped_apart = pytest.mark.parametrize("make", STEPPED_APART.values(), ids=STEPPED_APART)


@stepped_apart
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("call", ["at_step", "at_reset"])
def test_limits_hold_and_next_observations_are_there_in_the_step_that_breaks(make, compact, call):
    options = {"frames_per_batch": 60, "max_frames_per_traj": 3, "compact_obs": compact}
    for at in range(1, 9):
        bad = crashing(**{call: at // 2 if call == "at_reset" and at > 1 else at})
        with Collector(make(bad), seed=at, **options) as collector:
            with pytest.raises(EnvError, match="mass"):
                collector.next()
            rest = collector.partial()
            rest = restore_next(rest) if compact else rest
            assert check_transitions(rest, max_frames_per_traj=3) == collector.stats()["frames"]
            frames = rest[rest["collector", "mask"]] if "mask" in rest["collector"] else rest
            assert frames["next", "done"].sum() == collector.stats()["episodes"]


@pytest.mark.parametrize("make", [STEPPED_APART["in a list"], STEPPED_APART["in processes"]])
def test_rows_of_envs_that_stay_ended_are_no_frames_of_a_step_that_breaks(make):
    for at in range(1, 9):
        options = {"frames_per_batch": 60, "reset_when_done": False, "seed": at}
        envs = make(crashing(at_step=at, longest=10**6))
        with Collector(envs, **options) as collector:
            with pytest.raises(EnvError, match="mass"):
                collector.next()
            rest = collector.partial()
            assert rest["collector", "mask"].sum() == collector.stats()["frames"]
            assert rest["next", "reward"][rest["collector", "mask"]].all()


@every_kind
def test_an_exception_in_a_later_reset_says_where_and_loses_no_frame(make, index, n):
    bad = crashing(at_reset=3)
    with Collector(make(bad), frames_per_batch=100 * n, seed=SEED) as collector:
        with pytest.raises(EnvError, match=r"raised KeyError: 'mass' in reset\(\)") as caught:
            collector.next()
        assert caught.value.env == index
        assert isinstance(caught.value.__cause__, KeyError)
        rest = collector.partial()
        assert check_transitions(rest) == caught.value.step * n
        ends = rest.reshape(n, -1)["next", "done"][index, :, 0]
        assert ends.sum() == 3
        assert ends[-1]


@every_kind
def test_an_exception_in_the_first_reset_fails_the_construction(make, index, n):
    closed = []

    class Noting(CrashingEnv):
        def close(self):
            closed.append(True)

    with pytest.raises(EnvError, match=r"'mass' in reset\(\).*" + located(index, 0)) as caught:
        Collector(
            make(lambda: Noting(at_reset=0, exception=KeyError("mass"))),
            frames_per_batch=10 * n,
            seed=SEED,
        )
    assert isinstance(caught.value.__cause__, KeyError)
    assert closed == [True]


@pytest.mark.parametrize("kind", [SyncVectorEnv, forked], ids=["sync", "async"])
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # gymnasium's log of the traceback
def test_an_exception_in_a_vector_env_keeps_its_cause_and_the_whole_steps(kind):
    env = kind([CountingEnv, crashing(at_step=7), CountingEnv])
    with Collector(env, frames_per_batch=60, seed=SEED) as collector:
        with pytest.raises(EnvError, match=r"KeyError: .*mass.* in step\(\)") as caught:
            collector.next()
        assert isinstance(caught.value.__cause__, KeyError)
        assert (caught.value.env, caught.value.step, caught.value.seed) == (None, 7, SEED)
        assert check_transitions(collector.partial()) == 21


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting:UserWarning")
def test_a_killed_worker_of_a_vector_env_is_seen_and_the_others_are_ended():
    env = forked([CountingEnv] * 3)
    with Collector(env, frames_per_batch=60, seed=SEED) as collector:
        collector.next()
        os.kill(env.processes[1].pid, signal.SIGKILL)
        env.processes[1].join()
        with pytest.raises(EnvError, match=r"(EOFError|BrokenPipeError|ConnectionResetError)"):
            collector.next()
    assert not any(process.is_alive() for process in env.processes)


def leaving(spoil, after=4, call="step"):
    """Make an env whose answer is spoiled from one call on."""

    class Leaving(CountingEnv):
        calls = -1

        def step(self, action):
            self.calls += 1
            answer = super().step(action)
            return spoil(*answer) if call == "step" and self.calls >= after else answer

        def reset(self, **kwargs):
            answer = super().reset(**kwargs)
            return spoil(*answer) if call == "reset" and self.calls >= after else answer

    return Leaving


WRONG_STEPS = {
    "shape": (
        lambda o, *rest: (o[:2], *rest),
        r"'observation' has shape \(2,\) and dtype int64, but .* declares \(3,\) and int64",
    ),
    "dtype": (lambda o, *rest: (o / 2, *rest), r"dtype float64, but .* declares \(3,\) and int64"),
    "nothing seen": (lambda o, *rest: (None, *rest), r"shape \(\) and dtype object"),
    "ragged": (lambda o, *rest: ([[1, 2], 3], *rest), r"has no array for 'observation'"),
    "four values": (
        lambda *answer: answer[:4],
        r"did not return \(observation, reward, .*ValueError: not",
    ),
    "nothing": (
        lambda *answer: None,
        r"did not return \(observation, reward, .*TypeError: cannot unpack",
    ),
    "no reward": (
        lambda o, r, *rest: (o, "good", *rest),
        r"returned 'good' as reward; a number was expected",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_what_step_returns_is_checked_at_every_step(spoil, message):
    envs = [CountingEnv, leaving(spoil)]
    with Collector(envs, frames_per_batch=40, seed=SEED) as collector:
        with pytest.raises(EnvError, match=message) as caught:
            collector.next()
        assert (caught.value.env, caught.value.step) == (1, 4)
        assert check_transitions(collector.partial()) == 9


WRONG_RESETS = {
    "shape": (lambda o, i: (o[:2], i), r"has shape \(2,\)"),
    "no info": (lambda o, i: o, r"reset\(\) must return \(observation, info\); it returned array"),
    "nothing": (lambda o, i: None, r"it returned None"),
}


@pytest.mark.parametrize("after", [-1, 4], ids=["first", "later"])
@pytest.mark.parametrize(("spoil", "message"), WRONG_RESETS.values(), ids=WRONG_RESETS)
def test_what_reset_returns_is_checked_at_every_reset(spoil, message, after):
    def run():
        with Collector(leaving(spoil, after, "reset"), frames_per_batch=40, seed=SEED) as collector:
            collector.next()

    with pytest.raises(EnvError, match=message) as caught:
        run()
    assert caught.value.env == 0


OUTCOMES = {
    "reward None": (1, None, r"step\(\) returned None as reward; a number was expected"),
    "reward in text": (1, "1", r"returned '1' as reward"),
    "reward list": (1, [1.0, 2.0], r"returned \[1.0, 2.0\] as reward"),
    "terminated None": (2, None, r"returned None as terminated; a bool was expected"),
    "terminated in text": (2, "yes", r"returned 'yes' as terminated"),
    "truncated None": (3, None, r"returned None as truncated"),
    "truncated NaN": (3, float("nan"), r"returned nan as truncated"),
}


@pytest.mark.parametrize("make", ["lone", "list", "parallel"])
@pytest.mark.parametrize(("place", "value", "message"), OUTCOMES.values(), ids=OUTCOMES)
def test_an_outcome_that_is_none_is_refused_where_it_comes(make, place, value, message):
    def spoil(*answer):
        return tuple(value if n == place else one for n, one in enumerate(answer))

    bad = leaving(spoil, after=7)
    env = {
        "lone": lambda: bad,
        "list": lambda: [CountingEnv, bad],
        "parallel": lambda: ParallelEnv(2, [CountingEnv, bad]),
    }[make]()
    index = 0 if make == "lone" else 1
    with Collector(env, frames_per_batch=20 * (index + 1), seed=SEED) as collector:
        with pytest.raises(EnvError, match=rf"{message}.* \[env {index}, step 7, seed"):
            collector.next()
        assert check_transitions(collector.partial()) == 7 * (index + 1) + index


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_outcome_of_a_vector_env_that_is_none_is_refused(place):
    class Spoilt(SyncVectorEnv):
        def step(self, actions):
            answer = list(super().step(actions))
            answer[place] = np.array([None] * self.num_envs)
            return tuple(answer)

    name = ("reward", "terminated", "truncated")[place - 1]
    with (
        Collector(Spoilt([CountingEnv] * 2), frames_per_batch=20) as collector,
        pytest.raises(EnvError, match=rf"returned array\(\[None, .* as {name}.*step 0"),
    ):
        collector.next()


@pytest.mark.parametrize("flag", [0, np.bool_(False), np.array(False), torch.tensor(False)])
@pytest.mark.parametrize(
    "reward", [float("nan"), 3, True, np.float32(2), np.array([2.0]), torch.tensor(2.0)]
)
def test_numbers_of_all_kinds_are_rewards_and_flags(flag, reward):
    def spoil(*answer):
        return answer[0], reward, flag or answer[2], answer[3] or flag, answer[4]

    with Collector(leaving(spoil, after=0), frames_per_batch=20) as collector:
        batch = collector.next()
    got = batch["next", "reward"]
    number = float(torch.as_tensor(reward))
    assert got.isnan().all() if number != number else (got == number).all()
    assert batch["next", "done"].any()
    assert not batch["next", "done"].all()


def test_an_observation_that_lacks_an_entry_is_named_by_its_key():
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Discrete(2)]))

    class Lacking(CountingEnv):
        def _observe(self):
            return {"a": 1, "b": ()} if self.count == 1 else super()._observe()

    env = Lacking(observation_space=space)
    with Collector(env, frames_per_batch=10, seed=SEED) as collector:
        with pytest.raises(EnvError, match=r"has no array for \('b', '0'\).*IndexError"):
            collector.next()


def test_numbers_of_a_narrower_kind_are_taken_and_of_a_wider_one_refused():
    class Numbers(CountingEnv):
        seen = None

        def _observe(self):
            return self.seen

    env = Numbers()
    env.observation_space = spaces.Box(0, 255, (2,), np.float32)
    for env.seen in ([1, 2], np.array([1, 2], np.int64), np.array([1, 2], np.float64), (1.0, 2.0)):
        with Collector(GymEnv(env), frames_per_batch=5) as collector:
            assert (collector.next()["observation"] == collector.next()["observation"]).all()
    env.observation_space = spaces.Box(0, 255, (2,), np.uint8)
    env.seen = np.array([1, 300], np.int64)
    with pytest.raises(EnvError, match=r"dtype int64, but .* uint8"):
        Collector(env, frames_per_batch=5)


def test_an_info_that_changes_its_form_is_an_error_that_says_how_to_store_it():
    class Growing(CountingEnv):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info | {"seen": np.zeros(3) if self.count == 2 else 0.0}

    for form in (["seen"], {"seen": spaces.Box(0, 1, ())}):
        env = SerialEnv(2, lambda: Growing(longest=30), info_keys=form)
        with Collector(env, frames_per_batch=40, seed=SEED) as collector:
            with pytest.raises(EnvError, match=r"info\['seen'\] is a ndarray of shape \(3,\)"):
                collector.next()


def test_an_info_that_is_no_number_is_refused_or_an_error():
    class Naming(CountingEnv):
        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {"name": "x"}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"name": "x", "late": {"r": 1.0}}

    with pytest.raises(UsageError, match=r"info\['name'\] is a str, not a number"):
        GymEnv(Naming(), info_keys=["name"])
    with pytest.raises(UsageError, match="list of names; got the string 'name'"):
        GymEnv(Naming(), info_keys="name")
    with pytest.raises(UsageError, match=r"info_keys\['name'\] must be a Box or Discrete"):
        GymEnv(Naming(), info_keys={"name": spaces.Dict()})
    with Collector(GymEnv(Naming(), info_keys=["late"]), frames_per_batch=40) as collector:
        with pytest.raises(EnvError, match=r"info\['late'\] is a dict"):
            collector.next()


@pytest.mark.parametrize(
    "make",
    [
        lambda keys: GymEnv(CountingEnv(), info_keys=keys),
        lambda keys: SerialEnv(2, CountingEnv, info_keys=keys),
        lambda keys: GymEnv(SyncVectorEnv([CountingEnv] * 2), info_keys=keys),
    ],
)
def test_an_info_that_never_comes_is_told_of_once(make):
    with Collector(make(["stepp", "step"]), frames_per_batch=40, seed=SEED) as collector:
        with pytest.warns(
            UserWarning, match="info_keys names 'stepp', but no info had it until"
        ) as told:
            batch = collector.next()
        assert len(told) == 1
        collector.next()  # a warning would be an error here
        assert batch["next", "info", "stepp"].isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Collector(make(["step"]), frames_per_batch=40, seed=SEED) as collector:
            collector.next()


def test_ctrl_c_in_an_env_is_no_error_of_the_env():
    env = CrashingEnv(at_step=5, exception=KeyboardInterrupt())
    with Collector(env, frames_per_batch=20, seed=SEED) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert check_transitions(collector.partial()) == 5


def test_an_env_that_is_made_but_has_no_spaces_is_refused():
    with pytest.raises((UsageError, AttributeError), match="observation_space"):
        Collector(gym.Env(), frames_per_batch=10)
