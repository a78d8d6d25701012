"""The example for a GPU, on whatever there is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "examples" / "ppo_gpu.py"


def test_it_runs_and_writes_its_curve(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("ppo_gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--batches", "5", "--envs", "16", "--curve", str(tmp_path / "curve.csv")])
    header, line = (tmp_path / "curve.csv").read_text().splitlines()
    frames, seconds, value = line.split(",")
    assert header == "frames,seconds,return"
    assert int(frames) == 5 * 16 * 32
    assert float(seconds) > 0
    assert float(value) > 5
    assert "2,560 frames" in capsys.readouterr().out
