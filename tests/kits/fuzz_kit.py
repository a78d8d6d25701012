"""Run the cases of `cases_kit` against the model of `model_kit`, one or many."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
import re
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cases_kit import Case
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from model_kit import Model, Promises, Wrong, by_env, checksum, demand, difference
from telling_kit import FORMS, FUSE, HistoryEnv, learner_of, policy_of
from tensordict import TensorDict

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.utils import restore_next
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import ClosedError, EnvError, UsageError

__all__ = ["Hangs", "Run", "built", "deadline", "patience", "run", "sentence_of"]

_PATIENCE = 40.0
"""Seconds after which a case is said to hang; on a loaded machine a worker takes its time."""


# -- envs -----------------------------------------------------------------------------------------


class Stubborn(VectorEnv):
    """Resets in the next step, whatever it is asked; the way of most vector envs out there."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, makers: list[Any]) -> None:
        self._inner = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.num_envs = len(makers)
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self._inner, name))
            setattr(self, f"single_{name}", getattr(self._inner, f"single_{name}"))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._inner.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        return self._inner.step(actions)


def make_env(
    envs: dict[str, Any], longest: int | None = None, wrapped: bool = True
) -> gym.Env[Any, Any]:
    """Return one env; `longest` is a keyword for `create_env_kwargs`."""
    longest = envs["longest"] if longest is None else longest
    env: Any = HistoryEnv(envs["form"], envs["action"], longest, envs.get("reuses", False))
    limit = envs.get("time_limit") if wrapped else None
    return gym.wrappers.TimeLimit(env, limit) if limit else env


def serial(envs: dict[str, Any], count: int) -> SerialEnv:
    return SerialEnv(count, functools.partial(make_env, envs), **_info(envs))


def _info(envs: dict[str, Any]) -> dict[str, Any]:
    return {"info_keys": ["hash"]} if envs.get("info") else {}


def teams(envs: dict[str, Any], longest: int | None = None) -> Any:
    """Return one of TorchRL's envs."""
    from teams_kit import HistoryTeams

    longest = envs["longest"] if longest is None else longest
    return HistoryTeams(tuple(envs["lead"]), envs["action"], longest, envs["flags"])


_MODES = {"next": "NEXT_STEP", "same": "SAME_STEP", "disabled": "DISABLED"}


def envs_of(case: Case) -> Any:
    """Return what the collector of a case takes as envs."""
    envs, kind, counts = case.envs, case.envs["kind"], case.counts
    if kind == "torchrl":
        one: Any = functools.partial(teams, envs)
        if envs["joined"] == "list":
            return [one] * 2
        if case.inline:
            return one() if envs["joined"] == "alone" else ParallelEnv(2, one)
        return one if case.owner == "AsyncCollector" else [one] * len(counts)
    one = functools.partial(make_env, envs)
    if case.owner == "AsyncCollector":
        return one if kind == "maker" else [one] * counts[0]
    if not case.inline:
        several = {
            "maker": lambda n: one if n == 1 else [one] * n,
            "listed": lambda n: [one] * n,
            "serial": lambda n: functools.partial(serial, envs, n),
        }[kind]
        return [several(count) for count in counts]
    makers = [one] * counts[0]
    if kind in _MODES:
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[_MODES[kind]])
    return {
        "maker": lambda: one,
        "object": lambda: one(),
        "gymenv": lambda: GymEnv(one(), **_info(envs)),
        "list": lambda: makers,
        "serial": lambda: SerialEnv(counts[0], one, **_info(envs)),
        "serials": lambda: [functools.partial(serial, envs, n) for n in (counts[0] - 1, 1)],
        "parallel": lambda: ParallelEnv(counts[0], one, envs.get("processes"), **_info(envs)),
        "stubborn": lambda: Stubborn(makers),
    }[kind]()


# -- the collector --------------------------------------------------------------------------------


class Kept:
    """A replay buffer that keeps batches as they come."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def take(self) -> Any:
        """Return the newest batch."""
        return self.batches.pop()

    def extend(self, batch: Any) -> None:
        self.batches.append(batch)


def kept_by_torchrl() -> Any:
    """Return a buffer of TorchRL's that says what has come since it was asked last."""
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    class Theirs(ReplayBuffer):
        """Reads what is stored back."""

        def __init__(self) -> None:
            super().__init__(storage=LazyTensorStorage(3_000), batch_size=1)
            self.seen = 0

        @property
        def batches(self) -> list[Any]:
            """The rows since the last call of `take`, as one batch."""
            return [] if len(self) == self.seen else [None]

        def take(self) -> Any:
            """Return the rows that came since the last call."""
            rows, self.seen = self[:][self.seen :].clone(), len(self)
            if rows.batch_dims == 1:
                rows = rows[None]
            rows.names = [*[None] * (rows.batch_dims - 1), "time"]
            return rows

    return Theirs()


def marked(batch: Any) -> Any:
    """Mark a batch: a postproc."""
    return batch.set("seen", torch.ones(batch.shape))


def nothing(*_: Any) -> None:
    """Do nothing: a hook."""


_STANDINS = {
    "kept": Kept,
    "torchrl": kept_by_torchrl,
    "marked": lambda: marked,
    "nothing": lambda: nothing,
}


def collector_class(name: str) -> Any:
    local = (Collector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector)
    found = {one.__name__: one for one in local}
    if name not in found:
        from swath.collectors import distributed

        return getattr(distributed, name)
    return found[name]


def built(case: Case) -> tuple[Any, Any]:
    """Return the collector of a case, and its learner."""
    options = {
        name: _STANDINS[value]() if isinstance(value, str) and value in _STANDINS else value
        for name, value in case.options.items()
    }
    made = functools.partial(policy_of, case.policy, case.envs["action"], case.envs["form"])
    policy = made()
    if "policy_factory" in options:
        options["policy_factory"] = made
    given = None if "policy_factory" in options else policy
    return collector_class(case.owner)(envs_of(case), given, **options), policy


def promises_of(case: Case) -> Promises:
    """Return what is promised to who asks for this."""
    get, envs = case.get, case.envs
    limits = [one for one in (get("max_frames_per_traj"), envs.get("time_limit")) if one]
    lone = case.sync and max(case.counts) == 1
    whole = get("trajs_per_batch")
    into_torchrl = get("replay_buffer") == "torchrl"
    lone_kinds = ("maker", "object", "gymenv")
    plain = case.inline and not (whole or get("split_trajs") or into_torchrl)
    lead = () if envs["kind"] in lone_kinds else (case.counts[0],)
    if envs.get("joined") == "alone":
        lead = tuple(envs["lead"])
    ahead = get("collect_ahead") or get("preemptive_threshold") or get("replay_buffer")
    return Promises(
        form=envs["form"],
        action=envs["action"],
        longest=(get("create_env_kwargs") or envs)["longest"],
        policy=case.policy,
        num_envs=sum(case.counts) * (get("num_workers_per_collector") or 1),
        limit=min(limits, default=None),
        inline=case.inline,
        seed=get("seed"),
        random=get("init_random_frames") or 0,
        cuts=bool(get("reset_at_each_iter")),
        marks=bool(get("set_truncated")),
        renews=bool(get("reset_when_done")),
        whole=whole,
        all_whole=into_torchrl,
        padded=whole is not None and get("traj_format") != "cat" and not into_torchrl,
        split=bool(get("split_trajs")),
        mixes=get("cat_results") == -1
        or (get("cat_results") == 0 and lone)
        or get("traj_format") == "cat"
        or into_torchrl,
        strict=(case.inline or case.sync) and not ahead and whole is None,
        max_lag=get("max_lag") if get("update_at_each_batch") else None,
        total=get("total_frames"),
        restarts=get("on_worker_failure") == "restart",
        info=bool(envs.get("info")),
        counted=get("max_frames_per_traj") is not None,
        skips=envs["kind"] in ("next", "stubborn"),
        lead=lead if plain else None,
        flags=envs.get("flags", "root"),
    )


# -- running a case -------------------------------------------------------------------------------


class Hangs(BaseException):
    """A case did not come to its end."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Hangs` after so many seconds; a limit of pytest goes on beside it."""

    def ring(*_: Any) -> None:
        raise Hangs(f"not done after {seconds:.0f} s")

    handler, started = signal.signal(signal.SIGALRM, ring), time.monotonic()
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        left = before and max(0.01, before - (time.monotonic() - started))
        signal.setitimer(signal.ITIMER_REAL, left)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


_PARTS: list[Any] = [
    lambda value: value,
    lambda value: value[..., :1],
    lambda value: value.flatten()[-1:],
    lambda value: value.numpy(),
    lambda value: value.numpy()[..., -1:],
    lambda value: value.unsqueeze(0).transpose(0, -1),
    lambda value: memoryview(value.numpy()),
    lambda value: value.detach(),
    lambda value: value.view(torch.uint8) if value.dtype == torch.bool else value.T,
    lambda value: TensorDict({"held": value}, value.shape[:1])[:1],
]
"""What may be kept of a tensor."""


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, TensorDict):
        part = part["held"]
    array = part.contiguous().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
    return array.tobytes()


def _is_tensor(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)


class Run:
    """A case under way."""

    def __init__(self, case: Case, seen: Counter[str]) -> None:
        self.case, self.seen, self.ended = case, seen, False
        self.model = Model(promises_of(case))
        self.kept: list[tuple[Any, int]] = []
        self.held: list[tuple[Any, bytes]] = []
        """Parts of batches that nobody has any more, and what they were."""
        self.timers: list[threading.Timer] = []
        self.collector, policy = built(case)
        self._use(policy)

    def _use(self, policy: Any) -> None:
        self.learner = learner_of(policy)
        self.given = policy if "policy_factory" in self.case.options else None
        self.buffer = self.collector.options.replay_buffer

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self.timers:  # before its process is another's
            timer.cancel()
            timer.join()
        self.collector.shutdown()

    # -- batches --------------------------------------------------------------------------------

    def taken(self, batch: Any, source: str = "next") -> Any:
        """Check a batch and keep it."""
        if self.buffer is not None and source == "next":
            demand(batch is None, "a batch was delivered beside the replay buffer")
            batch = self.buffer.take()
        if "seen" in batch.keys() or (self.case.get("postproc") and source == "next"):
            demand(bool((batch["seen"] == 1).all()), "postproc was not called")
            batch = batch.exclude("seen")
        self.model.note_version(self.collector.policy_version, self._value())
        whole = batch
        if self.case.get("compact_obs"):
            keys = [("next", *key) for key in FORMS[self.case.envs["form"]].keys]
            demand(not set(keys) & set(batch.keys(True)), "next observations are there")
            whole = restore_next(batch)
        self.seen["frames"] += self.model.take(whole, source)
        self.kept.append((batch, checksum(batch)))
        return batch

    def _value(self) -> int:
        return 1 if self.learner is None else int(self.learner.weight.item())

    def _learn(self) -> None:
        """Change the weights that the next version is to have."""
        if self.learner is not None:
            self.learner.become(7 + 3 * self.model.newest % 50)

    def next(self) -> Any:
        """Return the next batch, checked; None at the end."""
        if self.case.get("update_at_each_batch") and self.given is None:
            if self.collector.stats()["batches"]:
                self._learn()
        if self.buffer is not None:
            before = len(self.buffer.batches)
            for _ in self.collector:  # a round that completes no trajectory may write nothing
                if len(self.buffer.batches) > before:
                    break
            batch, there = None, len(self.buffer.batches) > before
        else:
            batch = self.collector.next()
            there = batch is not None
        if there:
            return self.taken(batch)
        self._check_the_end()
        return None

    def _check_the_end(self) -> None:
        frozen = not self.case.get("reset_when_done")
        self.model.check_total(self.collector.stats()["frames"], frozen)
        self.model.note_version(self.collector.policy_version, self._value())
        self.ended = True

    # -- operations -----------------------------------------------------------------------------

    def do(self, op: tuple[Any, ...]) -> None:
        """Do one thing, and check the counts."""
        name, *arguments = op
        self.seen[f"op {name}"] += 1
        try:
            getattr(self, f"do_{name}")(*arguments)
        except UsageError as error:
            self.seen[f"refused {name}: {sentence_of(error)}"] += 1
        stats = self.collector.stats()
        self.model.note_version(self.collector.policy_version, self._value())
        self.model.check_counts(stats, self.collector.policy_version)

    def do_next(self, count: int) -> None:
        for _ in range(count):
            if self.next() is None:
                return

    def do_iterate(self, count: int) -> None:
        if self.buffer is not None or self.case.get("update_at_each_batch"):
            return self.do_next(count)
        for number, batch in enumerate(self.collector):
            self.taken(batch)
            if number + 1 == count:
                return None
        self._check_the_end()

    def do_rollout(self) -> None:
        batch = self.collector.rollout()
        self.model.plain = False
        if batch is None:
            self._check_the_end()
        else:
            self.taken(batch, "rollout")

    def do_partial(self, failed: bool = False) -> None:
        batch = self.collector.partial()
        if batch is not None:
            held = self.case.get("trajs_per_batch") is not None
            demand(held or failed, "partial() has frames")
            self.taken(batch, "partial")

    def do_fail(self, calls: int, interrupts: bool) -> None:
        """Let an env fail or Ctrl-C come, take what is whole, and go on with new episodes."""
        error = KeyboardInterrupt if interrupts else RuntimeError
        FUSE.append((calls, error))
        try:
            self.next()
        except (EnvError, KeyboardInterrupt) as failure:
            root = failure.__cause__ if isinstance(failure, EnvError) else failure
            demand(isinstance(root, error), f"{type(root)} is raised")
            self.do_partial(failed=True)
            self.model.note_failure()
        finally:  # what goes wrong here is no Ctrl-C in the next case
            FUSE.clear()

    def do_reset(self) -> None:
        self.collector.reset()
        self.model.note_reset()

    def do_reset_some(self, flags: int) -> None:
        """Let some envs, or the envs of some workers, begin new episodes."""
        inline = self.case.inline
        count = sum(self.case.counts) if inline else len(self.case.counts)
        which = [n for n in range(count) if flags >> n & 1]
        if inline:
            self.collector.reset(which)
        else:
            self.collector.reset(which if len(which) > 1 else which[0])
        self.model.note_reset(which if inline else range(0), forgets=not inline)

    def do_episodes(self) -> None:
        self.model.note_told(self.collector.take_episodes())

    def do_hold(self, number: int) -> None:
        """Keep a part of one batch, and let go of all else."""
        self._check_kept()
        batches, self.kept = [batch for batch, _ in self.kept], []
        if not batches:
            return
        batch = batches[number % len(batches)]
        fields = sorted(batch.items(True, True), key=lambda pair: str(pair[0]))
        fields = [value for _, value in fields if isinstance(value, torch.Tensor)]
        value = fields[number // 7 % len(fields)]
        part = _PARTS[number // 3 % len(_PARTS)](value)
        self.held.append((part, _bytes_of(part)))

    def do_save(self) -> None:
        """Save a batch and pickle it: the same comes back, and little else was written."""
        batch = self.kept[-1][0] if self.kept else None
        if batch is None:
            return
        file = io.BytesIO()
        torch.save(batch, file)
        parcel = pickle.dumps(batch)
        payload = sum(value.nbytes for value in batch.values(True, True, is_leaf=_is_tensor))
        room = 4 * payload + 60_000  # a shorter rollout is written with the memory of a whole one
        demand(len(parcel) <= room and file.tell() <= room, f"{len(parcel)} bytes of {payload}")
        file.seek(0)
        for again in (torch.load(file, weights_only=False), pickle.loads(parcel)):
            found = difference(batch, again)
            demand(not found, f"a batch that was saved differs in {found}")

    def do_set_seed(self, seed: int) -> None:
        demand(self.collector.set_seed(seed) == seed, "set_seed() returns something else")
        self.model.note_seed(seed)

    def do_publish(self, how: str, workers: Any, wait: bool) -> None:
        self._learn()
        self.model.plain = False
        kwargs: dict[str, Any] = {}
        if not self.case.inline:
            kwargs = {"worker_ids": workers, "wait": wait}
            self.model.promises = replace(self.model.promises, strict=False)
        weights: Any = self.given if self.learner is not None else None
        if how != "own" and self.learner is not None:
            weights = self._weights(how)
        version = self.collector.update_policy_weights_(weights, **kwargs)
        demand(version == self.model.newest + 1, f"version {version} after {self.model.newest}")

    def _weights(self, how: str) -> Any:
        module = self.given if self.given is not None else self.collector._policy
        clone = copy.deepcopy(module)
        return clone.state_dict() if how == "state_dict" else clone

    def do_pause(self) -> None:
        with self.collector.pause():
            self.collector.stats()

    def do_len(self) -> None:
        total, whole = self.case.get("total_frames"), self.case.get("trajs_per_batch")
        try:
            length = len(self.collector)
        except TypeError:
            demand(total == -1 or whole is not None, "no length, though it ends")
        else:
            demand(length == -(-total // self.collector.frames_per_batch), f"length {length}")

    def do_drop(self) -> None:
        self._check_kept()
        self.kept = self.kept[len(self.kept) // 2 :]

    def do_scribble(self) -> None:
        """Write into a delivered batch, which is ours."""
        if self.kept:
            batch, _ = self.kept.pop()
            batch.apply_(lambda value: value.zero_())
            self.kept.append((batch, checksum(batch)))

    def do_kill(self, worker: int, seconds: float) -> None:
        """Kill a worker, so many seconds later: in the middle of something."""
        workers = self.collector.stats()["per_worker"]
        pid = workers[worker % len(workers)]["pid"]
        self.model.exact = self.model.exact and self.case.get("trajs_per_batch") is None
        if pid is not None:
            self.timers.append(threading.Timer(seconds, _kill, (pid,)))
            self.timers[-1].start()

    def do_resume(self, where: str, ahead: int, saved: bool) -> None:
        """Go on from a state: in the same collector or in a fresh one, begun or not."""
        state, model = self.collector.state_dict(), self.model.copy()
        value = self._value()
        if saved:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        expected = self._ahead(ahead)
        if where != "same":
            self._replace(begun=where == "begun")
        self.collector.load_state_dict(state)
        demand(self._value() == value or self.given is not None, "the policy has other weights")
        if self.given is not None and self.learner is not None:
            self.learner.become(value)
        self.model, self.ended = model, False
        self._compare(expected, self._ahead(ahead))

    def _ahead(self, count: int) -> list[Any]:
        batches = [self.next() for _ in range(count)]
        return [batch.clone() for batch in batches if batch is not None]

    def _replace(self, begun: bool) -> None:
        self.collector.shutdown()
        self.collector, policy = built(self.case)
        self._use(policy)
        if begun:
            self.model, self.ended = Model(promises_of(self.case)), False
            self.next()

    def _compare(self, expected: list[Any], got: list[Any]) -> None:
        if self.case.inline or (self.case.sync and not self.case.get("preemptive_threshold")):
            demand(len(expected) == len(got), f"{len(got)} batches, {len(expected)} expected")
            for number, (one, other) in enumerate(zip(expected, got, strict=True)):
                found = difference(one, other)
                demand(not found, f"resumed batch {number} differs in {found}")
        elif not (self.case.get("compact_obs") or self.case.get("update_at_each_batch")):
            form, unsure = self.case.envs["form"], [("collector", "policy_version"), "noise"]
            ours, theirs = (by_env(form, batches, unsure) for batches in (expected, got))
            for stamp in set(ours) & set(theirs):
                pairs = zip(ours[stamp], theirs[stamp], strict=False)
                demand(all(a == b for a, b in pairs), f"resumed rows of env {stamp} differ")

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what holds at the end."""
        for timer in self.timers:
            timer.join()
        self._check_kept()
        self.collector.shutdown()
        self.collector.shutdown()
        try:
            self.collector.next()
        except ClosedError:
            return
        raise Wrong("next() after shutdown() raises nothing")

    def _check_kept(self) -> None:
        for number, (batch, told) in enumerate(self.kept):
            demand(checksum(batch) == told, f"batch {number} changed after it was delivered")
        for number, (part, told) in enumerate(self.held):
            demand(_bytes_of(part) == told, f"part {number} changed after its batch was delivered")


def patience() -> float:
    """Return the seconds that a case may take, more where many processes share the cores."""
    return _PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run(case: Case, seen: Counter[str], seconds: float | None = None) -> str:
    """Run a case; return the sentence with which it is refused, or nothing.

    Any other exception than a `UsageError` of the constructor is a fault.
    """
    with warnings.catch_warnings(), deadline(seconds or patience()):
        warnings.simplefilter("ignore")
        try:
            running = Run(case, seen)
        except UsageError as error:
            seen[f"refused: {sentence_of(error)}"] += 1
            return str(error)
        with running:
            for op in case.ops:
                running.do(op)
            running.finish()
    seen.update(f"option {name}" for name in case.options)
    return ""


def sentence_of(error: BaseException) -> str:
    """Return a message without what differs from case to case."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", str(error))[:160]
