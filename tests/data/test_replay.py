"""Replay buffers: the newest frames, whole, however they came in; kept over crashes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_kit import check, contents, numbered, save_for_ever
from tensordict import MemoryMappedTensor, NonTensorData, TensorDict

from swath.collectors import Collector
from swath.data import ReplayBuffer, UniformSampler, load_dataset
from swath.data.storage import Word
from swath.envs import SerialEnv
from swath.errors import ClosedError, EnvError, UsageError, WorkerError
from swath.links import launch
from swath.testing import CountingEnv, check_transitions

STORAGES = ["memory", "shared", "memmap"]


def make(storage: str, path: Path, capacity: int = 10, **options: Any) -> ReplayBuffer:
    directory = path / "buffer" if storage == "memmap" else None
    options = {"batch_size": 4, "seed": 0, **options}
    return ReplayBuffer(capacity, storage=storage, directory=directory, **options)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        st.tuples(st.just("masked"), st.lists(st.booleans(), min_size=1, max_size=8)),
        st.tuples(st.just("add"), st.none()),
        st.tuples(st.just("sample"), st.integers(1, 9)),
        st.tuples(st.just("empty"), st.none()),
        st.tuples(st.just("state"), st.none()),
    ),
    max_size=12,
)


@pytest.mark.parametrize("storage", STORAGES)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(capacity=st.integers(1, 20), todo=actions)
def test_a_buffer_holds_what_a_deque_would(storage, capacity, todo, tmp_path_factory):
    buffer = make(storage, tmp_path_factory.mktemp("ring"), capacity)
    model: deque[int] = deque(maxlen=capacity)
    count = 0
    for what, value in todo:
        if what == "extend":
            batch = numbered(count, *value)
            buffer.extend(batch)
        elif what == "masked":
            batch = numbered(count, 1, len(value))
            batch["collector", "mask"] = torch.tensor([value])
            buffer.extend(batch)
            model.extend(count + i for i, kept in enumerate(value) if kept)
            count += len(value)
        elif what == "add":
            buffer.add(numbered(count, 1)[0])
            model.append(count)
            count += 1
        elif what == "sample" and model:
            assert set(check(buffer.sample(value)).tolist()) <= set(model)
        elif what == "empty":
            buffer.empty()
            model.clear()
        elif what == "state":
            other = ReplayBuffer(capacity, batch_size=4)
            other.load_state_dict(buffer.state_dict())
            assert contents(other) == list(model)
        if what == "extend":
            model.extend(range(count, count + batch.numel()))
            count += batch.numel()
        assert len(buffer) == len(model)
        assert contents(buffer) == list(model)
    buffer.close()


@pytest.mark.parametrize("order", ["time", "batch"])
def test_a_collector_fills_it_env_by_env(order: str) -> None:
    buffer = ReplayBuffer(1000, batch_size=64)
    given: list[TensorDict] = []
    with Collector(
        SerialEnv(3, CountingEnv),
        frames_per_batch=30,
        total_frames=90,
        replay_buffer=buffer,
        post_collect_hook=given.append,
        memory_order=order,
    ) as collector:
        assert list(collector) == [None] * 3
    data = torch.cat(list(buffer))
    data = data[data["index"].argsort()]
    expected = torch.cat([batch.reshape(-1) for batch in given])
    assert (data.exclude("index") == expected).all()
    assert check_transitions(data) == 90


def test_all_dtypes_come_back_as_they_went_in() -> None:
    names = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32"
    names += " float64 complex64 complex128 float8_e4m3fn"
    raw = {name: torch.randint(0, 2, (4, 2, 16), dtype=torch.uint8) for name in names.split()}
    batch = TensorDict(
        {name: value.view(getattr(torch, name)) for name, value in raw.items()}, [4, 2]
    )
    batch["nothing"] = torch.empty(4, 2, 0)
    batch["transposed"] = torch.arange(48).reshape(4, 2, 2, 3).transpose(2, 3)
    batch["with_grad"] = torch.arange(8.0).reshape(4, 2).requires_grad_()
    buffer = ReplayBuffer(8)
    buffer.extend(batch)
    state = TensorDict(buffer.state_dict()["frames"], [8])
    flat = batch.detach().reshape(-1)
    for name, value in flat.items():
        assert state[name].dtype == value.dtype
        assert state[name].shape == value.shape
        same = [one.contiguous().view(torch.uint8) for one in (state[name], value)]
        assert torch.equal(*same), name


def test_a_batch_is_a_copy() -> None:
    buffer = ReplayBuffer(4, batch_size=4)
    buffer.extend(numbered(0, 4))
    batch = buffer.sample()
    before = batch.clone()
    buffer.extend(numbered(100, 4))
    assert (batch == before).all()
    batch.zero_()
    assert contents(buffer) == [100, 101, 102, 103]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity=0 must be at least 1"),
        ({"storage": "disk"}, "storage='disk' is unknown"),
        ({"storage": "memmap"}, "storage='memmap' needs a directory"),
        ({"directory": "x"}, "storage='memmap' needs a directory"),
        ({"sampler": "unform"}, "sampler='unform' is unknown"),
        ({"prefetch": 2}, "prefetch=2 needs a batch_size"),
        ({"min_size": 11}, "min_size=11 not above it"),
        ({"min_size": 0}, "min_size must be at least 1"),
        ({"samples_per_insert": -1.0}, "samples_per_insert positive"),
        ({"tolerance": -1.0}, "tolerance not negative"),
    ],
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReplayBuffer(**{"capacity": 10, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.exclude("pixels"), "lacks 'pixels'"),
        (lambda b: b.set("more", torch.zeros(3)), "has a new key, 'more'"),
        (lambda b: b.set("half", torch.zeros(3, 2)), r"'half' is torch.float32 \(2,\) per frame"),
        (lambda b: b.set("half", torch.zeros(3, 1)), r"'half' is torch.float32 \(1,\) per frame"),
        (lambda b: b.set("half", NonTensorData("x", [3])), "'half' holds"),
        (lambda b: b[0], r"add\(\)"),
        (lambda b: {"a": 1}, "got dict"),
    ],
)
def test_a_batch_that_differs_is_refused_and_nothing_of_it_is_written(change, message) -> None:
    buffer = ReplayBuffer(10, batch_size=4)
    buffer.extend(numbered(0, 5))
    with pytest.raises(UsageError, match=message):
        buffer.extend(change(numbered(5, 3)))
    assert contents(buffer) == [0, 1, 2, 3, 4]


def test_reserved_keys_and_missing_sizes_are_refused() -> None:
    buffer = ReplayBuffer(10)
    with pytest.raises(UsageError, match="'index'"):
        buffer.extend(TensorDict({"index": torch.zeros(2)}, [2]))
    with pytest.raises(UsageError, match="batch_size=None"):
        buffer.sample()
    with pytest.raises(UsageError, match="has no batch_size"):
        next(iter(buffer))
    with pytest.raises(UsageError, match="no writer is registered"):
        buffer.sample(3)
    buffer.extend(numbered(0, 3))
    with pytest.raises(UsageError, match="has no priorities"):
        buffer.update_priority([0], 1.0)


# -- on disk, saved, restored ----------------------------------------------------------------------


def test_files_are_opened_again_as_they_were_left(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        buffer.extend(numbered(0, 13))
        with pytest.raises(UsageError, match="open in another buffer"):
            make("memmap", tmp_path)
    with pytest.raises(UsageError, match="capacity=10, not 11"):
        make("memmap", tmp_path, 11)
    with make("memmap", tmp_path) as buffer:
        assert contents(buffer) == list(range(3, 13))
        buffer.extend(numbered(13, 2))
        assert contents(buffer) == list(range(5, 15))
        assert buffer.stats()["frames"] == 15
    assert check(load_dataset(tmp_path / "buffer")).tolist() == list(range(5, 15))


def test_a_ring_that_is_not_full_is_a_dataset_without_a_copy(tmp_path: Path) -> None:
    with make("memmap", tmp_path, 1 << 20) as buffer:  # 34 MB of files with holes
        buffer.extend(numbered(0, 5))
        data = load_dataset(tmp_path / "buffer")
        assert check(data).tolist() == [0, 1, 2, 3, 4]
        assert isinstance(data["observation"], MemoryMappedTensor)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", UniformSampler(False)])
@pytest.mark.parametrize("saved", [False, True])
def test_a_restored_buffer_goes_on_as_if_nothing_had_happened(sampler, saved, tmp_path) -> None:
    def fresh() -> ReplayBuffer:
        mine = UniformSampler(False) if isinstance(sampler, UniformSampler) else sampler
        return ReplayBuffer(10, sampler=mine, batch_size=4, seed=1)

    buffer, other = fresh(), fresh()
    buffer.extend(numbered(0, 13))
    index = buffer.sample()["index"]
    if sampler == "prioritized":
        buffer.update_priority(index, torch.rand(4))
    if saved:
        buffer.save(tmp_path / "saved")
        assert check(load_dataset(tmp_path / "saved")).tolist() == list(range(3, 13))
        other.load(tmp_path / "saved")
    else:
        other.load_state_dict(buffer.state_dict())
    assert other.stats()["samples"] == 4
    for _ in range(5):
        assert (buffer.sample() == other.sample()).all()
    with pytest.raises(UsageError, match="capacity=11"):
        ReplayBuffer(11).load_state_dict(buffer.state_dict())


def test_what_is_no_saved_buffer_is_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    buffer = ReplayBuffer(10)
    with pytest.raises(UsageError, match="empty"):
        buffer.save(tmp_path / "x")
    buffer.extend(numbered(0, 3))
    (tmp_path / "notes").mkdir()
    with pytest.raises(UsageError, match="is not a saved replay buffer"):
        buffer.save(tmp_path / "notes")
    with pytest.raises(UsageError, match="is not a saved replay buffer"):
        buffer.load(tmp_path / "nothing")


def test_a_buffer_is_saved_again_and_again_where_a_link_leads_to(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    buffer, other = ReplayBuffer(10), ReplayBuffer(10)
    link.symlink_to(real)
    for number in range(3):
        buffer.extend(numbered(3 * number, 3))
        buffer.save(link)
        other.load(link)
        assert len(other) == 3 * number + 3
    assert link.is_symlink()
    assert sorted(tmp_path.rglob("*.pt")) == [real / "replay.pt"]


def test_nothing_is_taken_or_removed_that_only_has_a_name_of_the_save_before(
    tmp_path: Path,
) -> None:
    buffer = ReplayBuffer(10)
    buffer.extend(numbered(0, 3))
    for end in (".old", ".new"):
        mine = tmp_path / f"saved{end}" / "precious"
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(UsageError, match="is not a saved replay buffer"):
            buffer.save(tmp_path / "saved")
        with pytest.raises(UsageError, match="is not a saved replay buffer"):
            buffer.load(tmp_path / "saved")
        assert mine.read_text() == "mine"
        shutil.rmtree(mine.parent)
    buffer.save(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "saved.old")
    buffer.load(tmp_path / "saved")
    assert (tmp_path / "saved.old").is_dir()


@pytest.mark.parametrize("shape", [(), (2,), (40, 40)])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16])
def test_what_was_saved_is_loaded_whatever_its_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    buffer, by_file, by_state = (ReplayBuffer(4) for _ in range(3))
    values = torch.arange(6).view(6, *[1] * len(shape)).expand(6, *shape).to(dtype)
    buffer.extend(TensorDict({"depth": values, "count": torch.arange(6)}, [6]))
    buffer.save(tmp_path / "saved")
    by_file.load(tmp_path / "saved")
    by_state.load_state_dict(buffer.state_dict())
    for one in (by_file, by_state):
        drawn = one.sample(32)
        assert drawn["depth"].dtype is dtype
        counts = drawn["count"].view(32, *[1] * len(shape)).expand(32, *shape)
        assert torch.equal(drawn["depth"].to(torch.int64), counts)


def test_a_crash_while_saving_leaves_a_whole_buffer(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    rng = np.random.default_rng(0)
    for _ in range(8):
        process = launch(save_for_ever, str(path).encode())
        last = process.channel.receive()[0]
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        with contextlib.suppress(EOFError):
            while True:
                last = process.channel.receive()[0]
        process.close()
        buffer = ReplayBuffer(5000, batch_size=5000)
        buffer.load(path)
        counts = next(iter(buffer))["next", "reward"].long().flatten()
        assert counts.min() in (last, last + 5000)
        assert counts.sort().values.tolist() == list(range(counts.min(), counts.min() + 5000))


# -- waiting, failing, closing ---------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_learner_and_writer_hold_each_other_to_the_ratio(prefetch: int) -> None:
    options = {"samples_per_insert": 2.0, "tolerance": 40.0, "min_size": 20, "timeout": 30.0}
    with ReplayBuffer(100, batch_size=8, prefetch=prefetch, **options) as buffer:
        seen: list[float] = []

        def look() -> None:
            if buffer._ring is not None:
                with buffer._ring as ring:  # both counts at one time
                    counts = ring.words[Word.WRITTEN], ring.words[Word.DRAWN]
                seen.append(2.0 * (counts[0] - 20) - counts[1])

        def write() -> None:
            for first in range(0, 1000, 10):
                buffer.extend(numbered(first, 10))
                look()

        writer = threading.Thread(target=write)
        writer.start()
        # What is drawn ahead counts as drawn, so that many fewer are asked for here.
        for _ in range((2 * (1000 - 20) - 40) // 8 - prefetch * 2):
            buffer.sample()
            look()
        writer.join(30)
        assert not writer.is_alive()
    slack = 40 + max(2.0 * 10, 8.0 * max(prefetch, 1))
    assert max(seen) <= slack
    assert min(one for one in seen[1:]) >= -max(slack, 40)


def test_without_tolerance_only_one_side_may_go() -> None:
    options = {"samples_per_insert": 1, "tolerance": 0, "min_size": 4, "timeout": 0.02}
    with ReplayBuffer(100, batch_size=2, **options) as buffer:
        for first in range(0, 40, 4):
            for _ in range(2 if first > 4 else 0):
                with pytest.raises(WorkerError, match="to write"):
                    buffer.extend(numbered(0, 4))
                buffer.sample()
            with pytest.raises(WorkerError, match="frames to draw"):
                buffer.sample()
            buffer.extend(numbered(first, 4))


def test_frames_are_written_into_an_emptied_buffer_whatever_the_ratio() -> None:
    with ReplayBuffer(
        100, batch_size=2, samples_per_insert=1, tolerance=0, min_size=4, timeout=0.02
    ) as buffer:
        buffer.extend(numbered(0, 10))
        buffer.empty()
        with pytest.raises(WorkerError, match="frames to draw"):
            buffer.sample()
        buffer.extend(numbered(10, 4))
        assert buffer.sample()["index"].min() >= 10


def test_a_wait_ends_with_the_timeout() -> None:
    buffer = ReplayBuffer(10, batch_size=2, min_size=5, timeout=0.05)
    buffer.extend(numbered(0, 4))
    with pytest.raises(WorkerError, match=r"waited 0.05 s .timeout. for frames"):
        buffer.sample()
    strict = ReplayBuffer(10, batch_size=2, samples_per_insert=1, tolerance=0, timeout=0.05)
    strict.extend(numbered(0, 4))
    with pytest.raises(WorkerError, match="too few samples were drawn"):
        strict.extend(numbered(4, 4))
    assert strict.stats()["frames"] == 4


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_failure_ends_all_waiting_with_its_cause(prefetch: int) -> None:
    with ReplayBuffer(10, batch_size=2, min_size=5, timeout=30, prefetch=prefetch) as buffer:
        buffer.extend(numbered(0, 4))
        error = EnvError("env 3 broke", env=3)
        error.__cause__ = ZeroDivisionError("inside")
        threading.Timer(0.05, buffer.fail, [error]).start()
        with pytest.raises(EnvError, match="env 3 broke") as caught:
            buffer.sample()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EnvError):
            buffer.extend(numbered(4, 4))
        buffer.fail(None)
        buffer.extend(numbered(4, 4))
        assert buffer.sample().batch_size == (2,)


def test_all_who_wait_hear_that_nobody_writes_any_more() -> None:
    heard: list[str] = []

    def wait() -> None:
        try:
            buffer.sample()
        except UsageError as error:
            heard.append(str(error))

    with ReplayBuffer(100, batch_size=4, prefetch=2, samples_per_insert=1.0, min_size=50) as buffer:
        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        buffer.fed = False
        for thread in threads:
            thread.join(30)
        assert len(heard) == 8
        assert all("no writer is registered" in words for words in heard)


def test_a_watch_makes_sample_wait_and_ends_the_wait() -> None:
    buffer = ReplayBuffer(10, batch_size=2)
    calls = []

    def watch() -> None:
        calls.append(1)
        if len(calls) > 5:
            raise WorkerError("the worker is gone")

    buffer.watch = watch
    with pytest.raises(WorkerError, match="is gone"):
        buffer.sample()
    buffer.watch = lambda: None
    threading.Timer(0.05, buffer.extend, [numbered(0, 4)]).start()
    assert set(check(buffer.sample()).tolist()) <= {0, 1, 2, 3}


def test_batches_are_drawn_ahead_and_threads_end() -> None:
    threads = threading.active_count()
    buffer = ReplayBuffer(
        50, batch_size=8, prefetch=3, transform=lambda b: b.set("two", b["index"] * 2)
    )
    buffer.extend(numbered(0, 40))
    for _ in range(20):
        batch = buffer.sample()
        assert torch.equal(batch["two"], check(batch) * 2)
    assert threading.active_count() == threads + 3
    buffer.empty()
    buffer.extend(numbered(100, 10))
    assert check(buffer.sample()).min() >= 100  # nothing from before
    buffer.close()
    buffer.close()
    assert threading.active_count() == threads
    for call in (buffer.sample, lambda: buffer.extend(numbered(0, 1)), buffer.empty):
        with pytest.raises(ClosedError):
            call()


def test_an_error_in_a_thread_that_draws_ahead_is_raised_by_sample() -> None:
    def broken(batch: TensorDict) -> TensorDict:
        raise ZeroDivisionError("in the transform")

    with ReplayBuffer(10, batch_size=2, prefetch=2, transform=broken) as buffer:
        buffer.extend(numbered(0, 4))
        with pytest.raises(ZeroDivisionError, match="in the transform"):
            buffer.sample()


def test_an_extend_that_breaks_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(10, batch_size=4)
    buffer.extend(numbered(0, 6))

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(buffer._ring.columns["next", "reward"], "frames", broken)
        with pytest.raises(KeyboardInterrupt):
            buffer.extend(numbered(6, 3))
    assert contents(buffer) == [0, 1, 2, 3, 4, 5]
    buffer.extend(numbered(9, 3))
    assert contents(buffer) == [2, 3, 4, 5, 9, 10, 11]


def test_stats_tell_the_ratio_and_the_lag() -> None:
    buffer = ReplayBuffer(100, batch_size=50)
    assert buffer.stats()["frames"] == 0
    buffer.extend(numbered(0, 100))  # versions 0 to 9
    batch = torch.cat([buffer.sample(), buffer.sample()])
    lag = (9 - batch["collector", "policy_version"]).double()
    assert buffer.stats() == {
        "size": 100,
        "frames": 100,
        "samples": 100,
        "sample_ratio": 1.0,
        "lag_mean": pytest.approx(lag.mean().item()),
        "lag_max": lag.max().item(),
    }


def test_a_device_on_request() -> None:
    buffer = ReplayBuffer(10, batch_size=2, device="meta")
    buffer.extend(numbered(0, 4))
    assert buffer.sample().device.type == "meta"
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="pin_memory=True needs a GPU"):
            ReplayBuffer(10, pin_memory=True)
