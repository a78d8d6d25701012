"""split_trajectories against a plain Python reading of what it promises."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torch.utils._python_dispatch import TorchDispatchMode

from swath.collectors.utils import split_trajectories
from swath.delivery.split import group_frames
from swath.errors import UsageError

LEAVES = ["pixels", "action", "flag", ("next", "reward"), ("collector", "traj_ids")]
STRIDED_WARNS = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def make_rollout(ids):
    """A rollout whose every leaf tells its frames apart, none of them zero."""
    ids = torch.as_tensor(ids)
    number = torch.arange(1, ids.numel() + 1).view(ids.shape)
    return TensorDict(
        {
            "pixels": number[..., None, None].expand(*ids.shape, 2, 3).to(torch.uint8),
            "action": number,
            "flag": number[..., None] % 2 == 0,
            "next": {
                "reward": number[..., None] / 7,
                "done": torch.zeros(*ids.shape, 1, dtype=torch.bool),
            },
            "collector": {"traj_ids": ids},
        },
        ids.shape,
        names=[None] * (ids.dim() - 1) + ["time"],
    )


def naive_groups(ids, valid=None):
    """Flat frame indices of each trajectory, by first appearance, one frame at a time."""
    flat = torch.as_tensor(ids).flatten().tolist()
    keep = [True] * len(flat) if valid is None else torch.as_tensor(valid).flatten().tolist()
    groups = {}
    for index, (name, kept) in enumerate(zip(flat, keep, strict=True)):
        if kept:
            groups.setdefault(name, []).append(index)
    return list(groups.values())


def check_padded(batch, rollout, groups, mask_key=("collector", "mask"), keys=LEAVES):
    longest = max(map(len, groups), default=0)
    assert batch.batch_size == (len(groups), longest)
    expected_mask = [[t < len(group) for t in range(longest)] for group in groups]
    assert batch[mask_key].dtype == torch.bool
    assert batch[mask_key].tolist() == expected_mask
    for key in keys:
        frames = rollout[key].flatten(0, rollout.batch_dims - 1)
        assert batch[key].dtype == frames.dtype
        for row, group in enumerate(groups):
            assert torch.equal(batch[key][row, : len(group)], frames[group]), (key, row)
            assert not batch[key][row, len(group) :].any(), (key, row)


@st.composite
def ids_and_masks(draw):
    rows, steps = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    cells = {"min_size": rows * steps, "max_size": rows * steps}
    ids = draw(st.lists(st.integers(-3, 8), **cells))
    mask = draw(st.none() | st.lists(st.booleans(), **cells))
    shape = (rows, steps)
    return torch.tensor(ids, dtype=torch.int64).view(shape), (
        None if mask is None else torch.tensor(mask, dtype=torch.bool).view(shape)
    )


@given(ids_and_masks())
@settings(max_examples=150, deadline=None)
def test_padded_equals_the_naive_reading_whatever_the_ids_and_the_mask(case):
    ids, mask = case
    rollout = make_rollout(ids)
    if mask is not None:
        rollout["collector", "mask"] = mask
    check_padded(split_trajectories(rollout), rollout, naive_groups(ids, mask))


def test_groups_say_order_and_length():
    order, lengths = group_frames(torch.tensor([5, 2, 5, 2, 2, 9, 5]))
    assert order.tolist() == [0, 2, 6, 1, 3, 4, 5]
    assert lengths.tolist() == [3, 3, 1]


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)])
def test_any_number_of_batch_dimensions(shape):
    ids = torch.tensor([4, 4, 1, 1, 1, 0, 4, 7, 7, 7, 7, 2]).view(shape)
    rollout = make_rollout(ids)
    check_padded(split_trajectories(rollout), rollout, naive_groups(ids))


def test_an_id_in_several_runs_and_rows_is_one_trajectory():
    batch = split_trajectories(make_rollout([[3, 3, 8, 3], [8, 1, 1, 3]]))
    assert batch["action"].tolist() == [[1, 2, 4, 8], [3, 5, 0, 0], [6, 7, 0, 0]]


def test_a_transposed_view_of_time_first_memory_gives_the_same():
    ids = torch.tensor([[0, 0, 1], [2, 2, 2], [3, 4, 4], [5, 5, 5]])
    view = make_rollout(ids.t().contiguous()).transpose(0, 1)
    view["action"] = view["action"].t().contiguous().t()
    assert not view["pixels"].is_contiguous()
    check_padded(split_trajectories(view), view, naive_groups(ids))


def test_full_length_trajectories_get_two_dimensions_and_a_mask_too():
    batch = split_trajectories(make_rollout([6, 6, 6]))
    assert batch.batch_size == (1, 3)
    assert batch["collector", "mask"].tolist() == [[True, True, True]]


def test_the_time_dimension_keeps_its_name_and_gets_none_if_it_had_none():
    rollout = make_rollout([[0, 0, 1], [2, 2, 2]])
    assert split_trajectories(rollout).names == [None, "time"]
    rollout.names = [None, None]
    assert split_trajectories(rollout).names == [None, None]


def test_the_input_is_not_changed():
    rollout = make_rollout([[0, 0, 1], [1, 2, 2]])
    rollout["collector", "mask"] = torch.tensor([[True, False, True], [True, True, False]])
    before = rollout.clone()
    split_trajectories(rollout)
    assert (rollout == before).all()
    assert set(rollout.keys(True, True)) == set(before.keys(True, True))


def test_done_flags_end_trajectories_when_there_are_no_ids():
    rollout = make_rollout([[0, 0, 1, 1], [2, 2, 2, 2]])
    done = torch.tensor([[False, True, False, True], [True, False, False, False]])
    rollout["next", "done"] = done.unsqueeze(-1)
    ids = [[0, 0, 1, 1], [2, 3, 3, 3]]
    by_done = split_trajectories(rollout.exclude("collector"))
    check_padded(by_done, rollout, naive_groups(ids), keys=LEAVES[:-1])
    with_ids = split_trajectories(rollout)
    check_padded(with_ids, rollout, naive_groups([[0, 0, 1, 1], [2, 2, 2, 2]]))


def test_done_of_a_masked_frame_ends_nothing():
    rollout = make_rollout([[0, 0, 0, 0]])
    rollout["next", "done"] = torch.tensor([[[False], [True], [True], [False]]])
    rollout["mask"] = torch.tensor([[True, False, True, True]])
    batch = split_trajectories(rollout.exclude("collector"), prefix=())
    assert batch["action"].tolist() == [[1, 3], [4, 0]]


@pytest.mark.parametrize("done_key", ["ended", ("next", "ended")])
def test_a_done_key_means_the_flag_under_next(done_key):
    rollout = make_rollout([0, 0, 0]).exclude("collector")
    rollout["ended"] = torch.zeros(3, 1, dtype=torch.bool)  # the flag of the state before
    rollout["next", "ended"] = torch.tensor([[False], [True], [False]])
    assert split_trajectories(rollout, done_key=done_key)["action"].tolist() == [[1, 2], [3, 0]]
    at_root = rollout.exclude(("next", "ended"))
    assert split_trajectories(at_root, done_key="ended").batch_size == (1, 3)


@pytest.mark.parametrize(
    ("prefix", "ids_key", "mask_key"),
    [
        (None, ("collector", "traj_ids"), ("collector", "mask")),
        ("meta", ("meta", "traj_ids"), ("meta", "mask")),
        (("a", "b"), ("a", "b", "traj_ids"), ("a", "b", "mask")),
        ((), "traj_ids", "mask"),
        ((), ("collector", "traj_ids"), "mask"),
    ],
)
def test_prefix_says_where_ids_and_mask_are(prefix, ids_key, mask_key):
    ids = torch.tensor([[4, 4, 2, 2, 2], [2, 2, 0, 0, 0]])
    rollout = make_rollout(ids).exclude("collector")
    rollout[ids_key] = ids
    batch = split_trajectories(rollout, prefix=prefix)
    keys = [*LEAVES[:-1], ids_key]
    check_padded(batch, rollout, naive_groups(ids), mask_key, keys)
    assert set(batch.keys(True, True)) == {*keys, ("next", "done"), mask_key}
    again = split_trajectories(batch, prefix=prefix)  # reads the mask that it wrote
    check_padded(again, batch, naive_groups(batch[ids_key], batch[mask_key]), mask_key, keys)


def test_prefix_root_still_respects_the_mask_of_the_collector():
    rollout = make_rollout([[0, 0, 0], [1, 1, 1]])
    rollout["collector", "mask"] = torch.tensor([[True, True, True], [True, False, False]])
    batch = split_trajectories(rollout, prefix=())
    assert batch["mask"].tolist() == [[True, True, True], [True, False, False]]
    assert ("collector", "mask") not in batch.keys(True)
    assert batch["action"].tolist() == [[1, 2, 3], [4, 0, 0]]


def test_trajectory_key_may_be_anywhere_and_have_a_trailing_one():
    rollout = make_rollout([0, 0, 0])
    rollout["episode"] = torch.tensor([[5], [5], [6]])
    batch = split_trajectories(rollout, trajectory_key="episode")
    assert batch["collector", "mask"].tolist() == [[True, True], [True, False]]


@STRIDED_WARNS
@pytest.mark.parametrize("layout", [True, torch.strided, torch.jagged])
@pytest.mark.parametrize("ids", [[[3, 3, 8, 3], [8, 1, 1, 3]], [[1, 1, 2, 2], [3, 3, 4, 4]]])
def test_nested_forms_hold_the_same_frames(layout, ids):
    rollout = make_rollout(ids)
    rollout["collector", "mask"] = torch.ones(2, 4, dtype=torch.bool)
    batch = split_trajectories(rollout, as_nested=layout)
    groups = naive_groups(ids)
    ragged = -1 if len(set(map(len, groups))) > 1 else len(groups[0])
    jagged = layout is torch.jagged
    assert batch.batch_size == ((len(groups),) if jagged else (len(groups), ragged))
    assert ("collector", "mask") not in batch.keys(True)
    expected_layout = torch.jagged if jagged else torch.strided
    assert {batch[key].layout for key in LEAVES} == {expected_layout}
    assert all(batch[key].is_nested for key in LEAVES)
    doubled = batch.apply(lambda leaf: leaf + leaf if leaf.dtype == torch.int64 else leaf)
    rows = zip(batch.unbind(0), doubled.unbind(0), groups, strict=True)
    for row, double, group in rows:
        for key in LEAVES:
            assert torch.equal(row[key], rollout[key].flatten(0, 1)[group])
        assert torch.equal(double["action"], 2 * row["action"])


def test_jagged_leaves_can_be_combined_and_padded():
    rollout = make_rollout([[3, 3, 8, 3], [8, 1, 1, 3]])
    jagged = split_trajectories(rollout, as_nested=torch.jagged)
    both = jagged["action"] + jagged["collector", "traj_ids"]
    assert both[1].tolist() == [3 + 8, 5 + 8]
    padded = split_trajectories(rollout)
    for key in LEAVES:
        if rollout[key].dtype != torch.bool:
            assert torch.equal(torch.nested.to_padded_tensor(jagged[key], 0), padded[key])


@STRIDED_WARNS
@pytest.mark.parametrize("as_nested", [False, torch.strided, torch.jagged])
def test_gradients_reach_the_frames(as_nested):
    rollout = make_rollout([[0, 1, 1], [1, 2, 2]])
    value = torch.arange(6.0).view(2, 3).requires_grad_()
    rollout["value"] = value
    rows = split_trajectories(rollout, as_nested=as_nested)["value"]
    if as_nested is not False:
        rows = torch.nested.to_padded_tensor(rows, 0.0)
    (rows**2).sum().backward()
    assert torch.equal(value.grad, 2 * value)


@STRIDED_WARNS
@pytest.mark.parametrize("as_nested", [False, torch.strided, torch.jagged])
def test_a_value_that_is_no_tensor_travels_along(as_nested):
    rollout = make_rollout([[0, 1, 1], [1, 2, 2]])
    rollout["task"] = NonTensorData("walk", batch_size=(2, 3))
    batch = split_trajectories(rollout, as_nested=as_nested)
    assert batch["task"] == "walk"
    assert batch.get("task").batch_size == batch.batch_size


def test_values_of_other_kinds_are_refused_by_name():
    rollout = make_rollout([[0, 1, 1], [1, 2, 2]])
    rollout["text"] = NonTensorStack.from_list([["a", "b", "c"], ["d", "e", "f"]])
    with pytest.raises(UsageError, match=r"'text' is a NonTensorStack.*encode it as a tensor"):
        split_trajectories(rollout)


def test_lazy_stacks_are_split_like_the_rest():
    rows = [make_rollout([0, 0, 1]), make_rollout([1, 2, 2])]
    batch = split_trajectories(lazy_stack(rows))
    assert batch["action"].tolist() == [[1, 2], [3, 1], [2, 3]]


def test_no_frames_give_no_rows():
    empty = split_trajectories(make_rollout(torch.zeros(2, 0, dtype=torch.int64)))
    assert empty.batch_size == (0, 0)
    assert empty["pixels"].shape == (0, 0, 2, 3)
    rollout = make_rollout([0, 0])
    rollout["collector", "mask"] = torch.zeros(2, dtype=torch.bool)
    assert split_trajectories(rollout).batch_size == (0, 0)
    with pytest.raises(UsageError, match="no frames"):
        split_trajectories(rollout, as_nested=True)


@pytest.mark.parametrize(
    ("keep", "arguments", "message"),
    [
        (["action"], {}, r"no trajectory ids and no done flags at \('next', 'done'\)"),
        (["action"], {"done_key": "over"}, "no done flags at 'over'.*Name one"),
        (["action", "next"], {"trajectory_key": "episode"}, "'episode' is not in the rollout"),
        (["pixels"], {"trajectory_key": "pixels"}, "one value per frame is needed"),
        (["collector"], {"as_nested": "jagged"}, "as_nested is 'jagged'; expected False, True"),
        (["collector"], {"as_nested": torch.sparse_coo}, "as_nested is torch.sparse_coo"),
    ],
)
def test_what_is_missing_or_wrong_is_named(keep, arguments, message):
    with pytest.raises(UsageError, match=message):
        split_trajectories(make_rollout([[0, 0], [1, 1]]).select(*keep), **arguments)


def test_a_rollout_without_time_is_refused():
    with pytest.raises(UsageError, match=r"batch size \[\]"):
        split_trajectories(TensorDict({}, []))


class CountOps(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("as_nested", [False, torch.jagged])
def test_the_number_of_tensor_operations_does_not_grow_with_the_trajectories(as_nested):
    calls = []
    for trajectories in (3, 300):
        rollout = make_rollout(torch.arange(600) % trajectories)
        with CountOps() as count:
            split_trajectories(rollout, as_nested=as_nested)
        calls.append(count.calls)
    assert calls[0] == calls[1] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("as_nested", [False, torch.jagged])
def test_a_rollout_on_a_gpu_is_split_there(as_nested):
    rollout = make_rollout([[3, 3, 8, 3], [8, 1, 1, 3]])
    rollout["collector", "mask"] = torch.tensor([[True] * 4, [True, False, True, True]])
    expected = split_trajectories(rollout, as_nested=as_nested)
    batch = split_trajectories(rollout.to("cuda"), as_nested=as_nested)
    for key in LEAVES:
        assert batch[key].device.type == "cuda"
        for row, expected_row in zip(batch[key].unbind(), expected[key].unbind(), strict=True):
            assert torch.equal(row.cpu(), expected_row)


@pytest.mark.parametrize("seed", range(5))
def test_equals_torchrl_where_ids_are_adjacent_and_lengths_differ(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("torchrl.collectors.utils")
    draw = torch.Generator().manual_seed(seed)
    ends = torch.rand(4, 11, generator=draw) < 0.25
    ends[0, 0] = True  # or torchrl returns the rollout as it is when no episode ends
    begins = torch.cat([torch.ones(4, 1, dtype=torch.bool), ends[:, :-1]], 1)
    rollout = make_rollout(begins.flatten().cumsum(0).view(4, 11))
    rollout["next", "done"] = ends.unsqueeze(-1)
    ours, theirs = split_trajectories(rollout), peer.split_trajectories(rollout)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        assert torch.equal(ours[key], theirs[key]), key
    by_done = split_trajectories(rollout.exclude("collector"))
    assert torch.equal(by_done["action"], theirs["action"])
