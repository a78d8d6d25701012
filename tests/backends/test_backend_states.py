"""States: a load replaces all that was there, and a resume goes on as if nothing had been."""

from __future__ import annotations

import functools

import multi_kit as kit
import pytest
import torch

from swath.errors import EnvError
from swath.testing import CountingEnv, CrashingEnv

pytestmark = pytest.mark.timeout(240)
KINDS = pytest.mark.parametrize("kind", list(kit.KINDS))
NOT_RAY = pytest.mark.over("processes", "gloo", "rpc", "mpi")


# Workers of other programs, as those of mpirun, cannot import this file.
crashing = functools.partial(CrashingEnv, at_step=57)


@NOT_RAY
@KINDS
@pytest.mark.parametrize("extra", [{}, {"trajs_per_batch": 1, "traj_format": "cat"}])
def test_a_state_replaces_what_a_failure_has_left(backend, kind, extra):
    frames = 10 if kind == "async" else 20
    options = {"frames_per_batch": frames, "total_frames": 400, "seed": 2, **extra}
    with backend.make(kind, [crashing] * 2, **options) as collector:
        collector.next()
        state, before = collector.state_dict(), collector.stats()["frames"]
        held = collector.partial()
        with pytest.raises(EnvError, match="crashed as asked"):
            list(collector)
        collector.load_state_dict(state)
        assert collector.stats()["frames"] == before
        again = collector.partial()
        assert (again is None) == (held is None)
        assert again is None or torch.equal(again["observation"], held["observation"])
        assert collector.stats()["frames"] == before


@NOT_RAY
@KINDS
def test_a_state_in_which_envs_go_on_can_be_loaded_where_all_have_ended(backend, kind):
    options = {"frames_per_batch": 4, "reset_when_done": False, "seed": 1}
    makers = [lambda: CountingEnv(longest=60)] * 2
    with backend.make(kind, makers, **options) as collector:
        first = [collector.next()]
        state = collector.state_dict()
        runs = []
        for _ in range(2):
            runs.append([batch for batch, _ in zip(collector, range(90), strict=False)])
            collector.load_state_dict(state)
    seen = [
        {tuple(row) for b in [*first, *run] for row in kit.rows(b[b["collector", "mask"]]).tolist()}
        for run in runs
    ]
    assert seen[0] == seen[1]
    assert 2 < len(runs[0]) < 90


@NOT_RAY
@pytest.mark.parametrize("kind", ["sync", "beside"])
@pytest.mark.parametrize("random", [{}, {"init_random_frames": 200}])
def test_an_unseeded_state_from_before_the_first_random_action_resumes(backend, kind, random):
    policy = kit.Telling() if random else None
    with backend.make(kind, [kit.wide] * 2, policy, frames_per_batch=40, **random) as collector:
        for _ in range(2):  # from the start, and later
            state = collector.state_dict()
            batches = [collector.next() for _ in range(2)]
            collector.load_state_dict(state)
            for batch in batches:
                assert torch.equal(collector.next()["action"], batch["action"])
            collector.reset()
