"""Export to Minari, the dataset format of Gymnasium's makers; needs `swath[minari]`.

A frame dataset holds runs of steps of many envs side by side; Minari wants whole episodes. Rows
are put in order by trajectory id, which keeps the order of time, and read one episode at a time
from the memory map, so that a dataset larger than memory can be exported.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict import TensorDictBase

from swath.data.datasets import DatasetWriter, load_dataset, read_about
from swath.data.files import abandon, claim, commit, partial_of
from swath.envs.base import make_gym
from swath.errors import UsageError
from swath.rollout import keys
from swath.tree import Leaf, action_leaves, builder, key_name, observation_leaves

__all__ = ["MinariWriter", "minari_id", "to_minari"]

_VARIABLE = "MINARI_DATASETS_PATH"
_REMINDERS = r"`\w+` is set to None|env_spec is None"
"""Minari warns of every note on the author that is missing; these are the user's to add later."""


def minari_id(env_id: str) -> str:
    """Return the id under which data of an env is exported.

    >>> minari_id("CartPole-v1"), minari_id("my_envs:ALE/Pong-v5")
    ('cartpole/swath-v0', 'ale/pong/swath-v0')
    """
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2].lower())
    parts = [re.sub(r"[^-\w]+", "-", part, flags=re.ASCII) for part in name.split("/") if part]
    namespace = "/".join(parts)
    # Minari takes no namespace of a single character.
    return f"{namespace if len(namespace) > 1 else namespace + '-env'}/swath-v0"


def to_minari(
    frames: TensorDictBase | str | Path,
    directory: str | Path,
    *,
    env: gym.Env[Any, Any] | str | None = None,
    dataset_id: str | None = None,
    policy: str | None = None,
) -> str:
    """Write the episodes among these frames as a Minari dataset and return its id.

    With `MINARI_DATASETS_PATH=directory` in the environment, `minari.load_dataset(id)` loads it.
    Exported are observations, actions, rewards and flags. An episode that was still running when
    the collection stopped ends truncated.

    Args:
        frames: A dataset, as loaded or by its directory; or any TensorDict of frames `[F]` in
            which the frames of a trajectory are in order.
        directory: Where to; must not exist or be empty.
        env: The env that the data is of, or its id, for its spaces and its spec; by default the
            one noted in the dataset.
        dataset_id: Its id; by default `"cartpole/swath-v0"` for CartPole, and so on.
        policy: The name of the policy, noted as `algorithm_name`.
    """
    minari = _import_minari()
    if not isinstance(frames, TensorDictBase):
        about = read_about(frames)
        env, policy = env or about["env_id"], policy or about["policy"]
        frames = load_dataset(frames)
    if env is None:
        raise UsageError("to_minari() needs the env of these frames: pass env= with its id.")
    opened = make_gym(env)
    try:
        target = dataset_id or minari_id(_id_of(opened))
        _check_id(minari, target)
        path = claim(directory)
        try:
            _export(minari, frames, partial_of(path), env=opened, dataset_id=target, policy=policy)
        except BaseException:
            abandon(path)
            raise
        commit(path)
    finally:
        if isinstance(env, str):
            opened.close()
    return target


def _export(
    minari: Any,
    frames: TensorDictBase,
    root: Path,
    *,
    env: gym.Env[Any, Any],
    dataset_id: str,
    policy: str | None,
) -> None:
    """Write a dataset below `root`."""
    with _minari_root(root):
        minari.create_dataset_from_buffers(
            dataset_id,
            # A list is asked for, but it is only iterated over.
            _Episodes(frames, env, minari.data_collector.EpisodeBuffer),
            env=env if _can_be_noted(env) else None,
            observation_space=env.observation_space,
            action_space=env.action_space,
            algorithm_name=policy,
            jpeg_encoding=False,  # the default would change the pixels
        )


class MinariWriter:
    """Take batches as `DatasetWriter` does, and make a Minari dataset of them when closed.

    Args:
        directory: Where to; must not exist or be empty.
        env: The env that the data is of, for its spaces and its spec.
        dataset_id: Its id; by default from the id of the env.
        policy: The name of the policy.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        env: gym.Env[Any, Any],
        dataset_id: str | None = None,
        policy: str | None = None,
    ) -> None:
        self._minari = _import_minari()
        self._env, self._policy = env, policy
        self.dataset_id = dataset_id or minari_id(_id_of(env))
        _check_id(self._minari, self.dataset_id)
        self.directory = claim(directory)
        self._closed = False
        # Minari does not look into hidden directories.
        self._frames = DatasetWriter(partial_of(self.directory) / ".frames")

    @property
    def frames(self) -> int:
        """How many frames were written."""
        return self._frames.frames

    @property
    def load_call(self) -> str:
        """The Python that loads the dataset, and the environment variable that it needs."""
        return f"minari.load_dataset({self.dataset_id!r})  # with {_VARIABLE}={self.directory}"

    def write(self, batch: TensorDictBase) -> None:
        """Add the frames of a batch; see `DatasetWriter.write`."""
        self._frames.write(batch)

    def close(self) -> None:
        """Export what was written; calling it again is nothing."""
        if self._closed:
            return
        try:
            self._frames.close()
            self._export()
        except BaseException:
            self.discard()
            raise
        self._closed = True
        shutil.rmtree(self._frames.directory)
        commit(self.directory)

    def _export(self) -> None:
        try:
            _export(
                self._minari,
                load_dataset(self._frames.directory),
                partial_of(self.directory),
                env=self._env,
                dataset_id=self.dataset_id,
                policy=self._policy,
            )
        except Exception as error:
            self._closed = True  # what was collected is not thrown away
            raise UsageError(
                f"Minari could not store the episodes: {type(error).__name__}: {error}. The frames "
                f"are kept: {self._frames.load_call}."
            ) from error

    def discard(self) -> None:
        """Throw away what was written, unless it is closed already."""
        if not self._closed:
            self._closed = True
            self._frames.discard()
            abandon(self.directory)


class _Episodes:
    """The frames of a dataset, seen as episodes."""

    def __init__(self, frames: TensorDictBase, env: gym.Env[Any, Any], buffer: Any) -> None:
        observations = observation_leaves(env.observation_space)
        actions = action_leaves(env.action_space)
        self._build_observation = builder(env.observation_space, observations)
        self._build_action = builder(env.action_space, actions)
        self._buffer = buffer
        self._observations = [_column(frames, leaf.key) for leaf in observations]
        self._next = [_column(frames, keys.following(leaf.key)) for leaf in observations]
        self._actions = [_column(frames, leaf.key) for leaf in actions]
        columns = [*self._observations, *self._actions]
        for leaf, column in zip([*observations, *actions], columns, strict=True):
            _check_column(leaf, column)
        self._reward, self._done, self._terminated, self._truncated = (
            _column(frames, key).reshape(-1)
            for key in (keys.REWARD, keys.NEXT_DONE, keys.NEXT_TERMINATED, keys.NEXT_TRUNCATED)
        )
        ids = _column(frames, keys.TRAJ_IDS).reshape(-1)
        self._order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[self._order])) + 1
        self._bounds = [0, *starts.tolist(), len(ids)]

    def __iter__(self) -> Iterator[Any]:
        """Yield an `EpisodeBuffer` for each trajectory, in the order in which they began."""
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            rows = self._order[start:end]
            last = rows[-1]
            observations = [
                np.concatenate([column[rows], following[last][None]])
                for column, following in zip(self._observations, self._next, strict=True)
            ]
            truncated = self._truncated[rows]
            truncated[-1] |= not self._done[last]
            yield self._buffer(
                observations=self._build_observation(observations),
                actions=self._build_action([column[rows] for column in self._actions]),
                rewards=self._reward[rows],
                terminations=self._terminated[rows],
                truncations=truncated,
                infos={},
            )


def _column(frames: TensorDictBase, key: Sequence[str]) -> np.ndarray:
    column = frames.get(tuple(key), None)
    if column is None:
        raise UsageError(
            f"these frames have no {key_name(tuple(key))}, which Minari's episodes need; collect "
            "without compact_obs and leave the collector's keys in place."
        )
    return column.numpy()


def _check_column(leaf: Leaf, column: np.ndarray) -> None:
    if (column.shape[1:], column.dtype) != (leaf.shape, leaf.dtype):
        raise UsageError(
            f"{key_name(leaf.key)} is {column.dtype} {column.shape[1:]} per frame, but the env has "
            f"{leaf.dtype} {leaf.shape} there; pass the env that made these frames."
        )


def _import_minari() -> Any:
    try:
        import h5py  # noqa: F401 - minari stores through it, and would notice only at the end
        import minari
    except ImportError as error:
        raise UsageError(
            f'Minari datasets need the package {error.name!r}: pip install "swath[minari]"'
        ) from error
    return minari


def _check_id(minari: Any, dataset_id: str) -> None:
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (TypeError, ValueError):
        raise UsageError(
            f"{dataset_id!r} is no id of a Minari dataset; expected namespace/name-v0, of letters, "
            "digits, - and _."
        ) from None


def _id_of(env: gym.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


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
