"""A collector is for the process that made it, and for one thread at a time."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import traceback
from types import SimpleNamespace

import pytest

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import ReplayBuffer
from swath.envs import ParallelEnv, SerialEnv
from swath.errors import ClosedError, UsageError
from swath.owner import Owner
from swath.testing import CountingEnv, check_transitions

SHARED = {
    "parallel": lambda **kw: Collector(ParallelEnv(2, CountingEnv), **kw),
    "sync": lambda **kw: MultiSyncCollector([CountingEnv] * 2, **kw),
    "async": lambda **kw: MultiAsyncCollector([CountingEnv] * 2, **kw),
    "one": lambda **kw: AsyncCollector(CountingEnv, **kw),
}
KINDS = {"single": lambda **kw: Collector(SerialEnv(2, CountingEnv), **kw), **SHARED}


def in_child(function):
    """Call a function in a fork of this process; what it raises there is an error here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Held:
    """A hook that stays in a batch until it is let go."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self, batch):
        self.inside.set()
        assert self.go_on.wait(30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_thread_is_refused_and_says_who_is_inside(kind):
    held, batches = Held(), []
    options = {"frames_per_batch": 20, "seed": 0, "post_collect_hook": held}
    with KINDS[kind](**options) as collector:
        first = threading.Thread(target=lambda: batches.append(collector.next()), name="the first")
        first.start()
        assert held.inside.wait(30)
        state = {"format": 1}
        for call in (
            collector.next,
            collector.rollout,
            collector.partial,
            collector.state_dict,
            lambda: collector.load_state_dict(state),
            collector.reset,
            lambda: collector.set_seed(1),
        ):
            with pytest.raises(UsageError, match=r"thread 'the first' is using it.*one thread"):
                call()
        assert collector.stats()["frames"] == 20
        collector.update_policy_weights_()
        held.go_on.set()
        first.join(30)
        batches += [collector.next(), collector.next()]
        assert check_transitions(batches) == 60


@pytest.mark.parametrize("call", ["next", "rollout", "partial"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_not_given_the_frames_of_the_batch_that_it_is_called_for(kind, call):
    refused = []

    def hook(batch):
        with pytest.raises(UsageError, match=f"{call}.*inside another call"):
            getattr(collector, call)()
        refused.append(collector.stats()["frames"])
        collector.update_policy_weights_()
        collector.state_dict()

    options = {"frames_per_batch": 20, "total_frames": 60, "seed": 0, "post_collect_hook": hook}
    with KINDS[kind](**options) as collector:
        assert check_transitions(list(collector)) == 60
    assert len(refused) == 3


class Signalling(CountingEnv):
    """At its third step the process that collects is told to end, and waits for that step."""

    def __init__(self, process):
        super().__init__()
        self.process, self.steps = process, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            os.kill(self.process, signal.SIGUSR1)
            time.sleep(60)
        return super().step(action)


@pytest.mark.parametrize("kind", ["parallel", "sync", "async"])
def test_who_waits_hears_that_a_signal_handler_has_shut_the_collector_down(kind):
    make = functools.partial(Signalling, os.getpid())
    collector = {
        "parallel": lambda: Collector(ParallelEnv(2, make), frames_per_batch=20),
        "sync": lambda: MultiSyncCollector([make] * 2, frames_per_batch=20),
        "async": lambda: MultiAsyncCollector([make] * 2, frames_per_batch=20),
    }[kind]()
    before = signal.signal(signal.SIGUSR1, lambda *_: collector.shutdown(0.1))
    try:
        with pytest.raises(ClosedError, match="was shut down"):
            collector.next()
    finally:
        collector.shutdown(0.1)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_an_env_by_itself_is_for_one_thread_too(make):
    inside, go_on = threading.Event(), threading.Event()

    def policy(observation):
        inside.set()
        assert go_on.wait(30)
        return observation[..., 0].long() * 0

    env = make(2, CountingEnv)
    first = threading.Thread(target=lambda: env.rollout(2, policy), name="the first")
    first.start()
    assert inside.wait(30)
    for call in (env.reset, env.rand_step, lambda: env.rollout(3), lambda: env.set_seed(1)):
        with pytest.raises(UsageError, match="thread 'the first' is using it"):
            call()
    go_on.set()
    first.join(30)
    env.rollout(3)
    env.close()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_come_at_any_time_get_rows_that_are_transitions(kind):
    batches, refused = [], []

    def collect():
        for _ in range(20):
            try:
                batches.append(collector.next())
            except UsageError as error:
                refused.append(str(error))

    with KINDS[kind](frames_per_batch=20, seed=0) as collector:
        threads = [threading.Thread(target=collect) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        frames = sum(batch.numel() for batch in batches)
        assert frames == collector.stats()["frames"] > 0
    seen = {tuple(row) for batch in batches for row in batch["observation"].reshape(-1, 3).tolist()}
    assert len(seen) == frames
    assert len(batches) + len(refused) == 80


@pytest.mark.parametrize("kind", SHARED)
def test_a_fork_is_refused_and_ends_nothing(kind):
    batches = []
    buffer = SimpleNamespace(extend=lambda batch: batches.append(batch.clone()))
    with SHARED[kind](frames_per_batch=20, seed=0, replay_buffer=buffer) as collector:
        state = collector.state_dict()
        assert collector.next() is None

        def use():
            for call in (
                collector.next,
                lambda: next(iter(collector)),
                collector.rollout,
                collector.partial,
                collector.start,
                collector.resume,
                collector.state_dict,
                lambda: collector.load_state_dict(state),
                collector.reset,
                lambda: collector.set_seed(1),
                collector.update_policy_weights_,
            ):
                with pytest.raises(UsageError, match=f"made in process {os.getppid()}.* a fork"):
                    call()
            collector.shutdown()
            collector.shutdown()

        in_child(use)
        collector.next()
        assert check_transitions(batches) == 40


# Ray ends its cluster from any fork that ends as scripts do.
@pytest.mark.usefixtures("no_cluster")
def test_a_fork_that_ends_as_scripts_do_ends_nothing_of_its_parents():
    with (
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=20, seed=0) as collector,
        Collector(ParallelEnv(2, CountingEnv), frames_per_batch=20, seed=0) as other,
    ):
        batches = [collector.next()], [other.next()]

        def end():
            import atexit
            import gc

            nonlocal collector, other
            del collector, other
            gc.collect()
            atexit._run_exitfuncs()

        in_child(end)
        for one, kept in ((collector, batches[0]), (other, batches[1])):
            kept.append(one.next())
            assert check_transitions(kept) == 40


def test_an_env_in_other_processes_is_refused_in_a_fork():
    env = ParallelEnv(2, CountingEnv)
    env.rollout(3)

    def use():
        for call in (env.reset, env.rand_step, lambda: env.rollout(3), lambda: env.set_seed(1)):
            with pytest.raises(UsageError, match="a fork of it"):
                call()
        env.close()

    in_child(use)
    env.rollout(3)
    env.close()


def test_a_fork_has_copies_of_envs_in_this_process():
    with Collector(SerialEnv(2, CountingEnv), frames_per_batch=20, seed=0) as collector:
        first = collector.next()

        def use():
            assert check_transitions([first, collector.next()]) == 40

        in_child(use)
        assert check_transitions([first, collector.next()]) == 40


def test_a_fork_of_who_collects_in_the_background_is_refused():
    with (
        ReplayBuffer(1000, batch_size=8, min_size=20) as buffer,
        Collector(CountingEnv, frames_per_batch=20, seed=0, replay_buffer=buffer) as collector,
    ):
        collector.start()
        buffer.sample()
        with collector.pause():

            def use():
                for call in (collector.next, collector.state_dict, buffer.sample):
                    with pytest.raises(UsageError, match="a fork of it"):
                        call()

            in_child(use)
        buffer.sample()


def test_a_fork_of_who_draws_ahead_is_refused():
    with ReplayBuffer(1000, batch_size=8, prefetch=2) as buffer:
        with Collector(CountingEnv, frames_per_batch=20) as collector:
            buffer.extend(collector.next())
        buffer.sample()

        def use():
            for _ in range(2):
                with pytest.raises(UsageError, match=r"prefetch.*a fork of it"):
                    buffer.sample()

        in_child(use)
        buffer.sample()


def test_a_turn_whose_end_was_broken_off_is_over_all_the_same():
    owner, refused = Owner("thing"), []

    def other():
        with owner.turn("g()", outermost=True):
            refused.append(False)

    def broken_off():
        owner.turn("f()", outermost=True).__enter__()  # and no end

    broken_off()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    other()
    assert refused == [False, False]
