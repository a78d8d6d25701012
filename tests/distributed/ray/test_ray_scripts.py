"""Scripts that start a cluster of their own: it ends with them, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import multi_kit as kit
import pytest
from multi_kit import Child
from ray_kit import command
from wait_kit import comes_true

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = """
from swath.preload import preload; preload()
import os, sys, time
from ray_kit import descendants as everyone
from swath.collectors.distributed import RayCollector
from swath.testing import CountingEnv, SlowEnv, check_transitions

OPTIONS = {
    "ray_init_config": {"object_store_memory": 128 << 20}, "remote_configs": {"num_cpus": 0.5}
}

def say(*words):
    print(*words, flush=True)
"""


def start(body):
    return Child(
        [sys.executable, "-u", "-c", SCRIPT + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def pids_in(line):
    return list(map(int, line.split()))


def left(pids, within):
    """Wait for all but the agents of Ray's dashboard, which notice by themselves, later."""

    def others():
        lives = [command(pid)[-100:] for pid in pids if kit.alive(pid)]
        return [one for one in lives if "agent" not in one.lower()]

    comes_true(lambda: not others(), within, every=0.1)
    return others()


def test_scripts_start_quiet_clusters_and_stop_their_own():
    script = start(
        """
        import itertools, ray
        first = RayCollector([CountingEnv], frames_per_batch=20, **OPTIONS)
        first.next()
        ray.shutdown()
        policy = lambda o: 0
        second = RayCollector([CountingEnv] * 2, policy, frames_per_batch=20, total_frames=200,
                              **OPTIONS)
        try:
            list(itertools.islice(first, 100))
            raise AssertionError("it goes on without its cluster")
        except ValueError as error:
            assert "Ray was shut down under this collector" in str(error)
        first.shutdown()
        assert check_transitions(list(second)) == 200
        pids = everyone()
        second.shutdown()
        assert not ray.is_initialized()
        say(*pids)
        """
    )
    with script:
        out, err = script.communicate(timeout=200)
    assert script.returncode == 0, err
    pids = pids_in(out)
    assert len(pids) > 3
    assert not left(pids, 30)
    assert "Traceback" not in err


def test_ctrl_c_comes_at_once_loses_nothing_and_ends_all():
    script = start(
        """
        batches, interrupts = [], 0
        collector = RayCollector([lambda: SlowEnv(0.005)] * 2, frames_per_batch=20, sync=True,
                                 seed=0, **OPTIONS)
        batches.append(collector.next())
        while interrupts < 2 or len(batches) < 12:
            try:
                if interrupts < 2:
                    say("go")
                for data in collector:
                    batches.append(data)
                    if interrupts == 2 and len(batches) >= 12:
                        break
            except KeyboardInterrupt:
                interrupts += 1
        assert check_transitions(batches) == 20 * len(batches)
        assert collector.stats()["restarts"] == 0
        endless = RayCollector([lambda: SlowEnv(0.01)], frames_per_batch=20000, **OPTIONS)
        say(*everyone())
        endless.next()
        """
    )
    with script:
        for _ in range(2):
            assert script.stdout.readline() == "go\n", script.stderr.read()
            time.sleep(0.03)
            os.kill(script.pid, signal.SIGINT)
        pids = pids_in(script.stdout.readline())
        time.sleep(0.3)
        os.kill(script.pid, signal.SIGINT)
        _, err = script.communicate(timeout=60)
    assert kit.ended_by_ctrl_c(script.returncode), err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not left(pids, 30)


def test_ctrl_c_while_a_cluster_is_started_or_ended_leaves_nothing():
    script = start(
        """
        import functools, ray, signal, threading

        class SlowToClose(CountingEnv):
            def close(self):
                time.sleep(1.5)

        def later(seconds):
            threading.Timer(seconds, lambda: signal.raise_signal(signal.SIGINT)).start()

        def left():
            deadline = time.monotonic() + 30
            while (here := everyone()) and time.monotonic() < deadline:
                time.sleep(0.1)
            return here

        init = ray.init
        ray.init = functools.wraps(init)(lambda **options: later(0.5) or init(**options))
        try:
            RayCollector([CountingEnv], frames_per_batch=20, **OPTIONS)
            say("no interrupt")
        except KeyboardInterrupt:
            say("started:", ray.is_initialized(), left())
        ray.init = init
        collector = RayCollector([SlowToClose], frames_per_batch=20, **OPTIONS)
        collector.next()
        try:
            later(0.5)
            collector.shutdown()
            say("no interrupt")
        except KeyboardInterrupt:
            say("ended:", ray.is_initialized(), left())
        """
    )
    with script:
        out, err = script.communicate(timeout=200)
    assert script.returncode == 0, err
    assert out.splitlines() == ["started: False []", "ended: False []"]


def test_a_driver_that_is_killed_takes_actors_and_cluster_along():
    script = start(
        """
        collector = RayCollector([lambda: SlowEnv(0.01)], frames_per_batch=20, **OPTIONS)
        collector.next()
        say(*everyone())
        for data in collector:
            pass
        """
    )
    with script:
        pids = pids_in(script.stdout.readline())
        assert len(pids) > 3
        script.kill()
        assert script.wait(10) == -signal.SIGKILL
    assert not left(pids, 60)
