"""What becomes of a worker that failed: decisions, without any worker."""

from __future__ import annotations

import signal

import pytest

from swath.errors import EnvError, PolicyError, UsageError, WorkerError
from swath.links.launch import ending
from swath.links.parcels import RemoteTraceback, pack_error
from swath.workers.messages import Died, Failed
from swath.workers.supervisor import Supervisor


def failed(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return Failed(pack_error(caught))


def test_nothing_is_forgiven_unless_restarts_are_asked_for():
    supervisor = Supervisor(restart=False, max_restarts=3)
    assert not supervisor.forgives()
    assert supervisor.restarts == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_so_many_are_forgiven_and_no_more(most):
    supervisor = Supervisor(restart=True, max_restarts=most)
    assert [supervisor.forgives() for _ in range(5)] == [n < most for n in range(5)]
    assert supervisor.restarts == most


@pytest.mark.parametrize(
    ("died", "words"),
    [
        (
            Died("process 7", ending(-signal.SIGKILL)),
            "killed by SIGKILL (often because",
        ),
        (Died("process 7", ending(-signal.SIGSEGV)), "killed by SIGSEGV (a crash in native code"),
        (Died("process 7", ending(-signal.SIGTERM)), "was killed by SIGTERM."),
        (Died("process 7", ending(0)), "ended by itself with exit code 0"),
        (
            Died("process 7", ending(7)),
            "ended by itself with exit code 7; look for a call of os._exit",
        ),
        (
            Died("process 7", ending(-9), late=2.5),
            "no answer for 2.5 s (worker_timeout) and was killed",
        ),
        (Died("process 7", ending(-50)), "killed by signal 50"),
    ],
)
def test_how_a_process_ended_in_words(died, words):
    error = Supervisor(False, 0).error(3, died)
    assert isinstance(error, WorkerError)
    assert error.worker == 3
    assert words in str(error)
    assert "worker 3 (process 7)" in str(error)


def test_restarts_that_were_made_are_told():
    supervisor = Supervisor(True, 1)
    supervisor.forgives()
    assert "1 restarts were made before" in str(supervisor.error(0, Died("process 7", ending(-9))))


def test_errors_of_envs_and_policies_are_raised_as_they_are():
    for error in (EnvError("bad", worker=2, env=5), PolicyError("bad", worker=2, step=5)):
        told = Supervisor(False, 0).error(2, failed(error, KeyError("x")))
        assert type(told) is type(error)
        assert str(told) == str(error)
        assert isinstance(told.__cause__, KeyError)
        assert isinstance(told.__cause__.__cause__, RemoteTraceback)


def test_errors_that_do_not_say_where_get_their_worker():
    told = Supervisor(False, 0).error(4, failed(UsageError("no such env")))
    assert type(told) is UsageError
    assert str(told) == "no such env [worker 4]"
    told = Supervisor(False, 0).error(4, failed(PolicyError("bad output")))
    assert (str(told), told.worker) == ("bad output [worker 4]", 4)
    told = Supervisor(False, 0).error(4, failed(KeyError("x")))
    assert type(told) is WorkerError
    assert told.worker == 4
    assert "KeyError: 'x'" in str(told)
    assert isinstance(told.__cause__, KeyError)
    assert isinstance(told.__cause__.__cause__, RemoteTraceback)
