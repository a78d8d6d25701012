"""What becomes of a run, over each backend, when workers or your process fail or end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import multi_kit as kit
import numpy as np
import pytest
import torch

from swath.errors import ClosedError, EnvError, WorkerError
from swath.seeding import env_seed
from swath.testing import CountingEnv, CrashingEnv, SlowEnv, check_transitions

pytestmark = pytest.mark.timeout(240)
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
# `mpirun` ends all ranks when one dies; tests/distributed/test_worlds.py has that.
MAY_DIE = pytest.mark.over("processes", "gloo", "rpc", "ray", "ray-far")
LOCAL = pytest.mark.over("processes", "gloo", "rpc")
# Over processes, tests/collectors has more of the same: each signal, each call, each kind.
ELSEWHERE = pytest.mark.over("gloo", "rpc", "ray", "ray-far")


def make(backend, kind, makers, policy=None, **options):
    options = {"frames_per_batch": 20, "seed": 7, **options}
    return backend.make(kind, makers, policy, **options)


def collect(collector, seen):
    for batch in collector:
        seen.append(batch)


# -- exceptions -----------------------------------------------------------------------------------


@pytest.mark.over("gloo", "rpc", "mpi", "ray", "ray-far")
def test_an_env_that_raises_is_told_with_all_that_is_known(backend):
    def bad():
        return CrashingEnv(at_step=1000, exception=KeyError("mass"))

    seen = []
    makers = [[CountingEnv] * 2, [CountingEnv, bad]]
    # Actors of Ray are started again by default, with other seeds.
    with make(backend, "sync", makers, on_worker_failure="raise") as collector:
        with pytest.raises(EnvError, match=r"KeyError: 'mass'") as caught:
            collect(collector, seen)
        error = caught.value
        assert (error.worker, error.env, error.seed, error.step) == (1, 3, env_seed(7, 3), 1000)
        for words in ("worker 1", "env 3", "step 1000", f"seed {error.seed}"):
            assert words in str(error)
        assert isinstance(error.__cause__, KeyError)
        assert error.__cause__.args == ("mass",)
        last = error
        while last.__cause__ is not None:
            last = last.__cause__
        assert "raise self.exception" in str(last)  # the worker's traceback
        # Of the broken batch, what is whole is there; and then it goes on with fresh episodes.
        rest = collector.partial()
        seen += [] if rest is None else [rest]
        assert collector.stats()["frames"] == check_transitions(seen)
        check_transitions([collector.next() for _ in range(3)])


@pytest.mark.over("processes", "gloo", "rpc", "mpi", "ray", "ray-far")
def test_an_exception_of_any_size_arrives(backend):
    def bad():
        return CrashingEnv(at_step=30, exception=ValueError("wrong", np.zeros(5_000_000, np.uint8)))

    with make(backend, "sync", [CountingEnv, bad], on_worker_failure="raise") as collector:
        with pytest.raises(EnvError, match="wrong") as caught:
            collect(collector, seen := [])
        assert caught.value.__cause__.args[1].nbytes == 5_000_000
        assert check_transitions(seen) == 60
        state = collector.state_dict()  # and the other way, after it
        collector.load_state_dict(state)
        check_transitions([collector.next()])


@pytest.mark.over("processes", "gloo", "rpc", "mpi", "ray")
def test_an_exception_that_cannot_travel_is_told_all_the_same(backend):
    class Odd(Exception):
        def __init__(self, lock, number):
            super().__init__(f"number {number}")
            self.lock = lock

    def bad():
        env = CrashingEnv(at_step=4)
        env.exception = Odd(threading.Lock(), 9)
        return env

    with (
        make(backend, "sync", [bad]) as collector,
        pytest.raises(EnvError, match="Odd: number 9"),
    ):
        collect(collector, [])


@pytest.mark.over("processes", "gloo", "rpc", "mpi", "ray", "ray-far")
@pytest.mark.parametrize("megabytes", [50, 80])
def test_an_exception_of_any_size_comes_whole_or_cut_to_its_words(backend, megabytes):
    """More than any buffer on the way; more than 64 MB are told in words."""

    def bad():
        frame = np.zeros((megabytes, 1 << 20), np.uint8)
        return CrashingEnv(at_step=4, exception=ValueError("no such frame", frame))

    with make(backend, "sync", [bad, CountingEnv], on_worker_failure="raise") as collector:
        with pytest.raises(EnvError, match="no such frame") as caught:
            collect(collector, [])
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError)
        assert len(cause.args) == (2 if megabytes < 64 else 1)
        if megabytes < 64:
            assert cause.args[1].nbytes == megabytes << 20
        collector.next()


@pytest.mark.over("gloo", "rpc", "ray")
def test_an_env_that_cannot_be_made_ends_the_construction(backend):
    def bad():
        raise KeyError("no assets")

    with pytest.raises(Exception, match=r"KeyError: 'no assets'.*worker 1") as caught:
        make(backend, "sync", [CountingEnv, bad])
    assert isinstance(caught.value.__cause__, KeyError)


# -- deaths ---------------------------------------------------------------------------------------


@ELSEWHERE
@KINDS
def test_a_worker_that_dies_at_work_is_seen_at_once(backend, kind):
    died, seen = kit.kill(signal.SIGKILL), []
    makers = [CountingEnv, lambda: kit.Broken("step", 50, died)]
    # Actors of Ray are started again by default; tests/distributed/ray has when that ends.
    with make(backend, kind, makers, on_worker_failure="raise") as collector:
        with pytest.raises(WorkerError, match="worker 1") as caught:
            collect(collector, seen)
        assert caught.value.worker == 1
        rest = collector.partial()
        assert check_transitions([*seen, *([] if rest is None else [rest])])
        # Whatever is asked of it later says so again, and does not wait.
        for ask in (
            lambda: collect(collector, []),
            lambda: collector.update_policy_weights_(wait=True),
            collector.state_dict,
            lambda: collector.set_seed(1),
        ):
            with pytest.raises(WorkerError, match="worker 1"):
                ask()


@pytest.mark.over("gloo", "rpc")
@KINDS
def test_a_worker_that_is_killed_while_idle(backend, kind):
    with make(backend, kind, [kit.wide] * 2, kit.Telling()) as collector:
        batches = [collector.next() for _ in range(3)]
        time.sleep(0.05)
        victim = kit.pids_of(collector)[0]
        os.kill(victim, signal.SIGKILL)
        assert kit.gone([victim])
        with pytest.raises(WorkerError, match="worker 0") as caught:
            collect(collector, batches)
        assert caught.value.worker == 0
        assert check_transitions(batches)


@LOCAL
@KINDS
def test_publishing_to_a_dead_worker_raises_if_it_is_waited_for(backend, kind):
    with make(backend, kind, [kit.wide] * 2, kit.Telling()) as collector:
        collector.next()
        os.kill(kit.pids_of(collector)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="worker 1"):
            collector.update_policy_weights_(wait=True)


@LOCAL
@KINDS
def test_a_worker_that_is_killed_while_weights_are_published(backend, kind):
    policy, seen = kit.Telling(), []
    policy.register_buffer("much", torch.zeros(1_000_000))
    with make(backend, kind, [kit.wide] * 2, policy) as collector:
        collector.next()
        victim = kit.pids_of(collector)[1]
        killer = threading.Timer(0.05, os.kill, (victim, signal.SIGKILL))
        number = 0
        try:
            while kit.alive(victim):
                number += 1
                collector.update_policy_weights_(policy.become(number))
                if number == 2:
                    killer.start()
            with pytest.raises(WorkerError, match="worker 1"):
                collect(collector, seen)
        finally:
            killer.join()
        assert all(kit.told_right(batch) for batch in seen)


# -- restarts -------------------------------------------------------------------------------------


@pytest.mark.over("gloo", "ray", "ray-far")  # with RPC nobody can come back
@KINDS
def test_a_killed_worker_is_replaced_with_current_weights_and_fresh_streams(
    backend, kind, tmp_path
):
    once, policy, batches = str(tmp_path / "once"), kit.Telling(), []
    wide = {"action_space": kit.wide().action_space}
    died = kit.kill(signal.SIGKILL)
    makers = [
        lambda: kit.slow_wide(0.002),
        lambda: kit.Broken("step", 45, died, once, **wide),
    ]
    options = {"total_frames": 1200, "on_worker_failure": "restart"}
    with make(backend, kind, makers, policy, **options) as collector:
        first = kit.pids_of(collector)
        for number, batch in enumerate(collector):
            batches.append(batch)
            assert kit.told_right(batch)
            collector.update_policy_weights_(policy.become(number + 1))
        stats, second = collector.stats(), kit.pids_of(collector)
    assert os.path.exists(once)
    assert check_transitions(batches) == 1200  # fresh streams: a new stamp, new ids
    assert stats["restarts"] == stats["per_worker"][1]["restarts"] == 1
    assert stats["lost"]["rollouts"] == 1
    assert first[0] == second[0]
    assert first[1] != second[1]
    stamps = {row[0] for batch in batches for row in kit.rows(batch)}
    assert len(stamps) == 3
    owners = {}  # no trajectory is of two envs or of two episodes
    for batch in batches:
        ids = batch["collector", "traj_ids"].flatten().tolist()
        for traj, (stamp, episode, _) in zip(ids, kit.rows(batch).tolist(), strict=True):
            assert owners.setdefault(traj, (stamp, episode)) == (stamp, episode)


@pytest.mark.over("gloo")
@KINDS
def test_workers_killed_while_idle_are_restarted_wherever_that_is_seen(backend, kind):
    options = {"on_worker_failure": "restart", "max_restarts": 10, "total_frames": 400}
    with make(backend, kind, [kit.wide] * 2, kit.Telling(), **options) as collector:
        batches = []
        for number in range(3):
            batches.append(collector.next())
            victim = kit.pids_of(collector)[number % 2]
            os.kill(victim, signal.SIGKILL)
            assert kit.gone([victim])
            if number % 2:
                collector.update_policy_weights_(kit.Telling(number), wait=True)
        batches.extend(collector)
        assert collector.stats()["restarts"] == 3
        assert None not in kit.pids_of(collector)
    assert check_transitions(batches) == 400


# -- shutdown -------------------------------------------------------------------------------------


@pytest.mark.over("gloo", "rpc")
def test_shutdown_ends_workers_that_block(backend):
    makers = [CountingEnv, lambda: kit.Broken("step", 30, kit.block)]
    collector = make(backend, "async", makers)
    for _ in range(20):
        collector.next()
    pids = kit.pids_of(collector)
    collector.shutdown(timeout=0.5)
    assert kit.gone(pids, 0.1)


@LOCAL
@KINDS
def test_shutdown_twice_and_everything_after_it(backend, kind):
    collector = make(backend, kind, [CountingEnv] * 2)
    batch = collector.next()
    pids = kit.pids_of(collector)
    collector.shutdown(timeout=600)  # more than a test may take: they end when asked
    collector.shutdown()
    assert kit.gone(pids, 0.1)
    check_transitions(batch)
    for ask in (
        collector.next,
        lambda: list(collector),
        collector.update_policy_weights_,
        collector.state_dict,
        collector.reset,
        lambda: collector.set_seed(1),
        collector.__enter__,
    ):
        with pytest.raises(ClosedError, match="shut down"):
            ask()
    assert collector.stats()["frames"] == batch.numel()


@MAY_DIE
@KINDS
def test_shutdown_from_another_thread_in_the_middle_of_a_batch(backend, kind):
    collector = make(backend, kind, [lambda: SlowEnv(0.02)] * 2, frames_per_batch=2000)
    pids = kit.pids_of(collector)
    enders = [threading.Timer(0.2, collector.shutdown, (600,)) for _ in range(2)]
    for ender in enders:
        ender.start()
    with pytest.raises(ClosedError, match="shut down"):
        collector.next()
    for ender in enders:
        ender.join()
    assert kit.gone(pids, 30.0 if backend.name.startswith("ray") else 0.1)


@LOCAL
@KINDS
def test_shutdown_in_the_middle_of_a_batch_that_was_begun(backend, kind):
    options = {"collect_ahead": True} if kind == "sync" else {}
    makers = [lambda: SlowEnv(0.005)] * 2
    collector = make(backend, kind, makers, frames_per_batch=20, **options)
    collector.next()
    pids = kit.pids_of(collector)
    collector.shutdown(timeout=600)
    assert kit.gone(pids, 0.1)


@LOCAL
@KINDS
def test_envs_are_closed(backend, kind, tmp_path):
    class Closes(CountingEnv):
        def close(self):
            (tmp_path / str(os.getpid())).touch()

    with make(backend, kind, [Closes] * 2) as collector:
        collector.next()
        pids = kit.pids_of(collector)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == sorted(pids)


@LOCAL
@KINDS
def test_a_collector_that_is_dropped_takes_its_workers_along(backend, kind):
    collector = make(backend, kind, [CountingEnv] * 2)
    batch = collector.next()
    pids = kit.pids_of(collector)
    del collector
    gc.collect()
    assert kit.gone(pids)
    check_transitions(batch)


@pytest.mark.over("processes", "gloo")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_learner_does_not_end_its_workers(backend):
    with make(backend, "sync", [CountingEnv] * 2) as collector:
        batches = [collector.next()]
        pid = os.fork()
        if pid == 0:
            try:
                collector.shutdown()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        batches += [collector.next() for _ in range(3)]
    check_transitions(batches)


# -- scripts --------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time, signal
import numpy as np
from swath.testing import CountingEnv, SlowEnv, check_transitions

class Mine(CountingEnv):
    pass

def say(*words):
    print(*words, flush=True)

def pids(collector):
    return [worker["pid"] for worker in collector.stats()["per_worker"]]
"""
SCRIPTS = pytest.mark.over("processes", "gloo")


def script(backend, body):
    return backend.header + SCRIPT + textwrap.dedent(body)


def run(arguments, text=None, within=40):
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=within
    )
    return done.returncode, done.stdout, done.stderr


def start(backend, body, **options):
    return kit.Child(
        [sys.executable, "-u", "-c", script(backend, body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@SCRIPTS
def test_a_script_needs_no_main_guard_and_no_shutdown(backend, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        script(
            backend,
            """
            offset = 3
            maker = lambda: Mine(longest=offset + 6)
            policy = lambda o: np.int64(offset % 2)
            options = {"frames_per_batch": 20, "total_frames": 100}
            collector = backend.sync([maker] * 2, policy, **options)
            say(check_transitions(list(collector)), *pids(collector))
            busy = backend.first_come([lambda: SlowEnv(0.01)] * 2, frames_per_batch=50)
            busy.next()
            say(*pids(busy))
            """,
        )
    )
    code, out, err = run([str(path)])
    assert (code, err) == (0, "")
    frames, *pids = map(int, out.split())
    assert frames == 100
    assert len(set(pids)) == 4
    assert kit.gone(pids)


@SCRIPTS
def test_an_exception_that_nobody_catches_ends_a_script_from_stdin_and_its_workers(backend):
    text = script(
        backend,
        """
        for data in (collector := backend.sync([Mine] * 2, frames_per_batch=20)):
            say(*pids(collector))
            1 / 0
        """,
    )
    code, out, err = run(["-"], text)
    assert code == 1
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")
    assert kit.gone(map(int, out.split()))


@SCRIPTS
def test_workers_end_with_their_parent(backend):
    parent = start(
        backend,
        """
        collector = backend.first_come([lambda: SlowEnv(0.01)] * 2, frames_per_batch=50)
        collector.next()
        say(*pids(collector))
        for data in collector:
            pass
        """,
    )
    with parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert all(map(kit.alive, pids))
        parent.kill()
        assert parent.wait(10) == -signal.SIGKILL
        # A second, and two for a machine that has other things to do. What they leave in shared
        # memory is seen after every test.
        assert kit.gone(pids, 3.0)


@SCRIPTS
def test_after_ctrl_c_nothing_is_lost(backend):
    body = """
        def collect(kind):
            batches, interrupts = [], 0
            makers = [lambda: SlowEnv(0.001)] * 2
            with backend.make(kind, makers, frames_per_batch=20, seed=0) as collector:
                batches.append(collector.next())
                first = pids(collector)
                while interrupts < 8 or len(batches) < 20:
                    try:
                        if interrupts < 8:
                            say("go")
                        for data in collector:
                            batches.append(data)
                            if interrupts >= 8 and len(batches) >= 20:
                                break
                    except KeyboardInterrupt:
                        interrupts += 1
                assert pids(collector) == first, "workers were killed"
                frames = sum(batch.numel() for batch in batches)
                assert collector.stats()["frames"] == frames
                assert check_transitions(batches) == frames

        collect("sync")
        collect("async")
        collector = backend.sync([lambda: SlowEnv(0.01)] * 2, frames_per_batch=2000)
        say(*pids(collector))
        collector.next()
    """
    parent = start(backend, body, start_new_session=True)
    with parent:
        for pause in [*np.linspace(0.013, 0.047, 8)] * 2:
            assert parent.stdout.readline() == "go\n", parent.stderr.read()
            time.sleep(pause)
            os.killpg(parent.pid, signal.SIGINT)  # as the terminal does: to all of them
        # And one that nobody catches ends it all.
        pids = list(map(int, parent.stdout.readline().split()))
        time.sleep(0.1)
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=40)
    assert kit.ended_by_ctrl_c(parent.returncode), err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert len(pids) == 2
    assert kit.gone(pids)
