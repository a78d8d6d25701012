"""What swath wrote as Minari is read by the path that was given, as anything else on disk is."""

from __future__ import annotations

import gymnasium as gym
import pytest

from swath.cli import main
from swath.collectors import Collector
from swath.data import MinariWriter, describe, load_dataset, read_minari
from swath.envs import SerialEnv
from swath.errors import UsageError

pytest.importorskip("minari")
pytest.importorskip("h5py")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return the statistics of a collection that is stored at `to`, where the test runs."""
    monkeypatch.chdir(tmp_path)
    with (
        Collector(SerialEnv(2, "CartPole-v1"), frames_per_batch=200, seed=0) as collector,
        MinariWriter("to", env=gym.make("CartPole-v1"), policy="random") as writer,
    ):
        writer.write(collector.next())
        return collector.take_episodes()


def test_its_episodes_are_read(written, tmp_path):
    for name in ("to", tmp_path / "to", "to/cartpole/swath-v0"):
        episodes = list(read_minari(name))
        assert sum(map(len, episodes)) == 200
        assert len(episodes) == len(written["return"]) + 2  # two were still running


def test_it_is_described(written, capsys):
    found = describe("to")
    assert (found["frames"], found["trajectories"]) == (200, len(written["return"]) + 2)
    assert found["about"]["env_id"] == "CartPole-v1"
    assert found["about"]["policy"] == "random"
    assert found["keys"]["'observation'"] == ("float32", (4,))
    assert main(["info", "to"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


def test_what_reads_other_datasets_names_the_way(written):
    with pytest.raises(UsageError, match=r"a Minari dataset: read_minari\('to'\) reads it"):
        load_dataset("to")


def test_several_datasets_and_none_are_told(written, tmp_path):
    with MinariWriter("to/more", env=gym.make("CartPole-v1")) as writer:
        for episode in read_minari("to"):
            writer.write(episode)
    with pytest.raises(UsageError, match=r"there are 2 Minari datasets below to; name one of them"):
        list(read_minari("to"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"there is no Minari dataset in .*empty or below it"):
        list(read_minari(tmp_path / "empty"))
