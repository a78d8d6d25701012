"""Workers as jobs: of submitit's local executor, and of a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import multi_kit as kit
import pytest

from swath.collectors import Collector
from swath.collectors.distributed import DistributedCollector, submitit_delayed_launcher
from swath.errors import UsageError, WorkerError
from swath.links import pack
from swath.links.gate import Gate
from swath.testing import CountingEnv, SlowEnv, check_transitions
from swath.workers.remote import Invitation

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("local_jobs"),
]


def make(makers, policy=None, *, cluster="slurm", folder, conf=(), **options):
    options = {"frames_per_batch": 40, "seed": 7, "launch_timeout": 60, **options}
    slurm = {"cluster": cluster, "folder": folder, **dict(conf)}
    return DistributedCollector(makers, policy, launcher="submitit", slurm_kwargs=slurm, **options)


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_jobs_collect_what_one_process_collects(cluster, tmp_path, request):
    slurm = request.getfixturevalue("slurm") if cluster == "slurm" else None
    makers, options = [CountingEnv] * 2, {"frames_per_batch": 40, "total_frames": 200, "seed": 7}
    nodes = {"collector_class": "sync", "num_workers_per_collector": 2, "sync": True}
    with make(makers, cluster=cluster, folder=tmp_path, **options, **nodes) as collector:
        assert collector.num_workers == 4
        if slurm is not None:
            assert list(slurm.jobs().values()) == ["RUNNING"] * 2  # one for each node
        batches = list(collector)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with Collector([CountingEnv] * 4, **options) as collector:
        expected = list(collector)
    assert check_transitions(batches) == 200
    assert [b["observation"].flatten().tolist() for b in batches] == [
        b["observation"].flatten().tolist() for b in expected
    ]
    assert slurm is None or slurm.gone()


def test_weights_reach_jobs(slurm, tmp_path):
    policy = kit.Telling(0)
    with make([kit.wide] * 2, policy, folder=tmp_path, sync=True) as collector:
        for version in range(1, 5):
            collector.update_policy_weights_(policy.become(version))
            batch = collector.next()
            assert kit.told_right(batch)
            assert (batch["collector", "policy_version"] == version).all()


def test_a_cancelled_job_is_named(slurm, tmp_path):
    with make([lambda: SlowEnv(0.005)] * 2, folder=tmp_path) as collector:
        batches = [collector.next() for _ in range(3)]
        slurm.cancel(min(slurm.jobs(), key=int))
        with pytest.raises(WorkerError, match=r"worker 0 \(rank 1 on \S+, process \d+\)") as caught:
            batches.extend(collector)
        assert caught.value.worker == 0
    check_transitions(batches)


def test_a_cancelled_job_is_replaced(slurm, tmp_path):
    options = {"on_worker_failure": "restart", "total_frames": 600, "sync": True}
    with make([lambda: SlowEnv(0.002)] * 2, folder=tmp_path, **options) as collector:
        batches = [collector.next()]
        before = set(slurm.jobs())
        slurm.cancel(max(before, key=int))
        batches.extend(collector)
        assert collector.stats()["restarts"] == 1
        assert len(set(slurm.jobs()) - before) == 1
    assert check_transitions(batches) == 600


def test_a_killed_worker_is_replaced_and_its_neighbour_stays(tmp_path):
    nodes = {"collector_class": "sync", "num_workers_per_collector": 2, "sync": True}
    options = {"cluster": "local", "folder": tmp_path, "on_worker_failure": "restart"}
    with make([CountingEnv], **options, **nodes, total_frames=400) as collector:
        batches = [collector.next()]
        first, second = kit.pids_of(collector)
        os.kill(first, signal.SIGKILL)
        batches.extend(collector)
        assert collector.stats()["restarts"] == 1
        assert kit.pids_of(collector)[1] == second
    assert check_transitions(batches) == 400


def test_a_worker_that_is_frozen_does_not_keep_its_job(slurm, tmp_path):
    collector = make([CountingEnv], folder=tmp_path)
    collector.next()
    os.kill(*kit.pids_of(collector), signal.SIGSTOP)
    collector.shutdown(timeout=1)
    assert slurm.gone()


def test_a_job_ends_if_one_of_its_workers_cannot_join():
    gate = Gate("127.0.0.1", 0, b"s3", 60)
    with socket.socket() as deaf:  # it has the port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        payloads = [
            pack((Invitation("127.0.0.1", gate.port, b"s3", 60), 0), "the invitation"),
            pack((Invitation("127.0.0.1", port, b"s3", 4), 1), "the invitation"),
        ]
        with start(f"from swath.workers.join import node; node({payloads!r}, [])") as job:
            _, err = job.communicate(timeout=150)
    assert job.returncode == 1
    assert f"nothing listens on 127.0.0.1 port {port}" in err
    arrival = gate.fetch(0, time.monotonic() + 10, lambda: None)
    gate.close()
    assert arrival.channel.await_end(10)
    arrival.channel.close()


def test_a_job_that_never_starts_is_cancelled(slurm, tmp_path, caplog):
    later = {"slurm_additional_parameters": {"begin": "now+1hour"}}
    with pytest.raises(WorkerError, match=r"not connected within 4 s \(launch_timeout\)"):
        make([CountingEnv] * 2, folder=tmp_path, conf=later, launch_timeout=4)
    assert slurm.gone()
    assert len(re.findall(r"job \d+ never started: PENDING \(BeginTime\)", caplog.text)) == 2


def test_a_job_that_fails_before_its_worker_came_is_told_of(slurm, tmp_path):
    broken = {"slurm_setup": ["echo no such module >&2", "exit 3"]}
    with pytest.raises(
        WorkerError, match=r"(?s)will not connect: job \d+ .*FAILED.*no such module"
    ):
        make([CountingEnv], folder=tmp_path, conf=broken, launch_timeout=None)


def test_jobs_that_are_not_accepted(slurm, tmp_path):
    with pytest.raises(WorkerError, match=r"(?s)not accepted.*partition"):
        make([CountingEnv], folder=tmp_path, conf={"slurm_partition": "nowhere"})


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"cluster": "debug"}, "cluster must be 'slurm' or 'local'; got 'debug'"),
        ({"cluster": "local", "memory": 3}, "submitit does not take this.*memory"),
    ],
)
def test_parameters_that_make_no_sense(conf, words, tmp_path):
    with pytest.raises(UsageError, match=f"(?s){words}"):
        make([CountingEnv], folder=tmp_path, conf=conf)
    assert not list(tmp_path.iterdir())


def test_without_submitit_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"pip install 'swath\[slurm\]'"):
        make([CountingEnv], folder=tmp_path)


# -- scripts --------------------------------------------------------------------------------------


def start(body, *arguments):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(body), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_job_outlives_a_trainer_that_is_killed(slurm, tmp_path):
    body = """
        import sys
        from swath.collectors.distributed import DistributedCollector
        from swath.testing import SlowEnv
        collector = DistributedCollector(
            [lambda: SlowEnv(0.005)] * 2, frames_per_batch=20, launcher="submitit",
            slurm_kwargs={"folder": sys.argv[1]}, launch_timeout=60,
        )
        for data in collector:
            print("batch")
    """
    with start(body, tmp_path) as trainer:
        assert trainer.stdout.readline() == "batch\n", trainer.stderr.read()
        assert len(slurm.jobs()) == 2
        trainer.kill()
    assert slurm.gone()


def test_the_example(slurm, tmp_path):
    path = Path(__file__).parents[2] / "examples/distributed/slurm.py"
    arguments = ["--workers", "2", "--frames", "4000", "--folder", str(tmp_path)]
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines()[-1:] == ["4000 frames in all"], done.stderr


DELAYED = """
    import os, signal, sys
    from swath.collectors.distributed import DistributedCollector, submitit_delayed_launcher
    from swath.testing import CountingEnv, check_transitions

    cluster, folder, jobs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    here = os.getpid()

    @submitit_delayed_launcher(
        num_jobs=jobs,
        submitit_main_conf={"cluster": cluster, "folder": folder},
        submitit_collection_conf={"timeout_min": 5},
    )
    def main(total, seed):
        assert os.getpid() != here
        options = {"frames_per_batch": 40, "total_frames": total, "seed": seed, "sync": True}
        with DistributedCollector(
            [CountingEnv] * 2, launcher="submitit_delayed", launch_timeout=60,
            on_worker_failure="restart", **options,
        ) as collector:
            batches = [collector.next()]
            os.kill(collector.stats()["per_worker"][0]["pid"], signal.SIGKILL)
            batches.extend(collector)
            return check_transitions(batches), collector.stats()["restarts"]

    if __name__ == "__main__":
        print(*main(200, seed=7))
"""


def test_a_trainer_that_is_a_job_gets_its_workers_and_their_replacements(slurm, tmp_path):
    with start(DELAYED, "slurm", tmp_path, 2) as submitter:
        out, err = submitter.communicate(timeout=150)
    assert (out, submitter.returncode) == ("200 1\n", 0), err
    assert slurm.gone()


def test_a_trainer_that_is_a_job_and_wants_too_many_jobs(tmp_path):
    with start(DELAYED, "local", tmp_path, 0) as submitter:
        _, err = submitter.communicate(timeout=150)
    assert submitter.returncode == 1
    assert "the collector has more nodes than num_jobs=0" in err


def test_the_delayed_launcher_needs_its_decorator():
    with pytest.raises(UsageError, match="submitit_delayed_launcher decorates"):
        DistributedCollector("CartPole-v1", frames_per_batch=10, launcher="submitit_delayed")
    with pytest.raises(UsageError, match="framework must be one of distributed, rpc; got 'rcp'"):
        submitit_delayed_launcher(2, framework="rcp")
