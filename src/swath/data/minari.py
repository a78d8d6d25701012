"""Minari datasets, the format of Gymnasium's makers, in both directions; needs `swath[minari]`.

A frame dataset holds runs of steps of many envs side by side; Minari wants whole episodes. Rows
are put in order by trajectory id, which keeps the order of time, and read one episode at a time
from the memory map, so that a dataset larger than memory can be made.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.data.datasets import DatasetWriter, load_dataset, partial_of
from swath.errors import DamagedFileError, UsageError
from swath.rollout import keys
from swath.tree import (
    Key,
    Leaf,
    action_leaves,
    builder,
    fetch,
    key_name,
    nest,
    observation_leaves,
)

__all__ = ["MinariWriter", "minari_id", "read_minari"]

_VARIABLE = "MINARI_DATASETS_PATH"
_REMINDERS = r"`\w+` is set to None|env_spec is None"
"""Minari warns of every note on the author that is missing; these are the user's to add later."""


class MinariWriter(DatasetWriter):
    """Write batches as `DatasetWriter` does, and make a Minari dataset of them when closed.

    A Minari dataset has observations, actions, rewards and flags. An episode that was still
    running when the collection stopped is marked truncated. If Minari fails, the frames are kept
    as a swath dataset.

    Args:
        directory: A directory that does not exist or is empty.
        env: The env that made the data, for its spaces and its spec.
        policy: The name of the policy, stored as `algorithm_name`.
    """

    def __init__(
        self, directory: str | Path, *, env: gym.Env[Any, Any], policy: str | None = None
    ) -> None:
        self._minari = _import_minari()
        self._env, self._policy = env, policy
        self.dataset_id = minari_id(env.spec.id if env.spec else type(env.unwrapped).__name__)
        super().__init__(directory)

    @property
    def load_call(self) -> str:
        """The Python that loads the dataset, and the environment variable that it needs."""
        return f"minari.load_dataset({self.dataset_id!r})  # with {_VARIABLE}={self.directory}"

    def close(self) -> None:
        """Make the dataset from what was written; calling it again has no effect."""
        if self._closed:
            return
        super().close()
        partial = partial_of(self.directory)
        try:
            self._export(partial)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise UsageError(
                f"Minari could not store the episodes: {reason}. The frames are kept: "
                f"{super().load_call}."
            ) from error
        shutil.rmtree(self.directory)
        partial.rename(self.directory)

    def _export(self, root: Path) -> None:
        env, buffer = self._env, self._minari.data_collector.EpisodeBuffer
        with _minari_root(root):
            self._minari.create_dataset_from_buffers(
                self.dataset_id,
                # A list is asked for, but it is only iterated over.
                _episodes(load_dataset(self.directory), env, buffer),
                env=env if _can_be_noted(env) else None,
                observation_space=env.observation_space,
                action_space=env.action_space,
                algorithm_name=self._policy,
                jpeg_encoding=False,  # the default would change the pixels
            )


def read_minari(dataset: Any, directory: str | Path | None = None) -> Iterator[TensorDict]:
    """Yield the episodes of a Minari dataset, each as a batch `[T]` like those of a collector.

    Extend a `ReplayBuffer` with them, or write them to a `DatasetWriter`. Rewards are float32; a
    trajectory's id is the episode's. Nobody knows which policy acted, so there is no version.
    Minari's files are JSON and HDF5, in which nothing is pickled.

    Args:
        dataset: Its id, or what `minari.load_dataset` returned.
        directory: Where to look for it; where Minari keeps its datasets by default.
    """
    minari = _import_minari()
    if isinstance(dataset, str):
        root = contextlib.nullcontext() if directory is None else _minari_root(Path(directory))
        with root, _readable(dataset):
            dataset = minari.load_dataset(dataset)
    observations = observation_leaves(dataset.observation_space)
    actions = action_leaves(dataset.action_space)
    for episode in _episodes_of(dataset):
        columns: dict[Key, np.ndarray] = {}
        for leaf in observations:
            seen = np.asarray(fetch(episode.observations, leaf.path), leaf.dtype)
            columns[leaf.key], columns[keys.following(leaf.key)] = seen[:-1], seen[1:]
        for leaf in actions:
            columns[leaf.key] = np.asarray(fetch(episode.actions, leaf.path), leaf.dtype)
        yield _trajectory(columns, episode)


def _episodes_of(dataset: Any) -> Iterator[Any]:
    with _readable(dataset.spec.dataset_id):
        yield from dataset.iterate_episodes()


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Tell of files that Minari cannot make sense of; what is not there at all, it says itself."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"Minari cannot read the dataset {name!r}: {type(error).__name__}: {error}. Some of "
            "its files are missing or damaged; download or write it again."
        ) from error


def _trajectory(columns: dict[Key, np.ndarray], episode: Any) -> TensorDict:
    """Return observations and actions of an episode with all else that a batch has."""
    steps = len(episode.rewards)
    terminated, truncated = (
        np.asarray(flags, np.bool_)[:, None]
        for flags in (episode.terminations, episode.truncations)
    )
    columns[keys.REWARD] = np.asarray(episode.rewards, np.float32)[:, None]
    columns[keys.NEXT_TERMINATED], columns[keys.NEXT_TRUNCATED] = terminated, truncated
    columns[keys.NEXT_DONE] = terminated | truncated
    for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED):
        columns[key] = np.zeros((steps, 1), np.bool_)
    columns[keys.TRAJ_IDS] = np.full(steps, episode.id)
    tensors = {key: torch.tensor(column) for key, column in columns.items()}
    return TensorDict(nest(tensors), [steps], names=["time"])


def minari_id(env_id: str) -> str:
    """Return the id under which data of an env is stored.

    Examples:
        >>> minari_id("CartPole-v1"), minari_id("my_envs:ALE/Pong-v5")
        ('cartpole/swath-v0', 'ale/pong/swath-v0')
    """
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].lower())
    parts = [re.sub(r"[^-\w]+", "-", part, flags=re.ASCII) for part in name.split("/") if part]
    namespace = "/".join(parts)
    # Minari takes no namespace of a single character.
    return f"{namespace if len(namespace) > 1 else namespace + '-env'}/swath-v0"


def _episodes(frames: TensorDictBase, env: gym.Env[Any, Any], buffer: Any) -> Iterator[Any]:
    """Yield an `EpisodeBuffer` for each trajectory, in the order in which they began."""
    leaves, action = observation_leaves(env.observation_space), action_leaves(env.action_space)
    build_observation = builder(env.observation_space, leaves)
    build_action = builder(env.action_space, action)
    observations = [_column(frames, leaf.key, leaf) for leaf in leaves]
    following = [_column(frames, keys.following(leaf.key), leaf) for leaf in leaves]
    actions = [_column(frames, leaf.key, leaf) for leaf in action]
    names = (keys.REWARD, keys.NEXT_DONE, keys.NEXT_TERMINATED, keys.NEXT_TRUNCATED, keys.TRAJ_IDS)
    reward, done, terminated, truncated, ids = (frames[name].numpy().reshape(-1) for name in names)
    order = np.argsort(ids, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
        last = rows[-1]
        seen = [
            np.concatenate([column[rows], after[last][None]])
            for column, after in zip(observations, following, strict=True)
        ]
        cut = truncated[rows]
        cut[-1] |= not done[last]
        yield buffer(
            observations=build_observation(seen),
            actions=build_action([column[rows] for column in actions]),
            rewards=reward[rows],
            terminations=terminated[rows],
            truncations=cut,
            infos={},
        )


def _column(frames: TensorDictBase, key: Key, leaf: Leaf) -> np.ndarray:
    column = frames.get(key, None)
    found = None if column is None else column.numpy()
    if found is None or (found.shape[1:], found.dtype) != (leaf.shape, leaf.dtype):
        has = "nothing" if found is None else f"{found.dtype} {found.shape[1:]} per frame"
        raise UsageError(
            f"the frames have {has} at {key_name(key)}, but the env has {leaf.dtype} {leaf.shape} "
            "there; pass the env that made them, and all the keys that the collector gave."
        )
    return found


def _import_minari() -> Any:
    try:
        import h5py  # noqa: F401 - minari stores through it, and would notice only at the end
        import minari
    except ImportError as error:
        raise UsageError(
            f'Minari datasets need the package {error.name!r}: pip install "swath[minari]"'
        ) from error
    return minari


def _can_be_noted(env: gym.Env[Any, Any]) -> bool:
    """Return whether the env's spec can be stored, so that the env can be made from the dataset."""
    try:
        return env.spec is not None and bool(env.spec.to_json())
    except (TypeError, ValueError):  # it holds a function, or an argument that JSON has no form for
        return False


@contextlib.contextmanager
def _minari_root(directory: Path) -> Iterator[None]:
    """Have Minari work below a directory, without its reminders."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(directory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _REMINDERS, UserWarning)
            yield
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before
