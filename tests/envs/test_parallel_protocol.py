"""`ParallelEnv`: whoever is halted or broken off, wherever it is, no env makes a step twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from preempt_kit import Halts, Words, halted_everywhere, halting_processes, let_processes_act

from swath.collectors import Collector, MultiSyncCollector
from swath.envs import ParallelEnv, SerialEnv, parallel
from swath.errors import EnvError, UsageError, WorkerError
from swath.links.channel import Channel
from swath.testing import CountingEnv, check_transitions


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def broken_off():
    raise KeyboardInterrupt


def in_both(makers):
    return ParallelEnv(len(makers), makers, num_workers=2)


# -- halted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 2}, {"reset_when_done": False}])
def test_no_step_is_made_twice_when_your_process_is_halted_between_two_stores(options):
    longest = options.get("max_frames_per_traj")
    with Collector(ParallelEnv(3, CountingEnv, num_workers=2), frames_per_batch=18, **options) as c:
        group = c.group
        halts = Halts(lambda: let_processes_act(group))
        group.order = Words(group.order, halts)
        for _ in range(8):
            c.reset()
            batches = [one for one in (c.next(), c.next()) if one is not None]
            check_transitions(batches, max_frames_per_traj=longest)
        assert halts.count > 100


def test_no_row_is_read_before_it_is_there_when_a_process_is_halted_between_two_stores():
    env = ParallelEnv(3, halting_processes(CountingEnv), num_workers=2)
    with Collector(env, frames_per_batch=60, total_frames=240, seed=0) as collector:
        assert check_transitions([batch.clone() for batch in collector]) == 240


# -- broken off -----------------------------------------------------------------------------------


def test_ctrl_c_between_any_two_stores_leaves_transitions_only():
    with Collector(ParallelEnv(3, CountingEnv, num_workers=2), frames_per_batch=6) as collector:
        group, order = collector.group, collector.group.order

        def interrupted(halts):
            group.order = Words(order, halts)
            try:
                collector.reset()
                check_transitions([collector.next()])
            except KeyboardInterrupt:
                group.order = order
                part = collector.partial()
                check_transitions([] if part is None else [part])
            group.order = order
            check_transitions([collector.next(), collector.next()])

        assert len([*halted_everywhere(interrupted, ctrl_c)]) >= 9


@pytest.mark.parametrize("slow", [0, 1])
def test_processes_that_are_late_for_a_step_that_was_broken_off_make_no_other_one(slow):
    makers = [CountingEnv, CountingEnv]
    makers[slow] = halting_processes(CountingEnv, 0.003)
    with Collector(in_both(makers), frames_per_batch=8) as collector:
        waits = 4 * len(collector.group.waits)  # in a rollout; with many cores all processes spin
        for at in range(waits + 1):
            left = at

            def wait(self, *part, wait=parallel._BoundParallel._await):
                nonlocal left
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
                wait(self, *part)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel._BoundParallel, "_await", wait)
                if at:
                    with pytest.raises(KeyboardInterrupt):
                        collector.next()
            if (part := collector.partial()) is not None:
                check_transitions([part])
            check_transitions([collector.next(), collector.next()])


class Gated(gym.Env):
    """Counts; its first episode ends with the third step, which waits for a file."""

    observation_space = spaces.Box(-1, 1e9, (1,), np.float64)
    action_space = spaces.Discrete(2)
    episode = -1

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(1), {}

    def step(self, action):
        self.t += 1
        last = self.t == 3 and self.episode == 1
        while last and not self.gate.exists():
            (self.gate.parent / "waits").touch()
            time.sleep(0.001)
        return np.full(1, float(self.t)), 1.0, last, False, {}


def test_what_a_late_step_writes_is_in_no_later_rollout(tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    env = ParallelEnv(1, lambda: Gated(gate))

    steps = 0

    def wait(self, *part, wait=parallel._BoundParallel._await):
        nonlocal steps
        steps += 1
        if steps == 3:
            while not (tmp_path / "waits").exists():
                time.sleep(0.001)
            raise KeyboardInterrupt
        wait(self, *part)

    with Collector(env, frames_per_batch=5) as collector:
        collector.reset()
        with monkeypatch.context() as patch:
            patch.setattr(parallel._BoundParallel, "_await", wait)
            with pytest.raises(KeyboardInterrupt):
                collector.next()
        assert collector.partial().numel() == 2  # and its slab is free again
        wait_for = parallel.wait

        def wait_late(things):
            gate.touch()  # only now that somebody waits for the process
            return wait_for(things)

        monkeypatch.setattr(parallel, "wait", wait_late)
        batch = collector.next()
        assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4]
        assert not batch["next", "terminated"].any()
        assert collector.stats()["slabs"] == 1


def test_a_step_after_one_that_was_broken_off_is_refused_until_all_are_reset(monkeypatch):
    env = ParallelEnv(2, CountingEnv, num_workers=2)
    td = env.reset()
    td["action"] = torch.ones(2, dtype=torch.int64)
    with monkeypatch.context() as patch:
        patch.setattr(parallel._BoundParallel, "_await", lambda *_: broken_off())
        with pytest.raises(KeyboardInterrupt):
            env.step(td)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"was interrupted.*call reset\(\)"):
            env.step(td)
    env.reset(torch.tensor([True, False]))
    with pytest.raises(UsageError, match="was interrupted"):
        env.step(td)
    td = env.reset()
    td["action"] = torch.ones(2, dtype=torch.int64)
    td = env.step(td)
    assert (td["next", "observation"][:, :2] == td["observation"][:, :2]).all()
    assert (td["next", "observation"][:, 2] == 1).all()
    env.close()


@pytest.mark.parametrize("call", ["send", "_exactly"])
def test_ctrl_c_comes_never_in_the_middle_of_the_messages(call, monkeypatch):
    """At each message in turn, sent or read: all processes get it, and its answer is read whole."""
    env = in_both([CountingEnv] * 4)
    plain = getattr(Channel, call)

    def interrupted(halts):
        def halting(self, *args):
            done = plain(self, *args)
            halts()
            return done

        with monkeypatch.context() as patch:
            patch.setattr(Channel, call, halting)
            try:
                env.reset()
                env.set_seed(3)
            except KeyboardInterrupt:
                pass
        check_transitions([env.rollout(12, break_when_any_done=False)])
        td = env.rand_step(env.reset())
        assert (td["next", "observation"][:, 2] == 1).all()

    assert len([*halted_everywhere(interrupted, ctrl_c)]) >= 4
    env.close()


def test_a_collector_goes_on_after_ctrl_c_in_the_middle_of_a_message(monkeypatch):
    plain, left = Channel._exactly, 3

    def interrupted(self, count):
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)
        return plain(self, count)

    with Collector(ParallelEnv(2, CountingEnv), frames_per_batch=20) as collector:
        monkeypatch.setattr(Channel, "_exactly", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert left <= 0
        check_transitions([collector.next(), collector.next()])


# -- other envs in the place of those that are bound ----------------------------------------------


def resumed(collector):
    """Return what follows a state, twice: with other rollouts in between."""
    collector.next()
    state = collector.state_dict()
    expected = [collector.next().clone() for _ in range(2)]
    collector.next()
    collector.load_state_dict(state)
    return expected, [collector.next().clone() for _ in range(2)]


def check_resumed(collector):
    with collector:
        for _ in range(2):
            expected, again = resumed(collector)
            check_transitions(again)
            for one, other in zip(expected, again, strict=True):
                for key, value in one.items(True, True):
                    assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 4}], ids=str)
def test_a_state_is_resumed_by_a_collector_that_has_gone_on(options):
    with Collector(ParallelEnv(3, CountingEnv, num_workers=2), frames_per_batch=30, seed=0) as c:
        check_resumed(c)
    for env in (
        [lambda: ParallelEnv(2, CountingEnv, num_workers=2), lambda: SerialEnv(2, CountingEnv)],
        lambda: gym.vector.SyncVectorEnv([CountingEnv] * 2),
    ):
        check_resumed(Collector(env, frames_per_batch=40, seed=0))


def test_a_state_is_resumed_by_workers_with_envs_in_other_processes():
    makers = [lambda: ParallelEnv(2, CountingEnv, num_workers=2)] * 2
    check_resumed(MultiSyncCollector(makers, frames_per_batch=80, seed=0))


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_an_env_by_itself_steps_those_that_a_collector_has_put_in_their_place(kind):
    env = kind(2, CountingEnv)
    env.reset()
    with Collector(env, frames_per_batch=20, seed=0) as collector:
        collector.next()
        state = collector.state_dict()
        td = env.rand_step(env.reset())
        collector.load_state_dict(state)
        for _ in range(3):
            td = env.reset()
            after = env.rand_step(td)["next", "observation"]
            assert torch.equal(after, td["observation"] + torch.tensor([0, 0, 1]))


# -- failures -------------------------------------------------------------------------------------


class Verbose(CountingEnv):
    """Raises an error with an observation in it, at its third step."""

    def __init__(self, nbytes):
        super().__init__(longest=10**6)
        self.nbytes = nbytes

    def step(self, action):
        if self.count == 2:
            raise ValueError("wrong frames", np.zeros(self.nbytes, np.uint8))
        return super().step(action)


@pytest.mark.parametrize("nbytes", [1000, 3_000_000])
def test_an_error_of_any_size_arrives(nbytes):
    env = in_both([lambda: Verbose(nbytes)] * 2)
    with Collector(env, frames_per_batch=40) as collector:
        for _ in range(2):  # a new episode begins
            with pytest.raises(EnvError, match="wrong frames") as caught:
                collector.next()
            assert len(caught.value.__cause__.args[1]) == nbytes
            assert collector.partial().numel() == 4


def test_a_large_error_that_nobody_has_read_holds_up_nothing(monkeypatch):
    with Collector(in_both([lambda: Verbose(3_000_000)] * 2), frames_per_batch=40) as collector:
        with monkeypatch.context() as patch:
            patch.setattr(parallel._BoundParallel, "_fail", lambda *_: broken_off())
            with pytest.raises(KeyboardInterrupt):
                collector.next()
        state = collector.state_dict()
        collector.load_state_dict(state)
        with pytest.raises(EnvError, match="wrong frames"):
            collector.next()


def test_shutdown_waits_no_longer_than_it_was_told(tmp_path, monkeypatch):
    class Blocking(CountingEnv):
        def step(self, action):
            (tmp_path / "blocks").touch()
            time.sleep(1000)

    def wait(*args):
        while not (tmp_path / "blocks").exists():
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "_GRACE", 1000.0)  # more than a test may take
    for env in (lambda: ParallelEnv(2, Blocking), [lambda: ParallelEnv(1, Blocking)] * 2):
        collector = Collector(env, frames_per_batch=8)
        with monkeypatch.context() as patch:
            patch.setattr(parallel._BoundParallel, "_await", wait)
            with pytest.raises(KeyboardInterrupt):
                collector.next()
        collector.shutdown(0.2)


def test_ctrl_c_while_an_env_that_blocks_is_closed_leaves_no_process(tmp_path, monkeypatch):
    class Stubborn(CountingEnv):
        def close(self):
            (tmp_path / "closing").touch()
            time.sleep(1000)

    def interrupted(self, timeout=0.0, plain=parallel.ProcessLink.exit_code):
        if timeout > 100:
            while not (tmp_path / "closing").exists():
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)
        return plain(self, timeout)

    monkeypatch.setattr(parallel.ProcessLink, "exit_code", interrupted)
    env = ParallelEnv(2, Stubborn, num_workers=2)
    monkeypatch.setattr(parallel, "_GRACE", 1000.0)
    with pytest.raises(KeyboardInterrupt):
        env.close()
    env.close()


def test_a_maker_that_ends_its_process_is_told_in_words():
    with pytest.raises(EnvError, match=r"envs 1 to 1 .*exit code 7") as caught:
        ParallelEnv(2, [CountingEnv, lambda: os._exit(7)], num_workers=2)
    assert isinstance(caught.value.__cause__, WorkerError)


CALLS = {
    "reset": lambda env, _: env.reset(),
    "reset of some": lambda env, _: env.reset(torch.tensor([False, True])),
    "step": lambda env, _: env.rand_step(),
    "rollout": lambda env, _: env.rollout(3),
    "env.set_seed": lambda env, _: env.set_seed(3),
    "next": lambda _, collector: collector.next(),
    "set_seed": lambda _, collector: collector.set_seed(3),
    "state_dict": lambda _, collector: collector.state_dict(),
    "load_state_dict": lambda env, collector: collector.load_state_dict(env.kept),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("used", [True, False])
def test_whatever_is_called_after_a_process_was_killed_says_so(call, used):
    env = ParallelEnv(2, CountingEnv, num_workers=2)
    with Collector(env, frames_per_batch=8) as collector:
        if used:
            env.reset()
        env.kept = collector.state_dict()
        os.kill(env.group.links[1].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EnvError, match=r"envs 1 to 1 .*SIGKILL") as caught:
                CALLS[call](env, collector)
            assert isinstance(caught.value.__cause__, WorkerError)


def test_what_an_env_returned_wrongly_is_told_without_internal_errors():
    class Short(CountingEnv):
        def reset(self, **kwargs):
            super().reset(**kwargs)
            return "nothing"

    env = in_both([CountingEnv, Short])
    with pytest.raises(EnvError, match=r"must return \(observation, info\)") as caught:
        env.reset()
    assert caught.value.__cause__ is None
    env.close()
