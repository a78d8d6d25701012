"""Datasets on disk: every frame once, as it was delivered; whole, or not there."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import MemoryMappedTensor, TensorDict

import swath
from swath.collectors import Collector
from swath.data import DatasetWriter, ReplayBuffer, describe, load_dataset
from swath.envs import GymEnv, SerialEnv
from swath.errors import ClosedError, UsageError
from swath.testing import CountingEnv, check_transitions


def batches(env: Any, frames: int = 100, policy: Any = None, **options: Any) -> list[TensorDict]:
    options = {"frames_per_batch": 30, "seed": 0, **options}
    with Collector(env, policy, total_frames=frames, **options) as collector:
        return list(collector)


def stored(path: Path, given: list[TensorDict]) -> TensorDict:
    with DatasetWriter(path) as writer:
        for batch in given:
            writer.write(batch)
    return load_dataset(path)


def flat(given: list[TensorDict]) -> TensorDict:
    return torch.cat([batch.clone().reshape(-1) for batch in given])


def assert_same(data: TensorDict, expected: TensorDict) -> None:
    assert set(data.keys(True, True)) == set(expected.keys(True, True))
    assert data.batch_size == expected.batch_size
    for key, value in expected.items(True, True):
        assert data[key].dtype == value.dtype, key
        torch.testing.assert_close(data[key], value, rtol=0, atol=0, equal_nan=True, msg=str(key))


def small(**entries: torch.Tensor) -> TensorDict:
    return TensorDict({"observation": torch.zeros(3, 2), **entries}, [3])


@pytest.mark.parametrize("order", ["time", "batch"])
@pytest.mark.parametrize(
    "make_env",
    [
        pytest.param(CountingEnv, id="one env"),
        pytest.param(lambda: SerialEnv(3, CountingEnv), id="three envs"),
    ],
)
def test_a_dataset_holds_every_frame_once_in_order(
    tmp_path: Path, make_env: Callable[[], Any], order: str
) -> None:
    given = batches(make_env(), frames=100, memory_order=order)  # the last batch is shorter
    data = stored(tmp_path / "data", given)
    assert_same(data, flat(given))
    assert check_transitions(data) == data.batch_size[0] >= 100


def test_frames_stand_batch_after_batch_and_env_by_env(tmp_path: Path) -> None:
    given = batches(SerialEnv(3, CountingEnv), frames=60)
    data = stored(tmp_path / "data", given)
    runs = data["observation"].reshape(2, 3, 10, 3)  # batch, env, time
    for number, batch in enumerate(given):
        assert torch.equal(runs[number], batch["observation"])
        assert runs[number, :, :, 0].unique(dim=1).shape == (3, 1)  # one env's stamp per run


def test_within_a_trajectory_the_next_observation_is_the_following_one(tmp_path: Path) -> None:
    data = stored(tmp_path / "data", batches(SerialEnv(3, "CartPole-v1"), frames=300))
    ids = data["collector", "traj_ids"]
    for trajectory in ids.unique():
        rows = data[ids == trajectory]
        assert torch.equal(rows["next", "observation"][:-1], rows["observation"][1:])
        assert not rows["next", "done"][:-1].any()


def test_tensordict_alone_can_read_it(tmp_path: Path) -> None:
    given = batches(CountingEnv())
    stored(tmp_path / "data", given)
    assert_same(TensorDict.load_memmap(tmp_path / "data"), flat(given))
    assert isinstance(load_dataset(tmp_path / "data")["observation"], MemoryMappedTensor)


@pytest.mark.parametrize("options", [{"reset_when_done": False}, {"split_trajs": True}])
def test_masked_rows_are_left_out(tmp_path: Path, options: dict[str, Any]) -> None:
    given = batches(SerialEnv(3, CountingEnv), frames=60, **options)
    masks = [batch["collector", "mask"] for batch in given]
    assert not all(mask.all() for mask in masks)
    data = stored(tmp_path / "data", given)
    assert ("collector", "mask") not in data.keys(True)
    expected = torch.cat([b.clone()[m] for b, m in zip(given, masks, strict=True)])
    assert_same(data, expected.exclude(("collector", "mask")))


def test_nested_spaces_and_policy_extras_are_kept(tmp_path: Path) -> None:
    observation = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (5, 4, 3), "uint8"),
            "arm": spaces.Tuple([spaces.Discrete(4)]),
        }
    )
    action = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(3)})

    def policy(seen: dict[str, Any]) -> dict[str, Any]:
        n = seen["camera"].shape[0]
        chosen = {"move": torch.rand(n, 2), "grip": torch.randint(3, (n,))}
        return {"action": chosen, "belief": {"mean": torch.rand(n, 7)}}

    env = SerialEnv(2, lambda: CountingEnv(action, observation))
    given = batches(env, policy=policy)
    data = stored(tmp_path / "data", given)
    assert_same(data, flat(given))
    assert data["belief", "mean"].shape == (100, 7)
    assert data["next", "arm", "0"].dtype == torch.int64


def test_every_dtype_and_any_key_survives(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.uint16, torch.bfloat16, torch.float64, torch.complex64]
    entries = {str(dtype): (torch.rand(2, 3, 2) * 2).to(dtype) for dtype in dtypes}
    batch = TensorDict(
        {**entries, "a/b c.d": torch.rand(2, 3), "nothing": torch.zeros(2, 3, 0)}, [2, 3]
    )
    assert_same(stored(tmp_path / "data", [batch, batch]), flat([batch, batch]))


def test_the_description_says_what_is_inside(tmp_path: Path) -> None:
    noted = {"env_id": "CartPole-v1", "seed": 3, "policy": "my:policy"}
    with DatasetWriter(tmp_path / "data", **noted) as writer:
        for batch in batches(GymEnv("CartPole-v1"), seed=3):
            writer.write(batch)
    about = json.loads((tmp_path / "data/swath.json").read_text())
    assert about == {"swath": swath.__version__, "frames": 100, **noted}


# -- whole, or not there --------------------------------------------------------------------------


def test_before_it_is_closed_nothing_looks_complete(tmp_path: Path) -> None:
    target = tmp_path / "data"
    writer = DatasetWriter(target)
    writer.write(small())
    assert not target.exists()
    with pytest.raises(UsageError, match=r"data\.partial exists: its writer still runs, or was k"):
        load_dataset(target)
    with pytest.raises(UsageError, match=r"not a swath dataset: it has no swath\.json"):
        load_dataset(tmp_path / "data.partial")
    with pytest.raises(UsageError, match=r"data\.partial exists: another run writes there, or one"):
        DatasetWriter(target)
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thing").touch()
    with pytest.raises(UsageError, match="full exists and is not empty; name another directory"):
        DatasetWriter(tmp_path / "full")
    with pytest.raises(UsageError, match="thing is a file"):
        DatasetWriter(tmp_path / "full/thing")
    (tmp_path / "empty").mkdir()
    assert stored(tmp_path / "empty", [small()]).batch_size == (3,)
    with pytest.raises(UsageError, match="empty exists and is not empty"):
        DatasetWriter(tmp_path / "empty")


def test_a_first_batch_that_cannot_be_stored_is_in_nobodys_way(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data") as writer:
        with pytest.raises(UsageError, match="Rename the key"):
            writer.write(small(x=torch.ones(3), shape=torch.ones(3)))
        writer.write(small(x=torch.ones(3)))
    assert load_dataset(tmp_path / "data")["x"].tolist() == [1.0] * 3


def test_a_dataset_is_written_where_a_link_leads_to(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "real"
    link.symlink_to(real)
    for _ in range(2):
        with DatasetWriter(link) as writer:
            writer.write(small(x=torch.ones(3)))
        assert link.is_symlink()
        assert load_dataset(link).shape == load_dataset(real).shape == (3,)
        shutil.rmtree(real)
        real.mkdir()


def test_a_full_disk_costs_only_the_batch_that_did_not_fit(tmp_path: Path) -> None:
    given = batches(SerialEnv(2, CountingEnv), frames=2000, frames_per_batch=200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = DatasetWriter(tmp_path / "data")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 700, limits[1]))
        written = 0
        with pytest.raises(OSError, match="File too large"):  # noqa: PT012 - which one is the test
            for batch in given:
                writer.write(batch)
                written += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert written == 3
    writer.write(given[3])  # there is room again
    writer.close()
    assert_same(load_dataset(tmp_path / "data"), flat(given[:4]))


def test_an_exception_in_the_block_keeps_the_frames(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "data")
    writer.write(small())
    with pytest.raises(KeyError), writer:
        raise KeyError("the learner's own")
    assert load_dataset(tmp_path / "data").batch_size == (3,)


def test_without_frames_there_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(KeyError), DatasetWriter(tmp_path / "data"):
        raise KeyError("before the first batch")
    with (
        pytest.raises(UsageError, match="no frames were written"),
        DatasetWriter(tmp_path / "data"),
    ):
        pass
    nothing = TensorDict({"collector": {"mask": torch.zeros(3, dtype=torch.bool)}}, [3])
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write(small().update(nothing))
        writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_closed_writer_takes_nothing_more(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "data")
    writer.write(small())
    writer.close()
    writer.close()
    writer.discard()
    with pytest.raises(ClosedError, match="is closed"):
        writer.write(small())
    assert load_dataset(tmp_path / "data").batch_size == (3,)


# -- what cannot be written or read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (small(extra=torch.zeros(3)), "has a new key, 'extra'"),
        (TensorDict({"other": torch.zeros(3)}, [3]), "all must have the same keys"),
        (
            small(observation=torch.zeros(3, 4)),
            r"\(4,\) per frame in this batch.*\(2,\) in the fir",
        ),
        (small(observation=torch.zeros(3, 2, dtype=torch.int64)), "torch.int64.*torch.float32"),
        (small(note="a text"), r"'note' holds NonTensorData.*no array form"),
        (TensorDict({"observation": torch.zeros(2)}, []), r"a TensorDict \[\*, T\]; got Tensor"),
        ({"observation": torch.zeros(2)}, "got dict"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path: Path, batch: Any, message: str) -> None:
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write(small())
        with pytest.raises(UsageError, match=message):
            writer.write(batch)
    assert_same(load_dataset(tmp_path / "data"), small())


def test_compact_batches_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (given,) = batches(CountingEnv(), frames=30, compact_obs=True)
    with pytest.raises(UsageError, match=r"final_obs.*restore_next"):
        stored(tmp_path / "data", [given])
    assert not list(tmp_path.iterdir())


def test_loading_what_is_no_dataset_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a swath dataset: there is no such directory"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a swath dataset: it has no swath\.json"):
        load_dataset(tmp_path)


def counted(given: list[TensorDict]) -> dict[int, list[float]]:
    """Return the rewards of each trajectory that ended, the slow way."""
    rewards: dict[int, list[float]] = {}
    ended = set()
    for frame in flat(given):
        one = int(frame["collector", "traj_ids"])
        rewards.setdefault(one, []).append(float(frame["next", "reward"]))
        if frame["next", "done"]:
            ended.add(one)
    return {one: rewards[one] for one in ended}


@pytest.mark.parametrize("kind", ["dataset", "buffer"])
def test_episodes_are_counted_the_same_in_datasets_and_buffers(tmp_path: Path, kind: str) -> None:
    given = batches(SerialEnv(3, "CartPole-v1"), frames=600)
    path = tmp_path / "data"
    if kind == "dataset":
        stored(path, given)
    else:
        with ReplayBuffer(1000, storage="memmap", directory=path) as buffer:
            for batch in given:
                buffer.extend(batch)
    found, episodes = describe(path), counted(given)
    assert found["frames"] == 600
    assert found["capacity"] == (None if kind == "dataset" else 1000)
    assert found["trajectories"] == len(flat(given)["collector", "traj_ids"].unique())
    assert found["episodes"] == len(episodes) > 10
    lengths = [len(rewards) for rewards in episodes.values()]
    returns = [sum(rewards) for rewards in episodes.values()]
    for name, values in (("length", lengths), ("return", returns)):
        expected = (min(values), max(values), pytest.approx(sum(values) / len(values)))
        assert tuple(found[name][which] for which in ("min", "max", "mean")) == expected
    assert found["keys"]["('next', 'observation')"] == ("float32", (4,))
    assert found["about"]["swath"] == swath.__version__
    assert found["bytes"] == sum(value.nbytes for value in flat(given).values(True, True))


def test_a_ring_that_has_come_round_is_described_by_what_it_holds(tmp_path: Path) -> None:
    given = batches(SerialEnv(2, CountingEnv), frames=120)
    with ReplayBuffer(50, storage="memmap", directory=tmp_path / "ring") as buffer:
        for batch in given:
            buffer.extend(batch)
    found = describe(tmp_path / "ring")
    newest = flat(given)[-50:]
    assert (found["frames"], found["capacity"]) == (50, 50)
    assert found["trajectories"] == len(newest["collector", "traj_ids"].unique())
    assert found["episodes"] == int(newest["next", "done"].sum())


def test_without_trajectories_frames_are_described_all_the_same(tmp_path: Path) -> None:
    stored(tmp_path / "data", [small()])
    found = describe(tmp_path / "data")
    assert (found["frames"], found["trajectories"], found["return"]) == (3, 0, None)


def test_a_buffer_does_not_take_the_place_of_a_dataset(tmp_path: Path) -> None:
    stored(tmp_path / "data", [small()])
    with ReplayBuffer(10, storage="memmap", directory=tmp_path / "data") as buffer:
        with pytest.raises(UsageError, match="exists and is not empty"):
            buffer.extend(small())
    assert len(load_dataset(tmp_path / "data")) == 3
