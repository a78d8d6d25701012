"""A replay buffer against a plain list of frames: random options, random operations.

The first test does one thing at a time and knows of each what must come of it. In the second all
happens at once, in threads, workers and other processes: each frame is checked, all are counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import replay_kit as kit
import torch
from tensordict import TensorDict

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.data import PrioritizedSampler, ReplayBuffer, SliceSampler, UniformSampler
from swath.errors import ClosedError, UsageError, WorkerError
from swath.testing import CountingEnv

SECONDS = float(os.environ.get("SWATH_FUZZ_SECONDS", "3"))
AT_ONCE = 1e-9
"""A time limit with which a call does what it may do at once, or raises."""


def cases(first: int = 0) -> Iterator[int]:
    """Yield the seeds of cases until the time is over; SWATH_FUZZ_SEED is where to begin."""
    end, seed = time.monotonic() + SECONDS, int(os.environ.get("SWATH_FUZZ_SEED", first))
    while time.monotonic() < end:
        yield seed
        seed += 1


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """What is written; the content follows from the count."""

    count: int
    traj: int
    time: int
    done: bool
    version: int


@dataclass
class Counted:
    """What the ratio and the numbers of frames depend on."""

    frames: dict[int, Frame] = field(default_factory=dict)  # by number, all that are there
    number: int = 0  # of the next frame
    cleared: int = 0  # frames written before it was emptied
    samples: int = 0
    newest: int = 0  # policy version


class Model:
    """A replay buffer as the guide describes it."""

    def __init__(self, capacity: int, pace: dict[str, Any]) -> None:
        self.capacity, self.pace = capacity, pace
        self.now = Counted()
        self.starved = False  # somebody could not draw since the last write

    def _ahead(self) -> float:
        made = self.now.number - self.pace["min_size"]
        return self.pace["samples_per_insert"] * made - self.now.samples

    def stocked(self) -> bool:
        there = self.now.number - self.now.cleared
        return bool(self.now.frames) and there >= self.pace["min_size"]

    def may_write(self) -> bool:
        if self.pace["samples_per_insert"] is None or not self.stocked() or self.starved:
            return True
        return self._ahead() <= self.pace["tolerance"]

    def may_draw(self) -> bool:
        if not self.stocked() or self.pace["samples_per_insert"] is None:
            return self.stocked()
        return self._ahead() > -self.pace["tolerance"]

    def write(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.now.frames[self.now.number] = frame
            self.now.frames.pop(self.now.number - self.capacity, None)
            self.now.number += 1
            self.now.newest = max(self.now.newest, frame.version)
        self.starved &= not frames

    def empty(self) -> None:
        self.now.frames.clear()
        self.now.cleared = self.now.number


class Env:
    """Makes the frames of one env, whose episodes end at random."""

    def __init__(self, rng: np.random.Generator, ids: Iterator[int], ends: float) -> None:
        self.rng, self.ids, self.ends = rng, ids, ends
        self.traj, self.time = next(ids), 0

    def step(self, count: int, version: int) -> Frame:
        done = bool(self.rng.random() < self.ends)
        frame = Frame(count, self.traj, self.time, done, version)
        self.traj, self.time = (next(self.ids), 0) if done else (self.traj, self.time + 1)
        return frame


def batch_of(rows: list[list[Frame | None]]) -> TensorDict:
    """Return frames `[N, T]`; where there is none, a row that the mask excludes."""
    nothing = Frame(-1, -1, -1, False, 0)

    def column(get: Callable[[Frame], Any]) -> torch.Tensor:
        return torch.tensor([[get(one or nothing) for one in row] for row in rows])

    count, size = column(lambda one: one.count), [len(rows), len(rows[0])]
    batch = TensorDict(
        {
            "observation": torch.stack([count, -count, 2 * count], -1).double(),
            "time": column(lambda one: one.time),
            "next": {"done": column(lambda one: one.done)[..., None]},
            "collector": {
                "traj_ids": column(lambda one: one.traj),
                "policy_version": column(lambda one: one.version),
            },
        },
        size,
    )
    if any(one is None for row in rows for one in row):
        batch["collector", "mask"] = column(lambda one: one is not nothing)
    return batch


def frames_in(batch: TensorDict) -> list[Frame]:
    """Return what came, after checking that all parts of a frame belong together."""
    flat = batch.reshape(-1)
    count = flat["observation"][:, 0].long()
    assert torch.equal(flat["observation"], torch.stack([count, -count, 2 * count], -1).double())
    ids, versions = flat["collector", "traj_ids"], flat["collector", "policy_version"]
    parts = (count, ids, flat["time"], flat["next", "done"][:, 0], versions)
    return [Frame(*one) for one in zip(*(part.tolist() for part in parts), strict=True)]


def check_slices(batch: TensorDict) -> None:
    """Check that each row of a batch is of one trajectory, in order and without a gap."""
    ids = batch["collector", "traj_ids"]
    assert (ids == ids[:, :1]).all()
    assert (batch["time"].diff(dim=1) == 1).all()
    assert not batch["next", "done"][:, :-1].any()


# -- what each sampler promises --------------------------------------------------------------------


class Uniform:
    def __init__(self, rng: np.random.Generator) -> None:
        self.sampler: Any = UniformSampler()

    def sizes(self, capacity: int) -> list[int]:
        return [1, 3, 8, 2 * capacity]

    def can(self, model: Model, size: int) -> bool:
        return True

    def check(self, model: Model, batch: TensorDict) -> None:
        pass

    def wrote(self, model: Model) -> None:
        pass

    def update(self, model: Model, index: list[int], priority: list[float]) -> None:
        pass

    def forget(self, model: Model) -> None:
        """Numbers mean other frames from now on."""


class EachOnce(Uniform):
    """The rest of a round comes first, then some of the next round; nothing twice in a batch."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.sampler, self.left = UniformSampler(replacement=False), set[int]()

    def sizes(self, capacity: int) -> list[int]:
        return [1, 3, max(1, capacity // 3), capacity]

    def can(self, model: Model, size: int) -> bool:
        return len(model.now.frames) >= size

    def forget(self, model: Model) -> None:
        self.left.clear()

    def check(self, model: Model, batch: TensorDict) -> None:
        drawn = batch["index"].tolist()
        assert len(set(drawn)) == len(drawn)
        self.left &= set(model.now.frames)
        old, new = drawn[: len(self.left)], drawn[len(self.left) :]
        assert set(old) <= self.left
        self.left -= set(old)
        if new:
            self.left = set(model.now.frames) - set(new)


class Prioritized(Uniform):
    def __init__(self, rng: np.random.Generator) -> None:
        self.alpha, self.beta = rng.choice([0.0, 0.6, 1.0]), rng.choice([0.0, 0.4, 1.0])
        self.sampler = PrioritizedSampler(self.alpha, self.beta, eps=1e-3)
        self.priority, self.highest = dict[int, float](), 1.0

    def wrote(self, model: Model) -> None:
        new = {number: self.highest for number in model.now.frames}
        self.priority = {number: self.priority.get(number, new[number]) for number in new}

    def forget(self, model: Model) -> None:
        self.priority.clear()
        self.wrote(model)

    def update(self, model: Model, index: list[int], priority: list[float]) -> None:
        for number, one in zip(index, priority, strict=True):
            if number in model.now.frames:
                self.priority[number] = one
                self.highest = max(self.highest, one)

    def check(self, model: Model, batch: TensorDict) -> None:
        priority = torch.tensor([self.priority[number] for number in batch["index"].tolist()])
        weight = ((priority.double() + 1e-3) ** self.alpha) ** -self.beta
        torch.testing.assert_close(batch["priority_weight"].double(), weight / weight.max())


class Slices(Uniform):
    def __init__(self, rng: np.random.Generator) -> None:
        self.length = int(rng.choice([1, 2, 3, 5]))
        self.sampler = SliceSampler(slice_len=self.length)

    def sizes(self, capacity: int) -> list[int]:
        return [self.length, 4 * self.length]

    def can(self, model: Model, size: int) -> bool:
        held = {(one.traj, one.time) for one in model.now.frames.values()}
        steps = range(self.length)
        return any(all((traj, at + one) in held for one in steps) for traj, at in held)

    def check(self, model: Model, batch: TensorDict) -> None:
        check_slices(batch)


KINDS = [Uniform, EachOnce, Prioritized, Slices]


# -- one thing at a time ---------------------------------------------------------------------------


class Case:
    """One buffer, those attached to it, and what they must do."""

    def __init__(self, seed: int, path: Any) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.path = path
        storage = str(rng.choice(["memory", "shared", "memmap"]))
        self.capacity = int(rng.integers(4, 60))
        paced = rng.random() < 0.5
        pace = {
            "min_size": int(rng.integers(1, self.capacity + 1)) if rng.random() < 0.5 else 1,
            "samples_per_insert": float(rng.choice([0.3, 1, 4])) if paced else None,
            "tolerance": float(rng.choice([0, 5, 100])),
        }
        self.model = Model(self.capacity, pace)
        kinds = [rng.choice(KINDS)(rng) for _ in range(1 if storage == "memory" else 2)]
        directory = path / "files" if storage == "memmap" else None
        options = {**pace, "timeout": AT_ONCE, "seed": seed}
        main = ReplayBuffer(
            self.capacity,
            storage=storage,
            directory=directory,
            sampler=kinds[0].sampler,
            batch_size=30,
            **options,
        )
        self.buffers = [(main, kinds[0])]
        self.lags: list[list[int]] = [[] for _ in kinds]
        ids = iter(range(10**9))
        ends = float(rng.choice([0.05, 0.3]))
        self.envs = [[Env(rng, ids, ends) for _ in range(rng.integers(1, 4))] for _ in kinds]
        self.count = self.version = 0
        self.states: list[tuple[Any, Any]] = []
        if len(kinds) > 1:
            main.prepare(batch_of([[Frame(0, 0, 0, False, 0)]]))
            beside = ReplayBuffer.attached(*main.handle(), sampler=kinds[1].sampler, seed=seed)
            beside._pace = beside._draws.pace = main._pace
            self.buffers.append((beside, kinds[1]))

    def one(self) -> tuple[int, ReplayBuffer, Any]:
        which = int(self.rng.integers(len(self.buffers)))
        return which, *self.buffers[which]

    def extend(self) -> None:
        which, buffer, _ = self.one()
        steps, masked = int(self.rng.integers(1, 9)), self.rng.random() < 0.2
        rows: list[list[Frame | None]] = []
        for env in self.envs[which]:
            rows.append([])
            for _ in range(steps):
                self.count += 1
                there = not masked or self.rng.random() < 0.7
                rows[-1].append(env.step(self.count, self.version) if there else None)
        frames = [one for row in rows for one in row if one is not None]
        batch = batch_of(rows)
        if len(rows) == 1 and not masked and self.rng.random() < 0.5:
            batch = batch[0]
        if steps == 1 and len(rows) == 1 and not masked and self.rng.random() < 0.5:
            self.written(frames, lambda: buffer.add(batch.reshape(-1)[0]))
        else:
            self.written(frames, lambda: buffer.extend(batch))

    def written(self, frames: list[Frame], write: Callable[[], None]) -> None:
        if frames and not self.model.may_write():
            with pytest.raises(WorkerError, match="to write"):
                write()
            return
        write()
        self.model.write(frames)
        for _, kind in self.buffers:
            kind.wrote(self.model)

    def sample(self) -> None:
        which, buffer, kind = self.one()
        model, size = self.model, int(self.rng.choice(kind.sizes(self.capacity)))
        if kind.sampler.needs(kind.sampler.shape(size)) > self.capacity:
            with pytest.raises(UsageError, match="cannot draw"):
                buffer.sample(size)
        elif not (model.may_draw() and kind.can(model, size)):
            with pytest.raises(WorkerError, match="for frames to draw"):
                buffer.sample(size)
            model.starved = True
        else:
            batch = buffer.sample(size)
            assert batch.numel() == size
            self.came(which, batch)
            kind.check(model, batch)

    def came(self, which: int, batch: TensorDict) -> None:
        """Check that the frames of a batch are what was written under their numbers."""
        frames = frames_in(batch)
        assert frames == [self.model.now.frames[one] for one in batch["index"].flatten().tolist()]
        self.model.now.samples += len(frames)
        self.lags[which] += [self.model.now.newest - one.version for one in frames]

    def iterate(self) -> None:
        batches = list(self.buffers[0][0])
        for batch in batches:
            self.came(0, batch)
        index = [one for batch in batches for one in batch["index"].tolist()]
        assert sorted(index) == sorted(self.model.now.frames)

    def update_priority(self) -> None:
        _, buffer, kind = self.one()
        if isinstance(kind, Prioritized) and self.model.now.number:
            numbers = self.rng.permutation(self.model.now.number)[: self.rng.integers(1, 20)]
            priority = self.rng.random(len(numbers)) * 3
            buffer.update_priority(torch.from_numpy(numbers), priority)
            kind.update(self.model, numbers.tolist(), priority.tolist())

    def empty(self) -> None:
        self.one()[1].empty()
        self.model.empty()

    def note_version(self) -> None:
        self.version += int(self.rng.integers(0, 3))
        self.one()[1].note_version(self.version)
        if self.buffers[0][0].prepared:
            self.model.now.newest = max(self.model.now.newest, self.version)

    def keep(self) -> None:
        """Take the state, in memory or on disk."""
        buffer, kind = self.buffers[0]
        model = deepcopy((self.model.now, {k: v for k, v in vars(kind).items() if k != "sampler"}))
        if not self.model.now.frames or self.rng.random() < 0.5:
            self.states.append((buffer.state_dict(), model))
        else:
            buffer.save(self.path / f"saved {len(self.states)}")
            self.states.append((self.path / f"saved {len(self.states)}", model))

    def restore(self) -> None:
        """Go back to a state; all that was begun since then is given up."""
        if not self.states:
            return
        state, model = self.states[self.rng.integers(len(self.states))]
        buffer, kind = self.buffers[0]
        if isinstance(state, dict) and "frames" not in state:
            return  # of a buffer that had no memory yet
        buffer.load(state) if not isinstance(state, dict) else buffer.load_state_dict(state)
        self.model.now, about = deepcopy(model)
        vars(kind).update(about)
        self.model.starved = False
        for _, other in self.buffers[1:]:
            other.forget(self.model)
        for envs in self.envs:
            for env in envs:
                env.traj, env.time = next(env.ids), 0

    def refused(self) -> None:
        """Extend with what does not fit; nothing of it is written."""
        if self.model.now.number:
            with pytest.raises(UsageError):
                self.one()[1].extend(batch_of([[Frame(1, 1, 1, False, 0)]]).exclude("time"))
            for envs in self.envs:
                for env in envs:
                    env.traj, env.time = next(env.ids), 0

    def check(self) -> None:
        for which, (buffer, _) in enumerate(self.buffers):
            lags, stats = self.lags[which], buffer.stats()
            assert len(buffer) == stats["size"] == len(self.model.now.frames)
            assert stats["frames"] == self.model.now.number
            assert stats["samples"] == self.model.now.samples
            assert stats["lag_max"] == max(lags, default=0)
            assert stats["lag_mean"] == pytest.approx(np.mean(lags) if lags else 0.0)

    def run(self) -> None:
        operations = {
            self.extend: 10,
            self.sample: 10,
            self.update_priority: 4,
            self.iterate: 1,
            self.empty: 0.5,
            self.note_version: 1,
            self.keep: 0.5,
            self.restore: 0.5,
            self.refused: 0.3,
        }
        weights = np.array(list(operations.values())) / sum(operations.values())
        try:
            for which in self.rng.choice(len(operations), 80, p=weights):
                list(operations)[which]()
                self.check()
        finally:
            for buffer, _ in self.buffers[::-1]:
                buffer.close()


@pytest.mark.fuzz
@pytest.mark.timeout(60 + 2 * SECONDS)
def test_one_thing_at_a_time_does_what_a_list_of_frames_would(tmp_path: Any) -> None:
    for seed in cases():
        try:
            Case(seed, tmp_path / str(seed)).run()
        except BaseException as error:
            error.add_note(f"SWATH_FUZZ_SEED={seed}") if hasattr(error, "add_note") else None
            raise


# -- all at once -----------------------------------------------------------------------------------


def write_batches(buffer: ReplayBuffer, seed: int, batches: int) -> int:
    """Write batches of a few envs whose trajectories nobody else has; return how many frames."""
    rng, ids = np.random.default_rng(seed), iter(range(seed * 10**6, 10**12))
    envs, written = [Env(rng, ids, 0.05) for _ in range(rng.integers(1, 5))], 0
    for _ in range(batches):
        steps = int(rng.integers(1, 12))
        rows = [[env.step(seed * 10**6 + written, 0) for _ in range(steps)] for env in envs]
        buffer.extend(batch_of(rows))
        written += steps * len(rows)
    return written


def write_elsewhere(channel: Any, payload: bytes) -> None:
    """Write batches in another process, and tell of how many frames they were."""
    buffer, (seed, batches), port = kit.attach(channel)
    try:
        channel.send(write_batches(buffer, seed, batches))
        port.receive()
    except ClosedError:
        pass


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition holds; that takes a moment, and never many seconds."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


class Crowd:
    """Threads and processes that fill one buffer and sample from it until all are done."""

    def __init__(self, seed: int, path: Any) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.seed, self.stack = seed, contextlib.ExitStack()
        storage = str(rng.choice(["memory", "shared", "memmap"]))
        self.attaches = storage != "memory"
        capacity = int(rng.choice([60, 300, 3000]))
        self.kinds = [rng.choice(KINDS)(rng) for _ in range(1 + self.attaches)]
        paced = rng.random() < 0.6
        options = {
            "min_size": int(rng.choice([1, 30])),
            "samples_per_insert": float(rng.choice([0.5, 4])) if paced else None,
            "tolerance": float(rng.choice([0, 100])),
            "seed": seed,
        }
        self.prefetch = int(rng.choice([0, 0, 2]))
        self.buffer = ReplayBuffer(
            capacity,
            storage=storage,
            directory=path / "files" if storage == "memmap" else None,
            sampler=self.kinds[0].sampler,
            batch_size=30,
            prefetch=self.prefetch,
            **options,
        )
        self.stack.callback(self.buffer.close)
        self.readers = [self.buffer]
        self.failed: list[BaseException] = []
        self.samples, self.seen = [0, 0, 0], dict[int, Any]()
        self.done, self.lock, self.killed = threading.Event(), threading.Lock(), 0
        self.written = 0

    def attach(self, frame: TensorDict) -> None:
        """Let those who are beside see the memory, if there is any to be seen."""
        if self.attaches:
            self.buffer.prepare(frame)
            sampler = self.kinds[1].sampler
            self.readers.append(ReplayBuffer.attached(*self.buffer.handle(), sampler=sampler))

    def thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:
                self.failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def note(self, which: int, batch: TensorDict) -> None:
        """Check a batch: what has a number once is the same frame whenever it comes again."""
        values = [batch[key].reshape(-1).tolist() for key in (("collector", "traj_ids"), "index")]
        about = batch["time"] if "time" in batch.keys() else batch["observation"][..., 2]
        with self.lock:
            self.samples[which] += batch.numel()
            for traj, number, step in zip(*values, about.reshape(-1).tolist(), strict=True):
                assert self.seen.setdefault(number, (traj, step)) == (traj, step)
        if batch.ndim == 2:
            ids, steps = batch["collector", "traj_ids"], about
            assert (ids == ids[:, :1]).all()
            assert (steps.diff(dim=1) == 1).all()
            assert not batch["next", "done"][:, :-1].any()
        elif isinstance(self.kinds[which % 2].sampler, UniformSampler):
            if not self.kinds[which % 2].sampler.replacement:
                assert len(batch["index"].unique()) == len(batch)

    def read(self, which: int, buffer: ReplayBuffer, least: int = 5) -> None:
        """Sample until there is nothing more to come."""
        rng = np.random.default_rng(self.seed + which)
        while least > 0 or not self.done.is_set():
            least -= 1
            size = 30 if which == 0 else int(rng.choice([30, 60]))
            try:
                batch = buffer.sample(size)
            except UsageError as error:
                if "no writer is registered that would add more" in str(error):
                    return
                raise
            self.note(which, batch)
            if isinstance(self.kinds[which].sampler, PrioritizedSampler):
                buffer.update_priority(batch["index"], rng.random(size))

    def fill_by_hand(self) -> None:
        """Write in threads, here and beside, and in processes, one of which may be killed."""
        self.attach(batch_of([[Frame(0, 0, 0, False, 0)]]))
        self.buffer.note_feeder("all", True)
        readers = [self.thread(self.read, *one) for one in enumerate(self.readers)]
        threads, links = [], []
        for number in range(1, 1 + self.rng.integers(1, 4)):
            seed, batches = self.seed * 10 + number, int(self.rng.integers(5, 40))
            if self.attaches and self.rng.random() < 0.5:
                link = kit.process(write_elsewhere, self.buffer, (seed, batches))
                links.append(self.stack.enter_context(link))
            else:
                target = self.readers[self.rng.integers(len(self.readers))]
                threads.append(self.thread(self.write, target, seed, batches))
        for number, link in enumerate(links):
            if self.killed == number and self.rng.random() < 0.3:
                self.killed += 1
                time.sleep(self.rng.random() / 50)
                link.kill()
            else:
                wait_for(link.waits, "a writer in another process waits for ever")
                self.written += link.receive()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a writer waits for ever"
        self.end(readers)

    def write(self, buffer: ReplayBuffer, seed: int, batches: int) -> None:
        frames = write_batches(buffer, seed, batches)
        with self.lock:
            self.written += frames

    def fill_by_collectors(self) -> None:
        """Let one collector write, or two, with workers of their own or not."""
        kind = self.rng.choice([Collector, MultiSyncCollector, MultiAsyncCollector])
        # Trajectories of two collectors may have the same ids, and slices would mix them.
        count = 1 if isinstance(self.kinds[0], Slices) else int(self.rng.integers(1, 3))
        collectors = []
        for _ in range(count):
            total, frames = int(self.rng.choice([160, 800])), int(self.rng.choice([8, 40]))
            options = {"frames_per_batch": frames, "total_frames": total}
            collector = kind([CountingEnv] * 2, replay_buffer=self.buffer, **options)
            collectors.append(self.stack.enter_context(collector))
            self.written += total
        for collector in collectors:
            collector.start()
        readers = [self.thread(self.read, 0, self.buffer)]
        for collector in collectors:
            wait_for(lambda one=collector: not one.is_running(), "a collector waits for ever")
        self.end(readers)

    def end(self, readers: list[threading.Thread]) -> None:
        """Wait for those who sample, and count."""
        self.done.set()
        self.buffer.note_feeder("all", False)
        for buffer in self.readers:
            buffer.fed = False
        for reader in readers:
            reader.join(30)
            assert not reader.is_alive(), "who samples waits for ever"
        if self.failed:
            raise self.failed[0]
        for batch in self.buffer:
            self.note(2, batch)
        stats = self.buffer.stats()
        assert stats["size"] == len(self.buffer)
        if not self.prefetch:
            assert stats["samples"] == sum(self.samples)
        if not self.killed:
            assert stats["frames"] == self.written
            assert len(self.buffer) == min(self.written, self.buffer.capacity)

    def run(self) -> None:
        with self.stack:
            if self.rng.random() < 0.6:
                self.fill_by_hand()
            else:
                self.fill_by_collectors()


@pytest.mark.fuzz
@pytest.mark.timeout(100 + 2 * SECONDS)
def test_all_at_once_neither_waits_for_ever_nor_mixes_frames(tmp_path: Any) -> None:
    for seed in cases():
        try:
            Crowd(seed, tmp_path / str(seed)).run()
        except BaseException as error:
            error.add_note(f"SWATH_FUZZ_SEED={seed}") if hasattr(error, "add_note") else None
            raise
