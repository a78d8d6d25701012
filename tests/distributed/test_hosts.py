"""Two hosts, as network namespaces: workers that come by hand, links that are cut."""

from __future__ import annotations

import os
import re
import socket
import textwrap
import time

import pytest

from swath.collectors.distributed import DistributedCollector
from swath.errors import UsageError
from swath.testing import CountingEnv

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TRAINER = """
from swath.preload import preload; preload()
import sys, time
import numpy as np
from gymnasium import spaces
from swath.collectors import Collector
from swath.collectors.distributed import DistributedCollector
from swath.errors import WorkerError
from swath.testing import CountingEnv, SlowEnv, check_transitions

def say(*words):
    print(*words, flush=True)

def make(makers, link_timeout, **options):
    options = {"frames_per_batch": 40, "seed": 7, **options}
    return DistributedCollector(
        makers, launcher="wait", host="10.231.7.1", link_timeout=link_timeout, **options
    )
"""


STRANGER = """
import socket, sys
with socket.create_connection(sys.argv[1:], 60) as end:
    end.sendall(bytes(64))
    while end.recv(64):  # the other's nonce, and the end
        pass
"""


def train(hosts, body):
    """Start a trainer on its host; return it with the address that workers are to dial."""
    trainer = hosts.start("a", "-c", TRAINER + textwrap.dedent(body))
    return trainer, address_of(trainer)


def address_of(trainer):
    seen = ""
    while not (found := re.search(r"swath.workers.join (\S+) \d", seen)):
        line = trainer.stderr.readline()
        assert line, seen
        seen += line
    return found[1]


def join(hosts, address, number, link_timeout=60, **options):
    arguments = ["-m", "swath.workers.join", address, str(number)]
    return hosts.start("b", *arguments, f"--link-timeout={link_timeout}", **options)


def read(process, until):
    """Read lines up to one that begins so."""
    seen = []
    while not (seen and seen[-1].startswith(until)):
        line = process.stdout.readline()
        assert line, (seen, process.stderr.read())
        seen.append(line)
    return seen


def ended(process):
    """Wait for the end of a process; return its code and what it wrote."""
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def test_workers_of_another_host_late_ones_and_strangers(hosts):
    trainer, address = train(
        hosts,
        """
        options = {"total_frames": 400, "frames_per_batch": 40, "seed": 7}
        with make([CountingEnv] * 2, 30, sync=True, **options) as collector:
            batches = [collector.next()]
            say("first")
            sys.stdin.readline()
            batches.extend(collector)
        assert check_transitions(batches) == 400
        with Collector([CountingEnv] * 2, **options) as collector:
            for mine, other in zip(batches, collector, strict=True):
                for key in ("observation", "action", ("next", "done")):
                    assert (mine[key] == other[key]).all()
        say("equal")
        """,
    )
    workers = [join(hosts, address, 1)]
    stranger = join(hosts, address, 0, secret="another")
    code, err = ended(stranger)
    assert (code, "refused" in err, "Traceback" in err) == (1, True, False), err
    with socket.socket() as probe:  # that is nobody here: the hosts are their own
        assert probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2])))
    workers.append(join(hosts, address, 0))
    read(trainer, "first")
    assert ended(hosts.start("b", "-c", STRANGER, *address.split(":")))[0] == 0
    trainer.stdin.write("go on\n")
    trainer.stdin.flush()
    read(trainer, "equal")
    code, err = ended(trainer)
    assert code == 0
    assert len(re.findall(f"refused a connection from {hosts.other}: .*secret", err)) == 2
    assert [ended(worker)[0] for worker in workers] == [0, 0]


def test_a_short_cut_holds_collection_up_and_no_more(hosts):
    trainer, address = train(
        hosts,
        """
        batches = []
        with make([lambda: SlowEnv(0.005)] * 2, 30, total_frames=1200) as collector:
            for data in collector:
                batches.append(data)
                collector.update_policy_weights_()
                say("batch")
        say("frames", check_transitions(batches))
        """,
    )
    workers = [join(hosts, address, number) for number in range(2)]
    read(trainer, "batch")
    hosts.link("cut")
    time.sleep(4)
    hosts.link("mend")
    assert read(trainer, "frames")[-1] == "frames 1200\n"
    assert [ended(one)[0] for one in (trainer, *workers)] == [0, 0, 0]


LONG = {
    "collecting": ("lambda: SlowEnv(0.01)", "batches.extend(collector)"),
    "idle": ("CountingEnv", "time.sleep(10); batches.extend(collector)"),
    "in the middle of a block": (
        "lambda: CountingEnv(observation_space=spaces.Box(0, 255, (1 << 20,), np.uint8))",
        "batches.extend(collector)",
    ),
}


@pytest.mark.parametrize("doing", list(LONG))
def test_a_host_that_is_cut_off_is_named_and_its_workers_end(hosts, doing):
    maker, go_on = LONG[doing]
    trainer, address = train(
        hosts,
        f"""
        batches = []
        with make([{maker}] * 2, 6) as collector:
            batches.append(collector.next())
            say("first")
            try:
                {go_on}
            except WorkerError as error:
                say("lost", error)
        """,
    )
    workers = [join(hosts, address, number, 6) for number in range(2)]
    read(trainer, "first")
    hosts.link("cut")
    lost = read(trainer, "lost")[-1]
    who = rf"worker [01] \(rank [12] on {socket.gethostname()}, process \d+\)"
    assert re.search(rf"{who} was lost: .*([Tt]imed out|unreachable)", lost), lost
    assert ended(trainer)[0] == 0
    for worker in workers:
        ended(worker)


def test_a_host_that_is_cut_off_can_come_back(hosts):
    trainer, address = train(
        hosts,
        """
        batches = []
        options = {"total_frames": 800, "sync": True, "on_worker_failure": "restart"}
        with make([lambda: SlowEnv(0.01)] * 2, 6, **options) as collector:
            for data in collector:
                batches.append(data)
                say("batch")
            say("frames", check_transitions(batches), collector.stats()["restarts"])
        """,
    )
    workers = [join(hosts, address, number, 6) for number in range(2)]
    read(trainer, "batch")
    hosts.link("cut")
    for worker in workers:
        ended(worker)
    hosts.link("mend")
    assert address_of(trainer) == address  # it asks for one of them, whichever it missed first
    again = [join(hosts, address, number, 6) for number in range(2)]
    assert read(trainer, "frames")[-1] == "frames 800 2\n"
    assert [ended(one)[0] for one in (trainer, *again)] == [0, 0, 0]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}"):
            DistributedCollector([CountingEnv], frames_per_batch=10, tcp_port=port)


def test_waiting_needs_a_secret(monkeypatch):
    monkeypatch.delenv("SWATH_SECRET", raising=False)
    with pytest.raises(UsageError, match="needs a secret"):
        DistributedCollector([CountingEnv], frames_per_batch=10, launcher="wait")


@pytest.mark.parametrize("told", ["head(10.231.7.2)", "10.231.7.2"])
def test_the_address_towards_the_controller_of_slurm_is_guessed(hosts, told, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\necho 'SlurmctldAddr = (null)'; echo 'SlurmctldHost[0] = {told}'"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = "from swath.links.gate import guess_host; print(guess_host(), guess_host(True))"
    trainer = hosts.start("a", "-c", code)
    assert trainer.communicate(timeout=150)[0] == f"127.0.0.1 {hosts.address}\n"
