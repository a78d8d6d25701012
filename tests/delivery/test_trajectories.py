"""TrajectoryAssembler: every frame once, whole trajectories only, in the order they ended."""

from itertools import chain

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode

from swath.delivery.trajectories import Pending, TrajectoryAssembler
from swath.errors import UsageError

MASK = ("collector", "mask")
IDS = ("collector", "traj_ids")


class Stream:
    """N envs with random episode lengths, cut into rollouts whose memory is reused.

    `frame` counts all frames from 1; `ended` lists the frames of each finished episode, in the
    order of the last step, then of the env.
    """

    def __init__(self, seed, num_envs=3, longest=9, masked=False):
        self.draw = torch.Generator().manual_seed(seed)
        self.num_envs, self.longest, self.masked = num_envs, longest, masked
        self.next_id = 10**12
        self.frames, self.ended = 0, []
        self.episodes = [self.start() for _ in range(num_envs)]

    def start(self):
        self.next_id += 7
        length = int(torch.randint(1, self.longest + 1, (1,), generator=self.draw))
        return {"id": self.next_id, "left": length, "frames": []}

    def step(self, env):
        """Return (frame, id, done, valid) of one env's step."""
        if self.masked and torch.rand(1, generator=self.draw) < 0.3:
            return -1, self.episodes[env]["id"] + 3, True, False
        episode = self.episodes[env]
        self.frames += 1
        episode["left"] -= 1
        episode["frames"].append(self.frames)
        done = episode["left"] == 0
        if done:
            self.ended.append(episode["frames"])
            self.episodes[env] = self.start()
        return self.frames, episode["id"], done, True

    def rollout(self, steps):
        """Return `[N, T]`, a transposed view of time-first memory."""
        rows = [[self.step(env) for env in range(self.num_envs)] for _ in range(steps)]
        frame, ids, done, valid = (
            torch.tensor(rows, dtype=torch.int64).view(steps, self.num_envs, 4).unbind(-1)
        )
        data = {
            "pixels": (frame % 251).to(torch.uint8)[..., None, None].repeat(1, 1, 2, 2),
            "next": {"done": done.bool().unsqueeze(-1), "reward": frame.unsqueeze(-1) / 3},
            "collector": {"traj_ids": ids, "frame": frame},
        }
        if self.masked:
            data["collector"]["mask"] = valid.bool()
        return TensorDict(data, [steps, self.num_envs]).transpose(0, 1)

    @property
    def open(self):
        return sum(len(episode["frames"]) for episode in self.episodes)


def push_and_recycle(assembler, rollout):
    """Push, then overwrite the memory under the rollout as the next one would."""
    assembler.push(rollout)
    rollout.apply_(lambda leaf: leaf.fill_(1))


def check_frames(flat, frames):
    """All leaves of `flat` are those of these frames, in this order."""
    number = torch.tensor(frames)
    assert flat["collector", "frame"].tolist() == frames
    assert torch.equal(flat["next", "reward"], number.unsqueeze(-1) / 3)
    pixels = (number % 251).to(torch.uint8)[..., None, None].expand(-1, 2, 2)
    assert torch.equal(flat["pixels"], pixels)


def joined(episodes):
    return list(chain.from_iterable(episodes))


def pop_all(assembler):
    return list(iter(assembler.pop, None))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_trajectories", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_frame_leaves_once_in_whole_trajectories_in_order(seed, num_trajectories, masked):
    stream = Stream(seed, masked=masked)
    assembler = TrajectoryAssembler(num_trajectories, "cat")
    given = []
    for steps in [1, 5, 0, 2, 13, 1, 40, 3, 7] * 2:
        push_and_recycle(assembler, stream.rollout(steps))
        given += pop_all(assembler)
        waiting = stream.ended[len(given) * num_trajectories :]
        assert len(waiting) < num_trajectories
        frames_waiting = sum(map(len, waiting))
        assert assembler.pending() == (len(waiting), frames_waiting, stream.open)
    assert len(given) == len(stream.ended) // num_trajectories > 10
    for i, batch in enumerate(given):
        episodes = stream.ended[i * num_trajectories : (i + 1) * num_trajectories]
        check_frames(batch, joined(episodes))
        assert batch[IDS].unique_consecutive().numel() == num_trajectories
        assert batch["next", "done"].sum() == num_trajectories
        assert batch.names == ["time"]
        assert MASK not in batch.keys(True)


@pytest.mark.parametrize("masked", [False, True])
def test_padded_batches_have_one_trajectory_per_row(masked):
    stream = Stream(3, masked=masked)
    assembler = TrajectoryAssembler(3, "padded")
    for _ in range(8):
        push_and_recycle(assembler, stream.rollout(6))
    batches = pop_all(assembler)
    assert len(batches) == len(stream.ended) // 3 > 3
    for i, batch in enumerate(batches):
        episodes = stream.ended[3 * i : 3 * i + 3]
        lengths = [len(episode) for episode in episodes]
        assert batch.batch_size == (3, max(lengths))
        assert batch.names == [None, "time"]
        assert batch[MASK].sum(1).tolist() == lengths
        for row, episode in enumerate(episodes):
            check_frames(batch[row, : len(episode)], episode)
            padding = batch[row, len(episode) :]
            assert not any(leaf.any() for leaf in padding.values(True, True))


def test_those_that_end_at_the_same_step_leave_by_env_index():
    ids = torch.tensor([[30, 30, 31], [20, 21, 21], [10, 10, 10]])
    done = torch.tensor([[False, True, False], [True, False, True], [False, False, True]])
    data = {"next": {"done": done.unsqueeze(-1)}, "collector": {"traj_ids": ids}}
    assembler = TrajectoryAssembler(4, "cat")
    assembler.push(TensorDict(data, [3, 3]))
    assert assembler.pop()[IDS].unique_consecutive().tolist() == [20, 30, 21, 10]
    assert assembler.pending() == Pending(trajectories=0, frames=0, open_frames=1)


def test_one_env_gives_rollouts_of_one_dimension():
    stream = Stream(5, num_envs=1)
    assembler = TrajectoryAssembler(2, "cat")
    for _ in range(10):
        assembler.push(stream.rollout(7)[0])
    batches = pop_all(assembler)
    assert len(batches) == len(stream.ended) // 2 > 3
    check_frames(torch.cat(batches), joined(stream.ended[: 2 * len(batches)]))


def test_stacked_workers_count_as_more_envs():
    one, two = Stream(1), Stream(2)
    assembler = TrajectoryAssembler(1, "cat")
    for _ in range(6):
        rollouts = [one.rollout(5), two.rollout(5)]
        rollouts[1].set(IDS, rollouts[1][IDS] + 1)  # ids are unique over workers
        assembler.push(lazy_stack(rollouts))
    frames = [batch["collector", "frame"].tolist() for batch in pop_all(assembler)]
    assert sorted(frames) == sorted(one.ended + two.ended)


def test_a_batch_does_not_change_when_more_is_pushed():
    stream = Stream(0)
    assembler = TrajectoryAssembler(2, "cat")
    kept = []
    for _ in range(12):
        push_and_recycle(assembler, stream.rollout(5))
        kept += pop_all(assembler)
    check_frames(torch.cat(kept), joined(stream.ended[: 2 * len(kept)]))


def test_drain_gives_the_complete_then_the_unfinished_and_empties():
    stream = Stream(7)
    assembler = TrajectoryAssembler(1000, "padded")
    for _ in range(5):
        push_and_recycle(assembler, stream.rollout(4))
    rest = [episode["frames"] for episode in stream.episodes if episode["frames"]]
    rest.sort()  # by first frame: the order of appearance
    assert stream.ended
    assert rest
    flat = assembler.drain()
    check_frames(flat, joined(stream.ended + rest))
    assert MASK not in flat.keys(True)
    assert assembler.pending() == (0, 0, 0)
    assert assembler.drain() is None
    assert assembler.pop() is None


def test_discard_open_forgets_the_unfinished_only():
    stream = Stream(8)
    assembler = TrajectoryAssembler(1, "cat")
    push_and_recycle(assembler, stream.rollout(11))
    assert assembler.discard_open() == stream.open > 0
    assert assembler.discard_open() == 0
    assert assembler.pending() == (len(stream.ended), sum(map(len, stream.ended)), 0)
    for episode in stream.episodes:  # what a reset does: new episodes, new ids
        episode.update(stream.start())
    push_and_recycle(assembler, stream.rollout(9))
    frames = [batch["collector", "frame"].tolist() for batch in pop_all(assembler)]
    assert frames == stream.ended


@pytest.mark.parametrize("traj_format", ["padded", "cat"])
def test_a_loaded_state_continues_as_if_uninterrupted(traj_format):
    stream = Stream(9)
    original = TrajectoryAssembler(3, traj_format)
    for _ in range(4):
        original.push(stream.rollout(5))
    original.pop()
    state = original.state_dict()
    copy = TrajectoryAssembler(3, traj_format)
    copy.push(Stream(1).rollout(6))  # forgotten by the load
    copy.load_state_dict(state)
    assert copy.pending() == original.pending()
    assert original.pending().trajectories
    assert original.pending().open_frames
    state["frames"].apply_(lambda leaf: leaf.fill_(1))  # the copy does not look at it any more
    for _ in range(5):
        rollout = stream.rollout(5)
        original.push(rollout)
        copy.push(rollout)
        for expected, batch in zip(pop_all(original), pop_all(copy), strict=True):
            assert batch.batch_size == expected.batch_size
            assert set(batch.keys(True, True)) == set(expected.keys(True, True))
            assert (batch == expected).all()
    assert (original.drain() == copy.drain()).all()


def test_the_state_of_an_empty_assembler_can_be_loaded():
    assembler = TrajectoryAssembler(1, "cat")
    assembler.push(Stream(0).rollout(5))
    assembler.load_state_dict(TrajectoryAssembler(1, "cat").state_dict())
    assert assembler.pending() == (0, 0, 0)


def test_state_is_a_copy_that_later_pushes_do_not_touch():
    stream = Stream(4)
    assembler = TrajectoryAssembler(1, "cat")
    push_and_recycle(assembler, stream.rollout(8))
    state = assembler.state_dict()
    before = state["frames"].clone()
    pop_all(assembler)
    push_and_recycle(assembler, stream.rollout(20))
    assert (state["frames"] == before).all()


def frames_of(batch):
    return [] if batch is None else batch["collector", "frame"].tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("masked", [False, True])
def test_every_frame_leaves_once_and_whole_whatever_leaves_by_another_way(seed, masked):
    stream = Stream(seed, masked=masked)
    assembler, whole, rest = TrajectoryAssembler(1, "cat"), [], []
    for number in range(40):
        rollout = stream.rollout(3)
        if number % 5 == seed % 5:  # somebody else has it
            assembler.tear(rollout)
            frames = rollout["collector", "frame"]
            rest += frames[rollout[MASK]].tolist() if masked else frames.flatten().tolist()
        else:
            push_and_recycle(assembler, rollout)
        if number % 7 == 6:
            rest += frames_of(assembler.drain())
        if number % 11 == 10:  # what is torn stays so over a state
            again = TrajectoryAssembler(1, "cat")
            again.load_state_dict(assembler.state_dict())
            assembler = again
        whole += [batch["collector", "frame"].tolist() for batch in pop_all(assembler)]
    rest += frames_of(assembler.drain())
    assert [each for each in whole if each not in stream.ended] == []
    assert sorted([*chain(*whole), *rest]) == list(range(1, stream.frames + 1))
    assert len(whole) > 5


def test_what_is_torn_is_forgotten_with_the_open_trajectories():
    stream = Stream(3, num_envs=1, longest=50)
    assembler = TrajectoryAssembler(1, "cat")
    while stream.episodes[0]["left"] < 6:
        stream.rollout(1)
    assembler.push(stream.rollout(2))
    assembler.tear(stream.rollout(2))
    assembler.push(stream.rollout(1))
    assert assembler.pending() == (0, 0, 3)
    assert assembler.discard_open() == 3
    assert assembler.state_dict() == {"frames": None, "lengths": [], "torn": []}


@pytest.mark.parametrize("resets", [False, True])
def test_memory_stays_flat_while_trajectories_complete_or_are_discarded(resets):
    stream = Stream(2)
    assembler = TrajectoryAssembler(2, "cat")
    capacities = []
    for _ in range(60):
        assembler.push(stream.rollout(10))
        pop_all(assembler)
        if resets:
            assembler.discard_open()
        capacities.append(len(assembler._frames))
    # Held at most: 3 envs x 10 new frames, and what 3 open and 1 waiting episode had before.
    assert capacities[-1] == capacities[30] <= 1.5 * (3 * 10 + 4 * stream.longest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rollouts_on_a_gpu_give_the_same_batches_there():
    stream = Stream(6)
    here, there = TrajectoryAssembler(2, "padded"), TrajectoryAssembler(2, "padded")
    for _ in range(6):
        rollout = stream.rollout(5)
        here.push(rollout)
        there.push(rollout.to("cuda"))
        there.load_state_dict(there.state_dict())
        for expected, batch in zip(pop_all(here), pop_all(there), strict=True):
            assert batch[MASK].device.type == "cuda"
            assert (batch.cpu() == expected).all()
    assert (there.drain().cpu() == here.drain()).all()
    assert there.discard_open() == 0


class CountElements(TorchDispatchMode):
    """Counts operations and the elements of the tensors that they make."""

    calls = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, torch.Tensor) and not (func.is_view or func._schema.is_mutable):
            self.elements += result.numel()
        return result


def test_the_cost_of_a_push_does_not_grow_with_what_waits():
    costs = []
    for waiting in (1, 200):
        assembler = TrajectoryAssembler(10**6, "padded")
        done = torch.ones(waiting, 1, dtype=torch.bool)
        ids = torch.arange(waiting) + 100
        old = {"next": {"done": done}, "collector": {"traj_ids": ids}, "x": torch.ones(waiting, 50)}
        assembler.push(TensorDict(old, [waiting]))
        assembler._make_room(40)  # which is paid for over many pushes
        new = {
            "next": {"done": torch.arange(30).view(3, 10, 1) % 5 == 4},
            "collector": {"traj_ids": torch.arange(30).view(3, 10) // 5},
            "x": torch.ones(3, 10, 50),
        }
        with CountElements() as count:
            assembler.push(TensorDict(new, [3, 10]))
        assert assembler.pending().trajectories == waiting + 6
        costs.append((count.calls, count.elements))
    assert costs[0] == costs[1]


def test_gradients_and_the_graph_stay_outside():
    stream = Stream(0)
    rollout = stream.rollout(30)
    rollout["value"] = torch.ones(3, 30, requires_grad=True)
    rollout["values"] = torch.ones(3, 30, 2, requires_grad=True)
    assembler = TrajectoryAssembler(1, "padded")
    assembler.push(rollout)
    batch = assembler.pop()
    assert not batch["value"].requires_grad
    assert not batch["values"].requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 12])
@pytest.mark.parametrize("offset", [0, 1])
def test_frames_of_any_width_and_alignment_are_kept_as_they_are(dtype, width, offset):
    memory = torch.arange(offset + 4 * width).to(dtype)
    values = memory[offset:].view(4, width)
    data = {
        "x": values,
        "strided": torch.stack([values, values], -1)[..., 0],
        "next": {"done": torch.tensor([[False], [True], [False], [True]])},
        "collector": {"traj_ids": torch.tensor([0, 0, 1, 1])},
    }
    assembler = TrajectoryAssembler(2, "cat")
    assembler.push(TensorDict(data, [4]))
    batch = assembler.pop()
    assert batch["x"].dtype == dtype
    assert torch.equal(batch["x"], values)
    assert torch.equal(batch["strided"], values)


def test_a_rollout_that_differs_is_refused_and_changes_nothing():
    stream = Stream(0)
    assembler = TrajectoryAssembler(1, "cat")
    assembler.push(stream.rollout(4))
    pending = assembler.pending()
    wider = stream.rollout(4)
    wider["extra"] = torch.zeros(3, 4)
    with pytest.raises(UsageError, match=r"differs.*'extra'"):
        assembler.push(wider)
    with pytest.raises(UsageError, match=r"differs.*'reward'"):
        assembler.push(stream.rollout(4).set(("next", "reward"), torch.zeros(3, 4, 2)))
    assert assembler.pending() == pending


def test_values_that_are_no_tensors_are_refused_by_name():
    rollout = Stream(0).rollout(4)
    rollout["text"] = NonTensorData("walk", batch_size=(3, 4))
    with pytest.raises(UsageError, match="'text' is not a tensor"):
        TrajectoryAssembler(1, "cat").push(rollout)
