"""Without Ray, what needs it says how to get it; nothing else notices."""

from __future__ import annotations

import sys

import pytest

from swath.cli import main
from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer


def test_what_needs_ray_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'swath\[ray\]'"):
        RayCollector("CartPole-v1", frames_per_batch=10)
    with pytest.raises(ImportError, match=r"pip install 'swath\[ray\]'"):
        RayReplayBuffer(10)
    assert main(["collect", "CartPole-v1", "--backend", "ray"]) == 2
    assert "pip install 'swath[ray]'" in capsys.readouterr().err
    assert main(["collect", "CartPole-v1", "--address", "localhost:1"]) == 2
    assert "needs --backend ray" in capsys.readouterr().err
