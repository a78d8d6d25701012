"""Replay buffers in the memory of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replay_kit import check, numbered, trajectories

from swath.collectors import Collector, MultiSyncCollector
from swath.data import ReplayBuffer, SliceSampler
from swath.testing import CountingEnv, check_transitions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def contents_on_cpu(buffer: ReplayBuffer) -> list[int]:
    data = torch.cat([batch.cpu() for batch in buffer])
    return check(data[data["index"].argsort()]).tolist()


@pytest.mark.parametrize("options", [{"storage": "cuda"}, {"pin_memory": True, "device": "cuda"}])
def test_frames_on_a_gpu_and_batches_by_pinned_memory(options: dict[str, Any]) -> None:
    buffer = ReplayBuffer(20, batch_size=8, **options)
    for first in range(0, 100, 12):
        buffer.extend(numbered(first, 3, 4).to("cuda" if first % 24 else "cpu"))
        batch = buffer.sample()
        assert batch["observation"].is_cuda
        check(batch.cpu())
    assert contents_on_cpu(buffer) == list(range(88, 108))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_a_buffer_on_a_gpu_saves_and_continues(sampler: str, tmp_path: Path) -> None:
    first, second = (
        ReplayBuffer(20, storage="cuda", sampler=sampler, batch_size=8, seed=n) for n in (1, 2)
    )
    first.extend(numbered(0, 30).to("cuda"))
    batch = first.sample()
    if sampler == "prioritized":
        first.update_priority(batch["index"], batch["next", "reward"][:, 0])
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert contents_on_cpu(second) == list(range(10, 30))
    third = ReplayBuffer(20, storage="cuda", sampler=sampler, batch_size=8)
    third.load_state_dict(first.state_dict())
    one, other = first.sample(), third.sample()
    assert torch.equal(one["index"], other["index"])
    assert torch.equal(one["observation"], other["observation"])


def test_slices_on_a_gpu_are_of_one_trajectory() -> None:
    sampler = SliceSampler(slice_len=4)
    buffer = ReplayBuffer(60, storage="cuda", sampler=sampler, batch_size=16, seed=0)
    for start in range(0, 30, 5):
        buffer.extend(trajectories([1, 2], [start, start], 5, set()).to("cuda"))
        batch = buffer.sample().cpu()
        assert (batch["time"].diff(dim=1) == 1).all()
        assert (batch["collector", "traj_ids"].diff(dim=1) == 0).all()


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_a_collector_fills_a_buffer_on_a_gpu_in_the_background(kind: str) -> None:
    options = {"frames_per_batch": 20, "total_frames": 200, "seed": 0}
    make = Collector if kind == "single" else MultiSyncCollector
    with (
        ReplayBuffer(500, storage="cuda", batch_size=50, min_size=200) as buffer,
        make([CountingEnv, CountingEnv], replay_buffer=buffer, **options) as collector,
    ):
        collector.start()
        assert buffer.sample()["observation"].is_cuda
        data = torch.cat([batch.cpu() for batch in buffer])
        data = data[data["index"].argsort()].exclude("index")
        assert check_transitions(data) == 200
