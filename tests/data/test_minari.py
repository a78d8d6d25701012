"""Minari gets the same frames, as whole episodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.dataset.minari_dataset import parse_dataset_id
from tensordict import TensorDict

import swath
from swath.collectors import Collector
from swath.data import DatasetWriter, MinariWriter, load_dataset, minari_id, to_minari
from swath.envs import SerialEnv
from swath.errors import UsageError
from swath.testing import CountingEnv, check_transitions
from swath.tree import action_leaves, fetch, observation_leaves

SPACES = {
    "discrete": (spaces.Discrete(5), spaces.Discrete(3)),
    "box": (spaces.Box(-1, 1, (2, 3), "float64"), spaces.Box(-1, 1, (2,))),
    "dict": (
        spaces.Dict(
            {"where": spaces.Box(-1, 1, (3,)), "deep": spaces.Dict({"n": spaces.Discrete(4)})}
        ),
        spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(3)}),
    ),
    "tuple": (
        spaces.Tuple([spaces.Discrete(4), spaces.Dict({"x": spaces.MultiBinary(3)})]),
        spaces.Tuple([spaces.MultiDiscrete([2, 5]), spaces.Box(-1, 1, (1,))]),
    ),
    "image": (spaces.Box(0, 255, (40, 40, 3), "uint8"), spaces.Discrete(2)),
}


def collected(path: Path, make_env: Any, frames: int = 120, **about: Any) -> TensorDict:
    with (
        Collector(
            SerialEnv(3, make_env), frames_per_batch=48, total_frames=frames, seed=0
        ) as collector,
        DatasetWriter(path, **about) as writer,
    ):
        for batch in collector:
            writer.write(batch)
    return load_dataset(path)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari looks for datasets in this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def assert_same_episodes(exported: minari.MinariDataset, data: TensorDict, env: Any) -> None:
    ids = data["collector", "traj_ids"]
    assert exported.total_episodes == len(ids.unique())
    assert exported.total_steps == len(ids)
    for episode, trajectory in zip(exported, ids.unique(), strict=True):
        rows = data[ids == trajectory]
        for leaf in observation_leaves(env.observation_space):
            values = fetch(episode.observations, leaf.path)
            assert values.dtype == leaf.dtype
            np.testing.assert_array_equal(values[:-1], rows[leaf.key].numpy())
            np.testing.assert_array_equal(values[1:], rows[("next", *leaf.key)].numpy())
        for leaf in action_leaves(env.action_space):
            values = fetch(episode.actions, leaf.path)
            assert values.dtype == leaf.dtype
            np.testing.assert_array_equal(values, rows[leaf.key].numpy())
        np.testing.assert_array_equal(episode.rewards, rows["next", "reward"][:, 0])
        np.testing.assert_array_equal(episode.terminations, rows["next", "terminated"][:, 0])
        truncated = rows["next", "truncated"][:, 0].numpy().copy()
        truncated[-1] |= not rows["next", "done"][-1]
        np.testing.assert_array_equal(episode.truncations, truncated)
        assert episode.terminations[-1] or episode.truncations[-1]


@pytest.mark.parametrize("name", SPACES)
def test_episodes_come_back_frame_by_frame(tmp_path: Path, root: Path, name: str) -> None:
    observation, action = SPACES[name]
    env = CountingEnv(action, observation)
    data = collected(tmp_path / "data", lambda: CountingEnv(action, observation))
    dataset_id = to_minari(data, root, env=env, policy="random")
    exported = minari.load_dataset(dataset_id)
    assert_same_episodes(exported, data, env)
    assert exported.observation_space == observation
    assert exported.action_space == action
    assert exported.storage.metadata["algorithm_name"] == "random"
    assert not (root.parent / "minari.partial").exists()


def test_a_stored_dataset_knows_its_env(tmp_path: Path, root: Path) -> None:
    data = collected(tmp_path / "data", "CartPole-v1", env_id="CartPole-v1")
    dataset_id = to_minari(tmp_path / "data", root)
    assert dataset_id == "cartpole/swath-v0"
    exported = minari.load_dataset(dataset_id)
    env = exported.recover_environment()
    assert env.spec.id == "CartPole-v1"
    assert_same_episodes(exported, data, env)
    assert "EpisodeData(id=0" in repr(exported[0])


def test_the_writer_exports_when_it_closes(tmp_path: Path, root: Path) -> None:
    writer = MinariWriter(root, env=CountingEnv(), dataset_id="counting/test-v3")
    with Collector(SerialEnv(2, CountingEnv), frames_per_batch=40, seed=0) as collector:
        given = [collector.next() for _ in range(3)]
    for batch in given:
        writer.write(batch)
    assert writer.frames == 120
    assert not root.exists()
    writer.close()
    writer.close()
    writer.discard()
    assert "minari.load_dataset('counting/test-v3')" in writer.load_call
    assert minari.load_dataset("counting/test-v3").total_steps == 120
    assert [path.name for path in tmp_path.iterdir()] == ["minari"]
    assert [path.name for path in root.iterdir()] == ["counting"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path, root: Path) -> None:
    data = collected(tmp_path / "data", CountingEnv)
    elsewhere = os.environ["MINARI_DATASETS_PATH"] = str(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"have no \('next', 'observation'\)"):
        to_minari(data.exclude(("next", "observation")), root, env=CountingEnv())
    with pytest.raises(UsageError, match=r"'observation' is int64 \(3,\).*float32 \(4,\) there"):
        to_minari(data, root, env="CartPole-v1")
    with pytest.raises(UsageError, match="needs the env of these frames: pass env="):
        to_minari(data, root)
    with pytest.raises(UsageError, match="'no version' is no id of a Minari dataset"):
        to_minari(data, root, env=CountingEnv(), dataset_id="no version")
    with pytest.raises(UsageError, match="is no swath dataset"):
        to_minari(tmp_path / "nothing", root)
    with pytest.raises(UsageError, match="data exists and is not empty"):
        to_minari(data, tmp_path / "data", env=CountingEnv())
    writer = MinariWriter(root, env=CountingEnv())
    with pytest.raises(UsageError, match="no frame was written"):
        writer.close()
    assert os.environ["MINARI_DATASETS_PATH"] == elsewhere
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_when_minari_fails_the_frames_are_kept(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = MinariWriter(root, env=CountingEnv())
    with Collector(CountingEnv(), frames_per_batch=40, total_frames=40) as collector:
        writer.write(collector.next())
    monkeypatch.setattr(minari, "create_dataset_from_buffers", lambda *_, **__: 1 / 0)
    with pytest.raises(
        UsageError, match=r"ZeroDivisionError.*The frames are kept: (.*)\.$"
    ) as info:
        writer.close()
    writer.discard()
    call = str(info.value).partition("kept: ")[2].rstrip(".")
    assert check_transitions(eval(call, {"swath": swath})) == 40


@pytest.mark.parametrize("package", ["minari", "h5py"])
def test_a_missing_package_is_named_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"need the package '{package}': pip install \"swath\[minari\]\""
    with pytest.raises(UsageError, match=message):
        MinariWriter(tmp_path / "minari", env=CountingEnv())
    with pytest.raises(UsageError, match=message):
        to_minari(tmp_path, tmp_path / "minari")
    assert not list(tmp_path.iterdir())


def test_ids_are_such_as_minari_takes() -> None:
    for env_id in [*gym.registry, "X-v0", "a.b:My Env!-v12", "no version", "a//b-v0"]:
        namespace, name, version = parse_dataset_id(minari_id(env_id))
        assert namespace
        assert (name, version) == ("swath", 0), env_id
