"""Each example for a few steps: it runs, says how it went, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from swath.collectors import MultiSyncCollector

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Enough for an episode to end, for updates, and for two batches of frames after the first.
FRAMES = {
    "ppo_cartpole": 2_100,
    "dqn_cartpole": 1_600,
    "sac_pendulum": 1_250,
    "ppo_torchrl_loss": 2_100,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # TorchRL's imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchrl"),
]


def loaded(name: str) -> ModuleType:
    """Return an example; skip the test where it needs a package that is not installed."""
    if "torchrl" in name:
        pytest.importorskip("torchrl")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_run_whole_is_tested_here():
    assert set(FRAMES) == set(loaded("run_all").EXAMPLES)


@pytest.mark.parametrize("name", FRAMES)
def test_it_runs_and_writes_its_result(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    loaded(name).main(["--seed", "3", "--frames", str(FRAMES[name]), "--out", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert (result["seed"], result["frames"]) == (3, FRAMES[name])
    assert f"{result['mean_return']:.1f}" in capsys.readouterr().out
    image = (tmp_path / f"{name}.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 60_000


def test_a_seed_repeats_itself():
    example = loaded("ppo_cartpole")
    curves = [example.train(seed, FRAMES["ppo_cartpole"]) for seed in (5, 5, 6)]
    assert curves[0] == curves[1] != curves[2]


def test_torchrl_sees_in_a_batch_what_we_see():
    ours, theirs = loaded("ppo_cartpole"), loaded("ppo_torchrl_loss")
    network = ours.ActorCritic()
    critic = theirs.ValueOperator(network.critic, in_keys=["observation"])
    estimate = theirs.GAE(gamma=ours.GAMMA, lmbda=ours.LAMBDA, value_network=critic)
    with MultiSyncCollector(
        [[ours.ENV] * 3] * 2, network, frames_per_batch=600, total_frames=600, seed=0
    ) as collector:
        for batch in collector:
            assert batch["next", "done"].sum() > 10
            expected = ours.advantages(batch, network.critic)
            torch.testing.assert_close(estimate(batch)["advantage"].squeeze(-1), expected)


def test_without_matplotlib_there_is_no_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    loaded("ppo_cartpole").main(["--frames", "1024", "--out", str(tmp_path)])
    assert "needs matplotlib" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ppo_cartpole.json"]


def test_without_torchrl_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl.modules", None)
    with pytest.raises(SystemExit, match="this example needs TorchRL: pip install"):
        loaded("ppo_torchrl_loss")


def test_too_few_frames_for_an_episode(tmp_path):
    with pytest.raises(SystemExit, match="no episode ended in 16 frames"):
        loaded("ppo_cartpole").main(["--frames", "16", "--out", str(tmp_path)])
