"""Workers that fail, in all the ways they can: the real thing each time."""

from __future__ import annotations

import os
import signal
import time

import multi_kit as kit
import pytest
import torch

from swath.collectors import AsyncCollector
from swath.errors import EnvError, PolicyError, UsageError, WorkerError
from swath.seeding import env_seed
from swath.testing import CountingEnv, CrashingEnv, check_transitions

KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
ENDS = {
    "SIGKILL": (kit.kill(signal.SIGKILL), "was killed by SIGKILL .*out of memory"),
    "SIGSEGV": (kit.kill(signal.SIGSEGV), "was killed by SIGSEGV .*native code"),
    "exit": (kit.exit_at_once, "exit code 7"),
}
HOW = pytest.mark.parametrize("how", list(ENDS))


def make(kind, makers, policy=None, **options):
    options = {"frames_per_batch": 20, "seed": 7, **options}
    return kit.KINDS[kind](makers, policy, **options)


def collect(collector, batches=10**9):
    """Collect until something is raised, or so many batches."""
    seen = []
    try:
        for batch in collector:
            seen.append(batch)
            if len(seen) == batches:
                break
    except Exception as error:
        error.seen = seen
        raise
    return seen


def chain(error):
    """Return an exception with all its causes."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


# -- exceptions -----------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("at", [{"at_step": 0}, {"at_step": 1000}, {"at_reset": 3}])
def test_an_env_that_raises_is_told_with_all_that_is_known(kind, at):
    def bad():
        return CrashingEnv(**at, exception=KeyError("mass"))

    with make(kind, [[CountingEnv] * 2, [CountingEnv, bad]]) as collector:
        with pytest.raises(EnvError, match=r"KeyError: 'mass'") as caught:
            collect(collector)
        error = caught.value
        assert (error.worker, error.env, error.seed) == (1, 3, env_seed(7, 3))
        call = "reset" if "at_reset" in at else "step"
        if "at_step" in at:
            assert error.step == at["at_step"]
        for word in ("worker 1", "env 3", f"step {error.step}", f"seed {error.seed}", call):
            assert word in str(error)
        assert isinstance(error.__cause__, KeyError)
        assert error.__cause__.args == ("mass",)
        remote = str(chain(error)[-1])
        assert "Traceback" in remote
        assert "raise self.exception" in remote
        # Of the broken batch, what is whole is there; and then it goes on with fresh episodes.
        rest = collector.partial()
        seen = [*error.seen, *([] if rest is None else [rest])]
        frames = check_transitions(seen)
        assert collector.stats()["frames"] == frames
        more = collect(collector, 3)
        assert len(more) == 3
        check_transitions(more)


@KINDS
def test_an_env_that_raises_at_its_first_reset_or_when_made(kind):
    with pytest.raises(EnvError, match="reset") as caught:
        make(kind, [CountingEnv, lambda: CrashingEnv(at_reset=0)])
    assert (caught.value.worker, caught.value.env) == (1, 1)
    assert isinstance(caught.value.__cause__, RuntimeError)

    def bad():
        raise KeyError("no assets")

    with pytest.raises(UsageError, match=r"raised KeyError: 'no assets'.*\[worker 1\]") as caught:
        make(kind, [CountingEnv, bad])
    assert isinstance(caught.value.__cause__, KeyError)
    assert "no assets" in str(chain(caught.value)[-1])
    with pytest.raises(WorkerError, match=r"KeyError: 'no assets'.*\[worker 0\]") as caught:
        make(kind, [CountingEnv], init_fn=bad)
    assert isinstance(caught.value.__cause__, KeyError)


@KINDS
@pytest.mark.parametrize("at", [1, 1000])
def test_a_policy_that_raises(kind, at):
    factories = [lambda: by_count(10**9), lambda: by_count(at)]
    with make(kind, [CountingEnv] * 2, policy_factory=factories) as collector:
        with pytest.raises(PolicyError, match="ZeroDivisionError: no idea") as caught:
            collect(collector)
        error = caught.value
        assert error.worker == 1
        assert "worker 1" in str(error)
        assert f"step {error.step}" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert "no idea" in str(chain(error)[-1])
        rest = collector.partial()
        check_transitions([*error.seen, *([] if rest is None else [rest])])
        assert error.step >= at - 2  # it was asked once or twice before, to learn what it gives


def by_count(at):
    """Return a policy that raises after so many calls."""
    steps = 0

    def policy(observation):
        nonlocal steps
        steps += 1
        if steps > at:
            raise ZeroDivisionError("no idea")
        return torch.zeros(observation.shape[:-1], dtype=torch.long)

    return policy


@KINDS
def test_a_policy_that_raises_when_made_or_shown_its_first_observation(kind):
    def bad():
        raise KeyError("no weights")

    with pytest.raises(WorkerError, match="no weights") as caught:
        make(kind, [CountingEnv], policy_factory=bad)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PolicyError, match=r"KeyError.*no weights.*\[worker 0\]"):
        make(kind, [CountingEnv], lambda o: bad())


def test_when_all_fail_alike_one_at_a_time_is_told_and_what_is_whole_is_kept():
    told, seen = [], []
    with make("sync", [lambda: CrashingEnv(at_step=33)] * 3, frames_per_batch=60) as collector:
        while len(seen) < 10:
            try:
                seen.append(collector.next())
            except EnvError as error:
                told.append(error.worker)
                seen.append(collector.partial())
                assert collector.partial() is None
        # Those who failed go on with new episodes, so only what one rollout holds is without gaps.
        assert collector.stats()["frames"] == sum(check_transitions(batch) for batch in seen)
    assert 1 <= len(set(told)) == len(told) <= 3


# -- deaths ---------------------------------------------------------------------------------------


@KINDS
@HOW
@pytest.mark.parametrize("call", ["step", "reset"])
def test_a_worker_that_dies_at_work_is_seen_at_once(kind, how, call):
    what, words = ENDS[how]
    with make(kind, [CountingEnv, lambda: kit.Broken(call, 50, what)]) as collector:
        started = time.monotonic()
        with pytest.raises(WorkerError, match=words) as caught:
            collect(collector)
        assert time.monotonic() - started < 20
        assert caught.value.worker == 1
        assert "worker 1" in str(caught.value)
        rest = collector.partial()
        assert check_transitions([*caught.value.seen, *([] if rest is None else [rest])])
        # Whatever is asked of it later says so again, and does not wait.
        for ask in (
            lambda: collect(collector),
            lambda: collector.update_policy_weights_(wait=True),
            collector.state_dict,
            lambda: collector.set_seed(1),
        ):
            with pytest.raises(WorkerError, match=words):
                ask()
        assert collector.update_policy_weights_() > 0


@pytest.mark.parametrize("kind", ["sync", "async", "ahead"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_is_killed_while_idle(kind, number):
    options = {"collect_ahead": True} if kind == "ahead" else {}
    kind = "sync" if kind == "ahead" else kind
    with make(kind, [kit.wide] * 2, kit.Telling(), **options) as collector:
        batches = [collector.next() for _ in range(3)]
        time.sleep(0.05)
        victim = kit.pids_of(collector)[0]
        os.kill(victim, number)
        assert kit.gone([victim])
        with pytest.raises(WorkerError, match=f"killed by {signal.Signals(number).name}") as caught:
            collect(collector)
        assert caught.value.worker == 0
        assert check_transitions([*batches, *caught.value.seen])


# -- blocking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "reset"])
def test_shutdown_ends_workers_that_block(call):
    collector = make("async", [CountingEnv, lambda: kit.Broken(call, 30, kit.block)])
    for _ in range(20):
        collector.next()
    pids = kit.pids_of(collector)
    collector.shutdown(timeout=0.5)
    assert kit.gone(pids, 0.1)


@KINDS
def test_a_worker_that_gives_no_answer_in_time(kind):
    makers = [CountingEnv, lambda: kit.Broken("step", 30, kit.block)]
    with make(kind, makers, worker_timeout=2.5) as collector:  # others answer by then
        with pytest.raises(WorkerError, match=r"worker 1.*no answer for 2\.5 s \(worker_timeout\)"):
            collect(collector)


def test_an_env_that_blocks_when_it_is_made_is_late_too():
    def blocks():
        kit.block()

    with pytest.raises(WorkerError, match=r"no answer for 0\.5 s"):
        make("sync", [CountingEnv, blocks], worker_timeout=0.5)


def test_worker_timeout_does_not_count_the_learners_time():
    for kind in ("sync", "async"):
        with make(kind, [CountingEnv] * 2, worker_timeout=2.0) as collector:
            collector.next()
            time.sleep(2.2)
            collector.next()


def test_a_worker_that_does_not_end_when_asked_is_killed():
    class Clings(CountingEnv):
        def close(self):
            kit.block()

    collector = make("sync", [Clings])
    pids = kit.pids_of(collector)
    collector.shutdown(timeout=0.3)
    assert kit.gone(pids, 0.1)


# -- shutdown -------------------------------------------------------------------------------------


@KINDS
def test_an_exception_in_the_loop_body_leaves_nothing(kind):
    with pytest.raises(KeyError), make(kind, [CountingEnv] * 2) as collector:  # noqa: PT012
        for _ in collector:
            pids = kit.pids_of(collector)
            raise KeyError
    assert kit.gone(pids, 0.1)


# -- restarts -------------------------------------------------------------------------------------


@KINDS
@HOW
def test_a_restarted_worker_leaves_no_holes_and_no_mixtures(kind, how, tmp_path):
    what, _ = ENDS[how]
    once = str(tmp_path / "once")
    makers = [[CountingEnv] * 2, [CountingEnv, lambda: kit.Broken("step", 87, what, once)]]
    options = {"frames_per_batch": 40, "total_frames": 800, "on_worker_failure": "restart"}
    with make(kind, makers, **options) as collector:
        first = kit.pids_of(collector)
        batches = list(collector)
        stats, second = collector.stats(), kit.pids_of(collector)
    assert os.path.exists(once)
    shape = (2, 2, 10) if kind == "sync" else (2, 20)
    assert all(batch.batch_size == shape for batch in batches)
    assert check_transitions(batches) == 800  # fresh streams: a new stamp, new ids
    assert stats["restarts"] == 1
    assert stats["lost"]["rollouts"] == 1
    assert first[0] == second[0]
    assert first[1] != second[1]
    check_lost(batches, stats["lost"]["trajectories"])
    stamps = {row[0] for batch in batches for row in kit.rows(batch)}
    assert len(stamps) == 6


def check_lost(batches, lost):
    """Assert that just the lost trajectories stop before their end and do not go on."""
    open_ids, seen = {}, set()
    for number, batch in enumerate(batches):
        ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
        for row in range(ids.numel()):
            traj = ids.flatten()[row].item()
            seen.add(traj)
            open_ids[traj] = number
            if done.flatten()[row]:
                del open_ids[traj]
    assert set(lost) & seen <= set(open_ids)
    ends = {}
    for batch in batches:
        for stamp, episode, step in kit.rows(batch):
            ends[stamp] = (episode, step)
    # Everything else that is open is the last of its env.
    assert len(set(open_ids) - set(lost)) <= len(ends)


@KINDS
def test_an_env_that_raises_is_restarted_too_and_at_most_so_often(kind):
    makers = [CountingEnv, lambda: CrashingEnv(at_step=25)]
    options = {"on_worker_failure": "restart", "max_restarts": 3}
    with make(kind, makers, **options) as collector:
        with pytest.raises(EnvError, match="crashed as asked") as caught:
            collect(collector)
        check_transitions(caught.value.seen)
        assert collector.stats()["restarts"] == 3


@KINDS
def test_a_worker_that_cannot_be_made_again_ends_the_run(kind, tmp_path):
    once = tmp_path / "once"

    def maker():
        if once.exists():
            raise KeyError("gone for good")
        return kit.Broken("step", 20, kit.exit_at_once, str(once))

    with (
        make(kind, [CountingEnv, maker], on_worker_failure="restart", max_restarts=2) as collector,
        pytest.raises(UsageError, match="gone for good"),
    ):
        collect(collector)


def test_others_deliver_while_a_worker_is_started_again(tmp_path):
    once, gate = tmp_path / "once", tmp_path / "gate"

    def maker():
        while once.exists() and not gate.exists():
            time.sleep(0.01)
        return kit.Broken("step", 25, kit.exit_at_once, str(once))

    options = {"on_worker_failure": "restart", "frames_per_batch": 10}
    with make("async", [CountingEnv, maker], **options) as collector:
        batches = []
        while collector.stats()["restarts"] == 0:
            batches.append(collector.next())
        made = collector.stats()["per_worker"][1]["frames"]
        batches += [collector.next() for _ in range(20)]
        assert collector.stats()["per_worker"][1]["frames"] == made
        gate.touch()
        while collector.stats()["per_worker"][1]["frames"] == made:
            batches.append(collector.next())
        rows = collector.stats()["per_worker"]
    assert [row["restarts"] for row in rows] == [0, 1]
    assert check_transitions(batches) == 10 * len(batches)


@KINDS
def test_a_restarted_worker_has_the_current_weights(kind, tmp_path):
    policy = kit.Telling()
    once = str(tmp_path / "once")
    wide = {"action_space": kit.wide().action_space}
    makers = [kit.wide, lambda: kit.Broken("step", 45, kit.exit_at_once, once, **wide)]
    options = {"total_frames": 400, "on_worker_failure": "restart"}
    with make(kind, makers, policy, **options) as collector:
        batches = []
        for number, batch in enumerate(collector):
            batches.append(batch)
            collector.update_policy_weights_(policy.become(number + 1))
        assert collector.stats()["restarts"] == 1
    assert all(kit.told_right(batch) for batch in batches)
    assert check_transitions(batches) == 400


@pytest.mark.parametrize("kind", ["sync", "async", "ahead"])
def test_workers_killed_while_idle_are_restarted_wherever_that_is_seen(kind):
    options = {"collect_ahead": True} if kind == "ahead" else {}
    kind = "sync" if kind == "ahead" else kind
    options |= {"on_worker_failure": "restart", "max_restarts": 10, "total_frames": 400}
    with make(kind, [kit.wide] * 2, kit.Telling(), **options) as collector:
        batches = []
        for number in range(5):
            batches.append(collector.next())
            victim = kit.pids_of(collector)[number % 2]
            os.kill(victim, signal.SIGKILL)
            assert kit.gone([victim])
            if number % 2:
                collector.update_policy_weights_(kit.Telling(number), wait=True)
        batches.extend(collector)
        assert collector.stats()["restarts"] == 5
        assert None not in kit.pids_of(collector)
    assert check_transitions(batches) == 400


def test_restarts_with_many_kept_batches():
    options = {"on_worker_failure": "restart", "max_restarts": 10}
    with make("sync", [CountingEnv] * 2, **options) as collector:
        kept = [collector.next() for _ in range(70)]
        del kept[:3]  # these slabs are used again, though their descriptors are closed
        for _ in range(5):
            os.kill(kit.pids_of(collector)[1], signal.SIGKILL)
            kept.append(collector.next())
    check_transitions(kept)


def test_whole_trajectories_stay_whole_over_restarts(tmp_path):
    once = str(tmp_path / "once")
    makers = [CountingEnv, lambda: kit.Broken("step", 205, kit.exit_at_once, once)]
    options = {"on_worker_failure": "restart", "trajs_per_batch": 5, "traj_format": "cat"}
    with make("sync", makers, **options) as collector:
        batches = collect(collector, 40)
        assert collector.stats()["restarts"] == 1
    for batch in batches:
        for traj in batch["collector", "traj_ids"].unique():
            part = batch[batch["collector", "traj_ids"] == traj]
            assert kit.rows(part)[:, 2].tolist() == list(range(part.numel()))
            assert part["next", "done"].sum() == 1


def test_ids_stay_unique_over_restarts_and_resumes():
    options = {"on_worker_failure": "restart", "max_restarts": 9}
    with make("sync", [CountingEnv] * 2, **options) as collector:
        batches = [collector.next()]
        os.kill(kit.pids_of(collector)[0], signal.SIGKILL)
        batches.append(collector.next())
        state = collector.state_dict()
    with make("sync", [CountingEnv] * 2, **options) as resumed:
        resumed.load_state_dict(state)
        batches.append(resumed.next())
        os.kill(kit.pids_of(resumed)[0], signal.SIGKILL)
        batches.append(resumed.next())
    owners = {}
    for batch in batches:
        ids = batch["collector", "traj_ids"].flatten().tolist()
        for traj, (stamp, episode, _) in zip(ids, kit.rows(batch).tolist(), strict=True):
            assert owners.setdefault(traj, (stamp, episode)) == (stamp, episode)


def test_random_frames_stay_exact_over_restarts(tmp_path):
    once = str(tmp_path / "once")
    wide = {"action_space": kit.wide().action_space}
    makers = [kit.wide, lambda: kit.Broken("step", 25, kit.exit_at_once, once, **wide)]
    options = {"on_worker_failure": "restart", "init_random_frames": 50, "total_frames": 200}
    with make("sync", makers, kit.Telling(7), **options) as collector:
        batches = list(collector)
    assert sum(batch["collector", "random"].sum() for batch in batches) == 50


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_that_has_made_its_random_frames_can_be_restarted(kind):
    options = {"on_worker_failure": "restart", "init_random_frames": 30, "frames_per_batch": 20}
    with kit.KINDS[kind]([kit.wide] * 2, kit.Telling(7), total_frames=400, **options) as collector:
        batches = [collector.next() for _ in range(6)]
        os.kill(kit.pids_of(collector)[1], signal.SIGKILL)
        batches += list(collector)
        assert collector.stats()["restarts"] == 1
    assert sum(batch.numel() for batch in batches) == 400
    assert sum(batch["collector", "random"].sum() for batch in batches) == 30


def test_one_process_beside_fails_the_same_way():
    with AsyncCollector(lambda: CrashingEnv(at_step=25), frames_per_batch=10, seed=7) as collector:
        with pytest.raises(EnvError, match="crashed as asked") as caught:
            collect(collector)
        assert (caught.value.worker, caught.value.env, caught.value.step) == (0, 0, 25)
        assert check_transitions([*caught.value.seen, collector.partial()]) == 25
