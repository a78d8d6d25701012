"""What becomes of a RayCollector when something goes wrong, for real."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import multi_kit as kit
import numpy as np
import pytest
import torch
from torch import nn

from swath.collectors.distributed import RayCollector
from swath.errors import EnvError, WorkerError
from swath.links.cluster import no_place
from swath.links.door import Door
from swath.testing import CountingEnv, CrashingEnv, SlowEnv, check_transitions

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]
KINDS = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def make(sync, makers, policy=None, **options):
    options.setdefault("frames_per_batch", 20)
    return RayCollector(list(makers), policy, sync=sync, **options)


def owners(batches):
    """Assert that no trajectory is two env's or two episodes'."""
    found = {}
    for batch in batches:
        ids = batch["collector", "traj_ids"].flatten().tolist()
        for traj, (stamp, episode, _) in zip(ids, kit.rows(batch).tolist(), strict=True):
            assert found.setdefault(traj, (stamp, episode)) == (stamp, episode)


@pytest.mark.usefixtures("anywhere")
def test_an_actor_that_is_killed_through_ray_while_idle_is_replaced(cluster):
    with make(True, [CountingEnv] * 2) as collector:
        batches = [collector.next()]
        link = collector._crew.links[1]
        cluster.kill(link._actor)
        assert kit.gone([link.pid])
        batches += [collector.next() for _ in range(3)]
        assert collector.stats()["restarts"] == 1
    check_transitions(batches)


def test_no_place_and_no_limit_but_that_of_a_rollout():
    options = {"launch_timeout": None, "worker_timeout": 1.0, "remote_configs": {"num_cpus": 64}}
    with pytest.raises(WorkerError, match=r"not placed\) (was not scheduled|gave no answer)"):
        make(True, [CountingEnv], **options)
    told = no_place({"CPU": 64}, None, "remote_configs")
    assert told.startswith("was not scheduled in time: it needs {'CPU': 64}, and the cluster has")


@KINDS
def test_others_deliver_while_a_replacement_finds_no_place(sync, cluster):
    """The rare resource is taken as soon as it is free: the lost actor has no place."""

    @cluster.remote(num_cpus=0, resources={"rare": 1})
    class Greedy:
        def here(self):
            return True

    configs = [{}, {"resources": {"rare": 1}}]
    options = {"remote_configs": configs, "launch_timeout": 20.0}
    with make(sync, [lambda: SlowEnv(0.002)] * 2, **options) as collector:
        batches = [collector.next() for _ in range(4)]
        greedy = Greedy.remote()
        victim = kit.pids_of(collector)[1]
        os.kill(victim, signal.SIGKILL)
        assert cluster.get(greedy.here.remote(), timeout=60)
        assert kit.gone([victim])
        while collector.stats()["per_worker"][1]["restarts"] == 0:
            batches.append(collector.next())
        before = collector.stats()["per_worker"][1]["frames"]
        batches += [collector.next() for _ in range(20)]
        rows = collector.stats()["per_worker"]
        assert (rows[1]["pid"], rows[1]["frames"]) == (None, before)
        if sync:
            assert {batch.batch_size for batch in batches[-15:]} == {(1, 10)}
            assert batches[-1].names == [None, "time"]
        cluster.kill(greedy)
        while collector.stats()["per_worker"][1]["frames"] == before:
            batches.append(collector.next())
        batches += [collector.next() for _ in range(2)]
        frames = collector.stats()["frames"]
    assert check_transitions(batches) == frames
    assert not sync or batches[-1].batch_size == (2, 10)
    owners(batches)


class Interrupting:
    """Numbers, of which the first is taken when Ctrl-C comes."""

    def __init__(self, numbers):
        self.numbers, self.fired = numbers, False

    def __next__(self):
        number = next(self.numbers)
        if not self.fired:
            self.fired = True
            signal.raise_signal(signal.SIGINT)
        return number


def publish(collector, policy):
    for number in range(1, 1000):
        collector.update_policy_weights_(policy.become(number))
        time.sleep(0.01)


@pytest.mark.usefixtures("far")
def test_ctrl_c_in_a_call_that_brings_weights_breaks_no_link():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    policy = kit.Telling()
    try:
        slow = functools.partial(kit.slow_wide, 0.02)
        with make(False, [slow], policy, on_worker_failure="raise") as collector:
            batches = [collector.next() for _ in range(3)]
            talk = collector._crew.links[0]._talk
            talk._numbers = Interrupting(talk._numbers)
            with pytest.raises(KeyboardInterrupt):
                publish(collector, policy)
            batches += [collector.next() for _ in range(5)]
            assert all(kit.told_right(batch) for batch in batches)
    finally:
        signal.signal(signal.SIGINT, before)
    check_transitions(batches)


def test_actors_that_were_asked_for_before_one_could_not_be_are_ended(monkeypatch):
    """What is left behind is seen by the check around each test."""
    made, door = [], Door.__init__

    def failing(self):
        made.append(self)
        if len(made) == 2:
            raise OSError("no more doors")
        door(self)

    monkeypatch.setattr(Door, "__init__", failing)
    with pytest.raises(OSError, match="no more doors"):
        make(True, [CountingEnv] * 3)
    assert len(made) == 2


@pytest.mark.usefixtures("anywhere")
def test_one_that_dies_while_others_begin_is_replaced(tmp_path):
    """The first dies once, when it is ready; the second is not before that."""
    once, dead = tmp_path / "once", tmp_path / "dead"

    def maker(name):
        def named():
            os.environ["WHICH"] = name
            return CountingEnv()

        return named

    def factory():
        if os.environ["WHICH"] == "second":
            while not dead.exists():
                time.sleep(0.01)
            time.sleep(0.5)
        elif not once.exists():
            once.touch()
            threading.Timer(0.5, lambda: dead.touch() or os._exit(1)).start()
        return lambda observation: 0

    makers = [maker("first"), maker("second")]
    with make(True, makers, policy_factory=factory) as collector:
        batches = [collector.next() for _ in range(3)]
        assert collector.stats()["restarts"] == 1
    check_transitions(batches)


def test_resources_that_nobody_has_are_an_error_in_time():
    options = {"remote_configs": {"resources": {"unicorn": 1}}, "launch_timeout": 1.0}
    with pytest.raises(WorkerError, match=r"was not scheduled within 1 s .*'unicorn': 1.*0 of 0"):
        make(True, [CountingEnv], **options)


def test_an_env_that_raises_is_told_with_actor_host_env_and_step():
    makers = [CountingEnv, [CountingEnv, lambda: CrashingEnv(at_step=25)]]
    with make(False, makers, on_worker_failure="raise", seed=3) as collector:
        seen = []
        with pytest.raises(EnvError, match="crashed as asked") as caught:
            seen.extend(collector)
        error, link = caught.value, collector._crew.links[1]
        assert (error.worker, error.env, error.step) == (1, 2, 25)
        assert isinstance(error.__cause__, RuntimeError)
        assert f"{link.name}" in str(error)
        assert link.host in str(error)
        assert f"process {link.pid}" in str(error)
        check_transitions([*seen, collector.partial()])


def test_too_many_deaths_end_the_run_with_words():
    def maker():
        return kit.Broken("step", 25, kit.kill(signal.SIGKILL))

    with make(False, [maker], max_restarts=1, frames_per_batch=10) as collector:
        with pytest.raises(WorkerError, match=r"actor \w+ on .* process \d+\) died.* 1 restarts"):
            list(collector)


class Wide(nn.Module):
    """Gives each frame so much that a few rollouts fill Ray's store."""

    def forward(self, observation):
        lead = observation.shape[:-1]
        return {"action": torch.zeros(lead, dtype=torch.long), "much": torch.ones(*lead, 100_000)}


@pytest.mark.usefixtures("far")
def test_a_full_object_store_slows_but_loses_nothing(cluster):
    held = [cluster.put(np.ones(40 << 20, np.uint8)) for _ in range(7)]  # more than there is
    with make(False, [CountingEnv] * 2, Wide(), frames_per_batch=50) as collector:  # 20 MB each
        batches = [collector.next() for _ in range(12)]
        assert all((batch["much"] == 1).all() for batch in batches)
    check_transitions([batch.exclude("much") for batch in batches])
    assert all(int(cluster.get(one)[-1]) == 1 for one in held)


def test_envs_are_closed_and_an_exception_leaves_no_actor(tmp_path):
    class Closes(CountingEnv):
        def close(self):
            (tmp_path / str(os.getpid())).touch()

    with pytest.raises(ZeroDivisionError), make(True, [Closes] * 2) as collector:  # noqa: PT012
        for _ in collector:
            pids = kit.pids_of(collector)
            1 / 0  # noqa: B018
    assert kit.gone(pids)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == sorted(pids)
