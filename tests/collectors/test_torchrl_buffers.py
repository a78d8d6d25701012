"""What TorchRL's replay buffers get: the form that its own collectors write."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.utils import restore_next
from swath.data import ReplayBuffer
from swath.envs import SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions

torchrl_data = pytest.importorskip("torchrl.data")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def theirs(size=200, **options):
    storage = torchrl_data.LazyTensorStorage(size, **options)
    return torchrl_data.ReplayBuffer(storage=storage, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def torchrl_keeps_descriptors():
    """Let TorchRL open what its buffers share, once, before anything is counted."""
    theirs(4).extend(TensorDict({"a": torch.zeros(1)}, [1]))


def test_each_workers_frames_stand_in_a_row_of_their_own():
    buffer = theirs()
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=60, replay_buffer=buffer
    ) as collector:
        assert list(collector) == [None] * 3
        assert collector.stats()["batches"] == 3
    written = buffer[:]
    assert written.batch_size == (60,)
    assert buffer.sample().batch_size == (4,)
    assert check_transitions(written) == 60
    of_worker = written["collector", "traj_ids"] >> 40
    assert of_worker.tolist() == ([0] * 10 + [1] * 10) * 3


def test_workers_with_several_envs_write_a_row_for_each():
    buffer = theirs()
    with MultiSyncCollector(
        [partial(SerialEnv, 2, CountingEnv), CountingEnv],
        cat_results=0,
        frames_per_batch=30,
        total_frames=60,
        replay_buffer=buffer,
    ) as collector:
        list(collector)
    written = buffer[:]
    assert written.batch_size == (6, 10)
    assert check_transitions(written) == 60


def test_a_storage_that_keeps_two_dimensions_apart_gets_them():
    buffer = theirs(ndim=2)
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=60, replay_buffer=buffer
    ) as collector:
        list(collector)
    assert buffer[:].batch_size == (2, 30)


def test_a_worker_that_was_stopped_early_writes_its_frames_alone():
    buffer = theirs()
    with MultiSyncCollector(
        [CountingEnv] * 3,
        frames_per_batch=60,
        total_frames=180,
        preemptive_threshold=0.3,
        replay_buffer=buffer,
    ) as collector:
        list(collector)
        frames = collector.stats()["frames"]
    written = buffer[:]
    assert ("collector", "mask") not in written.keys(True)
    assert len(written) == frames == check_transitions(written)


@pytest.mark.parametrize("form", ["padded", "cat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_whole_trajectories_come_end_to_end(workers, form):
    from torchrl.data import LazyTensorStorage, SliceSampler
    from torchrl.data import ReplayBuffer as Theirs

    sampler = SliceSampler(num_slices=2, traj_key=("collector", "traj_ids"), strict_length=False)
    buffer = Theirs(storage=LazyTensorStorage(500), sampler=sampler, batch_size=8)
    options = {"frames_per_batch": 20, "total_frames": 120, "trajs_per_batch": 2}
    options |= {"traj_format": form, "replay_buffer": buffer, "max_frames_per_traj": 7}
    kind, envs = (MultiSyncCollector, [CountingEnv] * 2) if workers else (Collector, CountingEnv)
    with kind(envs, **options) as collector:
        list(collector)
    written = buffer[:]
    assert written.batch_dims == 1
    assert ("collector", "mask") not in written.keys(True)
    assert written["next", "done"].sum() == len(written["collector", "traj_ids"].unique())
    assert buffer.sample().batch_dims == 1


@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("more", [{}, {"trajs_per_batch": 2}, {"split_trajs": True}])
def test_one_process_writes_what_torchrl_writes(envs, more):
    from torchrl.collectors import Collector as TheirCollector
    from torchrl.envs import SerialEnv as TheirSerialEnv
    from torchrl.testing.mocking_classes import CountingEnv as TheirEnv

    policy = TensorDictModule(
        lambda o: torch.ones_like(o, dtype=torch.int8),
        in_keys=["observation"],
        out_keys=["action"],
    )
    forms = []
    for kind in (TheirCollector, Collector):
        buffer = theirs()
        make = partial(TheirEnv, max_steps=5)
        env = make() if envs == 1 else TheirSerialEnv(envs, make)
        collector = kind(
            env, policy, frames_per_batch=24, total_frames=72, replay_buffer=buffer, **more
        )
        list(collector)
        collector.shutdown()
        forms.append(tuple(buffer[:].batch_size))
    assert forms[0] == forms[1]


def test_a_broken_off_write_leaves_the_parts_that_are_left():
    class Once(torchrl_data.ReplayBuffer):
        broken = False

        def extend(self, batch):
            if len(self) == 10 and not self.broken:
                self.broken = True
                raise KeyboardInterrupt
            return super().extend(batch)

    buffer = Once(storage=torchrl_data.LazyTensorStorage(200), batch_size=4)
    with MultiSyncCollector(
        [CountingEnv] * 3, frames_per_batch=30, total_frames=60, replay_buffer=buffer, seed=0
    ) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert len(buffer) == 10
        state = collector.state_dict()
        assert list(collector) == [None] * 2
        assert check_transitions(buffer[:]) == 60
    again = Once(storage=torchrl_data.LazyTensorStorage(200), batch_size=4)
    again.broken = True
    with MultiSyncCollector(
        [CountingEnv] * 3, frames_per_batch=30, total_frames=60, replay_buffer=again, seed=0
    ) as collector:
        collector.load_state_dict(state)
        rest = collector.partial()
    assert rest.batch_size == (2, 10)
    assert (rest["collector", "traj_ids"][:, 0] >> 40).tolist() == [1, 2]


def test_compact_batches_can_be_kept_in_their_buffer_and_made_whole_there():
    from torchrl.data import LazyTensorStorage, SliceSampler
    from torchrl.data import ReplayBuffer as Theirs
    from torchrl.envs.transforms.rb_transforms import NextStateReconstructor

    sampler = SliceSampler(num_slices=2, traj_key=("collector", "traj_ids"), strict_length=False)
    buffer = Theirs(
        storage=LazyTensorStorage(200),
        sampler=sampler,
        batch_size=8,
        transform=NextStateReconstructor(),
    )
    with Collector(
        "CartPole-v1",
        frames_per_batch=50,
        total_frames=100,
        compact_obs=True,
        replay_buffer=buffer,
    ) as collector:
        list(collector)
    known = 0
    for _ in range(20):
        sample = buffer.sample()
        assert ("collector", "final_obs") not in sample.keys(True)
        inside = ~sample["next", "observation"].isnan().any(-1)
        follows = sample["observation"].roll(-1, 0)
        assert (sample["next", "observation"][inside] == follows[inside]).all()
        known += inside.sum().item()
    assert known > 20


def test_compact_batches_are_stacked_and_written_by_hand():
    with Collector("CartPole-v1", frames_per_batch=50, compact_obs=True) as collector:
        batches = [collector.next() for _ in range(2)]
    buffer = theirs()
    for batch in batches:
        buffer.extend(batch)
    assert buffer.sample().batch_size == (4,)
    assert torch.stack(batches).batch_size == (2, 50)
    joined = torch.cat(batches)
    with pytest.raises(UsageError, match=r"joined from several batches.*restore_next on each"):
        restore_next(joined)
    halves = torch.cat([batches[0][:20], batches[0][20:]])
    assert restore_next(halves)["next", "observation"].shape == (50, 4)


def test_swaths_own_buffer_and_any_other_get_whole_batches():
    got = []

    class Anything:
        def extend(self, batch):
            got.append(tuple(batch.batch_size))

    for buffer in (ReplayBuffer(200), Anything()):
        with MultiSyncCollector(
            [CountingEnv] * 2, frames_per_batch=20, total_frames=40, replay_buffer=buffer
        ) as collector:
            list(collector)
    assert got == [(2, 10)] * 2


def test_first_come_first_served_writes_frames():
    buffer = theirs()
    with MultiAsyncCollector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=60, replay_buffer=buffer
    ) as collector:
        list(collector)
    assert check_transitions(buffer[:]) == 60


@pytest.mark.filterwarnings("ignore:total_frames is reached")
@pytest.mark.parametrize("workers", [0, 2])
def test_all_trajectories_that_end_in_a_rollout_are_written_after_it(workers):
    buffer = theirs()
    options = {"frames_per_batch": 8, "total_frames": 80, "trajs_per_batch": 5}
    kind, envs = (MultiSyncCollector, [CountingEnv] * 2) if workers else (Collector, CountingEnv)
    with kind(envs, max_frames_per_traj=3, replay_buffer=buffer, **options) as collector:
        rollouts = 0
        for nothing in collector:
            rollouts += 1
            assert nothing is None
            ended = buffer[:]["next", "done"][:, 0] if len(buffer) else torch.zeros(0)
            assert ended.sum() == collector.stats()["episodes"]
            assert not len(ended) or ended[-1]
    assert rollouts == 10
