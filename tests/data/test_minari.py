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
import torch
from gymnasium import spaces
from minari.dataset.minari_dataset import parse_dataset_id
from tensordict import TensorDict

import swath
from swath.collectors import Collector
from swath.data import DatasetWriter, MinariWriter, ReplayBuffer, load_dataset, read_minari
from swath.data.minari import minari_id
from swath.envs import SerialEnv
from swath.errors import DamagedFileError, UsageError
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


def batches(make_env: Any, frames: int = 120) -> list[TensorDict]:
    env = SerialEnv(3, make_env)
    with Collector(env, frames_per_batch=48, total_frames=frames, seed=0) as collector:
        return list(collector)


def exported(path: Path, given: list[TensorDict], env: gym.Env[Any, Any]) -> minari.MinariDataset:
    with MinariWriter(path, env=env, policy="random") as writer:
        for batch in given:
            writer.write(batch)
    return minari.load_dataset(writer.dataset_id)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari looks for datasets in this test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def assert_same_episodes(dataset: minari.MinariDataset, given: list[TensorDict], env: Any) -> None:
    data = torch.cat([batch.clone().reshape(-1) for batch in given])
    ids = data["collector", "traj_ids"]
    assert dataset.total_episodes == len(ids.unique())
    assert dataset.total_steps == len(ids)
    for episode, trajectory in zip(dataset, ids.unique(), strict=True):
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
def test_episodes_come_back_frame_by_frame(root: Path, name: str) -> None:
    observation, action = SPACES[name]
    given = batches(lambda: CountingEnv(action, observation))
    env = CountingEnv(action, observation)
    dataset = exported(root, given, env)
    assert_same_episodes(dataset, given, env)
    assert dataset.observation_space == observation
    assert dataset.action_space == action
    assert dataset.storage.metadata["algorithm_name"] == "random"


@pytest.mark.parametrize("name", SPACES)
def test_what_is_read_back_is_what_was_collected(root: Path, name: str) -> None:
    """Frame by frame and key by key, the version apart, which Minari has no place for."""
    observation, action = SPACES[name]
    given = batches(lambda: CountingEnv(action, observation))
    exported(root, given, CountingEnv(action, observation))
    data = torch.cat([batch.clone().reshape(-1) for batch in given])
    ids = data["collector", "traj_ids"]
    found = list(read_minari("countingenv/swath-v0"))
    assert len(found) == len(ids.unique())
    for number, (episode, trajectory) in enumerate(zip(found, ids.unique(), strict=True)):
        rows = data[ids == trajectory].exclude(("collector", "policy_version"))
        rows["collector", "traj_ids"][:] = number
        for flag in ("truncated", "done"):  # where the collection stopped
            rows["next", flag][-1] |= not rows["next", "done"][-1]
        assert episode.names == ["time"]
        assert set(episode.keys(True, True)) == set(rows.keys(True, True))
        for key, value in rows.items(True, True):
            assert episode[key].dtype == value.dtype, key
            assert torch.equal(episode[key], value), key


def test_minari_data_goes_into_buffers_and_datasets(tmp_path: Path, root: Path) -> None:
    """Also data that others made, from where it lies."""
    env = gym.make("CartPole-v1")
    episodes = []
    for seed in range(5):
        seen, actions, flags = [env.reset(seed=seed)[0]], [], [(False, False)]
        while not any(flags[-1]):
            actions.append(env.action_space.sample())
            observation, _, *ends, _ = env.step(actions[-1])
            seen.append(observation)
            flags.append(tuple(ends))
        terminated, truncated = np.array(flags[1:]).T
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                observations=np.stack(seen),
                actions=np.array(actions),
                rewards=np.linspace(0, 1, len(actions)),
                terminations=terminated,
                truncations=truncated,
                infos={},
            )
        )
    with pytest.warns(UserWarning, match="is set to None"):
        made = minari.create_dataset_from_buffers("cartpole/test-v0", episodes, env=env)
    env.close()
    del os.environ["MINARI_DATASETS_PATH"]
    buffer = ReplayBuffer(1000, batch_size=8)
    with DatasetWriter(tmp_path / "frames") as writer:
        for episode in read_minari("cartpole/test-v0", root):
            buffer.extend(episode)
            writer.write(episode)
    frames = load_dataset(tmp_path / "frames")
    assert len(buffer) == len(frames) == made.total_steps
    for key, expected in {
        "observation": [episode.observations[:-1] for episode in episodes],
        ("next", "observation"): [episode.observations[1:] for episode in episodes],
        "action": [episode.actions for episode in episodes],
        ("next", "reward"): [np.float32(episode.rewards)[:, None] for episode in episodes],
        ("next", "terminated"): [episode.terminations[:, None] for episode in episodes],
    }.items():
        np.testing.assert_array_equal(frames[key].numpy(), np.concatenate(expected))
    drawn = buffer.sample()
    assert torch.equal(drawn["observation"], frames[drawn["index"]]["observation"])
    assert frames["next", "done"].sum() == 5


def test_a_dataset_knows_its_env(root: Path) -> None:
    given = batches("CartPole-v1")
    dataset = exported(root, given, gym.make("CartPole-v1"))
    assert dataset.spec.dataset_id == "cartpole/swath-v0"
    env = dataset.recover_environment()
    assert env.spec.id == "CartPole-v1"
    assert_same_episodes(dataset, given, env)
    assert "EpisodeData(id=0" in repr(dataset[0])


def test_the_writer_stores_when_it_closes(tmp_path: Path, root: Path) -> None:
    os.environ["MINARI_DATASETS_PATH"] = elsewhere = str(tmp_path / "elsewhere")
    writer = MinariWriter(root, env=CountingEnv())
    for batch in batches(CountingEnv):
        writer.write(batch)
    assert writer.frames == 120
    assert not root.exists()
    writer.close()
    writer.close()
    writer.discard()
    assert os.environ["MINARI_DATASETS_PATH"] == elsewhere
    assert [path.name for path in tmp_path.iterdir()] == ["minari"]
    assert [path.name for path in root.iterdir()] == ["countingenv"]
    call, _, setting = writer.load_call.partition("  # with ")
    os.environ.update([setting.split("=")])
    assert eval(call, {"minari": minari}).total_steps == 120


def test_what_cannot_start_leaves_nothing_behind(tmp_path: Path, root: Path) -> None:
    with pytest.raises(UsageError, match="no frames were written"):
        MinariWriter(root, env=CountingEnv()).close()
    assert not list(tmp_path.iterdir())
    root.mkdir()
    (root / "thing").touch()
    with pytest.raises(UsageError, match="minari exists and is not empty"):
        MinariWriter(root, env=CountingEnv())
    assert [path.name for path in tmp_path.iterdir()] == ["minari"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda batch: batch.exclude(("next", "observation")), r"have nothing at \('next', 'obs"),
        (
            lambda batch: batch.set("observation", batch["observation"].float()),
            r"have float32 \(3,\) per frame at 'observation', but the env has int64 \(3,\) there",
        ),
        (None, "ZeroDivisionError: division by zero"),
    ],
)
def test_when_it_fails_the_frames_are_kept(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str
) -> None:
    writer = MinariWriter(root, env=CountingEnv())
    given = batches(CountingEnv)
    for batch in given:
        writer.write(spoil(batch) if spoil else batch)
    if spoil is None:
        monkeypatch.setattr(minari, "create_dataset_from_buffers", lambda *_, **__: 1 / 0)
    with pytest.raises(
        UsageError, match=rf"{message}.*(?<!\.)\. The frames are kept: .*\.$"
    ) as info:
        writer.close()
    writer.discard()
    call = str(info.value).partition("kept: ")[2].rstrip(".")
    kept = eval(call, {"swath": swath})
    assert kept.batch_size == (120,)
    assert spoil is not None or check_transitions(kept) == 120
    assert [path.name for path in tmp_path.iterdir()] == ["minari"]


def test_interrupted_while_storing_the_frames_are_kept(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(minari, "create_dataset_from_buffers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exported(root, batches(CountingEnv), CountingEnv())
    assert check_transitions(load_dataset(root)) == 120
    assert [path.name for path in tmp_path.iterdir()] == ["minari"]


@pytest.mark.parametrize("package", ["minari", "h5py"])
def test_a_missing_package_is_named_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"need the package '{package}': pip install \"swath\[minari\]\""
    with pytest.raises(UsageError, match=message):
        MinariWriter(tmp_path / "minari", env=CountingEnv())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["metadata.json", "main_data.hdf5"])
@pytest.mark.parametrize("content", [b"", b"\xff{"])
def test_files_that_minari_cannot_read_are_an_error_of_ours(
    root: Path, name: str, content: bytes
) -> None:
    exported(root, batches(CountingEnv), CountingEnv())
    (path,) = root.rglob(name)
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"dataset 'countingenv/swath-v0': .*write it again"):
        list(read_minari("countingenv/swath-v0"))
    assert path.read_bytes() == content


def test_ids_are_such_as_minari_takes() -> None:
    for env_id in [*gym.registry, "X-v0", "a.b:My Env!-v12", "no version", "a//b-v0"]:
        namespace, name, version = parse_dataset_id(minari_id(env_id))
        assert namespace
        assert (name, version) == ("swath", 0), env_id
