"""Random collections: what to collect and what to do on the way, run against `model_kit`.

A case is plain data, drawn from its number alone, so that it can be run again and made smaller.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pprint
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from model_kit import MASK, Model, Promises, Wrong, by_env, checksum, demand, difference
from telling_kit import ACTIONS, FORMS, HistoryEnv, learner_of, policy_of

from swath.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.utils import restore_next
from swath.envs import GymEnv, ParallelEnv, SerialEnv
from swath.errors import ClosedError, UsageError

__all__ = ["KNOWN", "Case", "Findings", "Run", "cause_of", "explore", "run", "smaller"]

SECONDS = float(os.environ.get("SWATH_FUZZ_SECONDS", "0"))
"""For how long each random tester goes on; 0 for the few seconds of the normal suite."""
_PATIENCE = 40.0
"""Seconds after which a case is said to hang; on a loaded machine a worker takes its time."""


@dataclass(frozen=True)
class Case:
    """One collection."""

    owner: str
    """Class of the collector."""
    envs: dict[str, Any]
    policy: str
    options: dict[str, Any]
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    number: int = -1

    @property
    def inline(self) -> bool:
        return self.owner == "Collector"

    @property
    def counts(self) -> list[int]:
        """How many envs each worker has."""
        return self.envs["counts"]

    @property
    def sync(self) -> bool:
        remote = self.options.get("sync", False)
        return self.owner in ("MultiSyncCollector", "DistributedSyncCollector") or remote

    def get(self, name: str) -> Any:
        return self.options.get(name, _DEFAULTS.get(name))

    def __str__(self) -> str:
        """Return it as an expression."""
        return pprint.pformat(vars(self), width=110, sort_dicts=False)


_DEFAULTS = {"reset_when_done": True, "total_frames": -1, "cat_results": "stack"}


def _has(case: Case, *ops: str) -> bool:
    return any(op[0] in ops for op in case.ops)


def _limited(case: Case) -> bool:
    return bool(case.get("max_frames_per_traj") or case.envs.get("time_limit"))


def _random_is_uneven(case: Case) -> bool:
    few = 0 < (case.get("init_random_frames") or 0) < sum(case.counts)
    restarts = case.get("on_worker_failure") == "restart" and case.get("init_random_frames")
    return not case.inline and bool(few or restarts)


KNOWN: dict[str, Callable[[Case], bool]] = {
    "ParallelEnv: a state that is loaded into a collector that has collected": lambda c: (
        c.envs["kind"] == "parallel" and _has(c, "resume")
    ),
    "ParallelEnv: an env stepped twice, with limits": lambda c: (
        c.envs["kind"] == "parallel" and _limited(c)
    ),
    "rollout() beside trajs_per_batch": lambda c: (
        bool(c.get("trajs_per_batch")) and _has(c, "rollout")
    ),
    "set_truncated beside trajs_per_batch": lambda c: (
        bool(c.get("trajs_per_batch") and c.get("set_truncated"))
    ),
    "state of an unseeded collector before its first random action": lambda c: (
        c.get("seed") is None
        and (c.policy == "none" or bool(c.get("init_random_frames")))
        and _has(c, "resume")
    ),
    "init_random_frames less than envs, or beside restarts": _random_is_uneven,
    "reset_when_done=False with a limit, in workers": lambda c: (
        not c.inline and not c.get("reset_when_done") and _limited(c)
    ),
    "reset_when_done=False never ends": lambda c: c.sync and not c.get("reset_when_done"),
    "restore_next() of a split batch does not leave its padding as zeros": lambda c: (
        bool(c.get("split_trajs") and c.get("compact_obs"))
    ),
    "workers with a lone env beside workers with several": lambda c: (
        c.sync and len({count == 1 for count in c.counts}) > 1
    ),
}
"""Faults that are known and not mended yet, as the cases that may show them. Empty it with them."""


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


_MODES = {"next": "NEXT_STEP", "same": "SAME_STEP", "disabled": "DISABLED"}


def envs_of(case: Case) -> Any:
    """Return what the collector of a case takes as envs."""
    envs, kind, counts = case.envs, case.envs["kind"], case.counts
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

    def extend(self, batch: Any) -> None:
        self.batches.append(batch)


def marked(batch: Any) -> Any:
    """Mark a batch: a postproc."""
    return batch.set("seen", torch.ones(batch.shape))


def nothing(*_: Any) -> None:
    """Do nothing: a hook."""


_STANDINS = {"kept": Kept, "marked": lambda: marked, "nothing": lambda: nothing}


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
    made = functools.partial(
        policy_of, case.policy, case.envs["action"], case.envs["form"]
    )
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
    ahead = get("collect_ahead") or get("preemptive_threshold") or get("replay_buffer")
    return Promises(
        form=envs["form"],
        action=envs["action"],
        longest=(get("create_env_kwargs") or envs)["longest"],
        policy=case.policy,
        num_envs=sum(case.counts),
        limit=min(limits, default=None),
        inline=case.inline,
        seed=get("seed"),
        random=get("init_random_frames") or 0,
        cuts=bool(get("reset_at_each_iter")),
        marks=bool(get("set_truncated")),
        renews=bool(get("reset_when_done")),
        whole=whole,
        padded=whole is not None and get("traj_format") != "cat",
        split=bool(get("split_trajs")),
        mixes=get("cat_results") == -1
        or (get("cat_results") == 0 and lone)
        or get("traj_format") == "cat",
        strict=(case.inline or case.sync) and not ahead and whole is None,
        max_lag=get("max_lag") if get("update_at_each_batch") else None,
        total=get("total_frames"),
        restarts=get("on_worker_failure") == "restart",
        info=bool(envs.get("info")),
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


class Run:
    """A case under way."""

    def __init__(self, case: Case, seen: Counter[str]) -> None:
        self.case, self.seen, self.ended = case, seen, False
        self.model = Model(promises_of(case))
        self.kept: list[tuple[Any, int]] = []
        self.collector, policy = built(case)
        self._use(policy)

    def _use(self, policy: Any) -> None:
        self.learner = learner_of(policy)
        self.given = policy if "policy_factory" in self.case.options else None
        self.buffer = self.collector.options.replay_buffer

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.shutdown()

    # -- batches --------------------------------------------------------------------------------

    def taken(self, batch: Any, source: str = "next") -> Any:
        """Check a batch and keep it."""
        if self.buffer is not None and source == "next":
            demand(batch is None, "a batch was delivered beside the replay buffer")
            batch = self.buffer.batches.pop()
        if "seen" in batch.keys() or (self.case.get("postproc") and source == "next"):
            demand(bool((batch["seen"] == 1).all()), "postproc was not called")
            batch = batch.exclude("seen")
        self.model.note_version(self.collector.policy_version, self._value())
        whole = batch
        if self.case.get("compact_obs"):
            demand(("next", "observation") not in batch.keys(True), "next observations are there")
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
            for _ in self.collector:
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
            self.seen[f"refused {name}: {_sentence(error)}"] += 1
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

    def do_partial(self) -> None:
        batch = self.collector.partial()
        if batch is not None:
            demand(self.case.get("trajs_per_batch") is not None, "partial() has frames")
            self.taken(batch, "partial")

    def do_reset(self) -> None:
        self.collector.reset()
        self.model.note_reset()

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

    def do_kill(self, worker: int) -> None:
        workers = self.collector.stats()["workers"]
        pid = workers[worker % len(workers)]["pid"]
        self.model.exact = self.model.exact and self.case.get("trajs_per_batch") is None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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
        elif not self.case.get("compact_obs"):
            form, unsure = self.case.envs["form"], [("collector", "policy_version"), "noise"]
            ours, theirs = (by_env(form, batches, unsure) for batches in (expected, got))
            for stamp in set(ours) & set(theirs):
                pairs = zip(ours[stamp], theirs[stamp], strict=False)
                demand(all(a == b for a, b in pairs), f"resumed rows of env {stamp} differ")

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what holds at the end."""
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


def run(case: Case, seen: Counter[str], patience: float = _PATIENCE) -> str:
    """Run a case; return the sentence with which it is refused, or nothing.

    Any other exception than a `UsageError` of the constructor is a fault.
    """
    with warnings.catch_warnings(), deadline(patience):
        warnings.simplefilter("ignore")
        try:
            running = Run(case, seen)
        except UsageError as error:
            seen[f"refused: {_sentence(error)}"] += 1
            return str(error)
        with running:
            for op in case.ops:
                running.do(op)
            running.finish()
    seen.update(f"option {name}" for name in case.options)
    return ""


def _sentence(error: BaseException) -> str:
    """Return a message without what differs from case to case."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", str(error))[:160]


# -- many cases -----------------------------------------------------------------------------------


@dataclass
class Findings:
    """What a random tester found."""

    seen: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    skipped: int = 0
    seconds: float = 0.0
    faults: dict[str, list[tuple[Case, str]]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return each kind of fault, with the smallest case that shows it."""
        rate = self.cases / max(self.seconds, 1e-9)
        lines = [
            f"{self.cases} cases ({rate:.1f} per second), {self.seen['frames']} frames, "
            f"{self.skipped} left out as known, {len(self.faults)} kinds of faults"
        ]
        for cause, cases in self.faults.items():
            numbers = " ".join(str(case.number) for case, _ in cases[:10])
            lines += [f"\n{cause}\n  {len(cases)} cases; SWATH_FUZZ_SEED={numbers}", cases[0][1]]
        return "\n".join(lines)


def cause_of(error: BaseException) -> str:
    """Return what kind of fault this is."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    inner = "" if root is error else f" <- {type(root).__name__}: {_sentence(root)}"
    return f"{type(error).__name__}: {_sentence(error)}{inner}"


def failure_of(case: Case, seen: Counter[str]) -> BaseException | None:
    """Run a case and return what went wrong."""
    try:
        run(case, seen)
    except (Exception, Hangs) as error:
        return error
    return None


def smaller(case: Case, cause: str, seconds: float) -> Case:
    """Leave out operations and options one by one while the same fault shows."""
    until = time.monotonic() + seconds
    shrinks = True
    while shrinks:
        shrinks = False
        for one in _without_one(case):
            if time.monotonic() > until:
                return case
            failure = failure_of(one, Counter())
            if failure is not None and cause_of(failure)[:60] == cause[:60]:
                case, shrinks = one, True
                break
    return case


def _without_one(case: Case) -> Iterator[Case]:
    for place in reversed(range(len(case.ops))):
        yield replace(case, ops=case.ops[:place] + case.ops[place + 1 :])
    for name in set(case.options) - {"frames_per_batch", "launcher", "sync"}:
        options = {key: value for key, value in case.options.items() if key != name}
        yield replace(case, options=options)
    if case.policy != "none":
        yield replace(case, policy="none")
    plain = {"form": "numbers", "action": "discrete", "time_limit": None, "reuses": False}
    for name, value in plain.items():
        if case.envs.get(name, value) != value:
            yield replace(case, envs={**case.envs, name: value})


def explore(draw: Callable[[int], Case], seconds: float) -> Findings:
    """Run random cases for some time, or the one that SWATH_FUZZ_SEED names."""
    found, started = Findings(), time.monotonic()
    only = os.environ.get("SWATH_FUZZ_SEED")
    # The normal suite runs the same cases every time, a long run others than the last one.
    number = int(only) if only else int(time.time()) * 1000 if SECONDS else 0
    while True:
        case = draw(number)
        number += 1
        if not only and any(shows(case) for shows in KNOWN.values()):
            found.skipped += 1
        else:
            found.cases += 1
            failure = failure_of(case, found.seen)
            if failure is not None:
                _note(found, case, failure)
        found.seconds = time.monotonic() - started
        if only or found.seconds > seconds:
            return found


def _note(found: Findings, case: Case, failure: BaseException) -> None:
    cause = cause_of(failure)
    if cause not in found.faults:
        small = smaller(case, cause, min(20.0, SECONDS / 10))
        found.faults[cause] = [(case, f"{str(failure)[:1000]}\n{small}")]
    else:
        found.faults[cause].append((case, ""))


# -- drawing cases --------------------------------------------------------------------------------

_POLICIES = "none function module module noisy tensordict recurrent wrapped".split()
_SINGLE = ("maker", "object", "gymenv")
_INLINE = (*_SINGLE, *"list serial serials next same disabled stubborn parallel".split())


def _drawn_envs(r: random.Random, kinds: tuple[str, ...], workers: int) -> dict[str, Any]:
    kind = r.choice(kinds)
    count = 1 if kind in _SINGLE else r.randint(2, 5)
    counts = [count] * workers
    if workers > 1 and r.random() < 0.2:
        counts = [r.randint(1, 3) for _ in counts]
    if workers > 1 and kind == "maker" and r.random() < 0.3:
        counts = [2] * workers
    return {
        "kind": kind,
        "counts": counts,
        "form": r.choice(["numbers"] * 4 + list(FORMS)),
        "action": r.choice(["discrete"] * 4 + list(ACTIONS)),
        "longest": r.choice([1, 2, 3, 5, 7, 7]),
        "time_limit": r.choice([None, None, None, 1, 2, 4]),
        # Gymnasium's vector env keeps the last observation as it is, and resets the env then.
        "reuses": r.random() < 0.2 and kind != "same",
        "info": kind in ("gymenv", "serial", "parallel") and r.random() < 0.3,
        "processes": r.choice([None, 1, 2]),
    }


_RARE: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "total_frames": (0.4, lambda r: r.randint(1, 150)),
    "max_frames_per_traj": (0.3, lambda r: r.randint(1, 6)),
    "init_random_frames": (0.25, lambda r: r.randint(1, 60)),
    "reset_at_each_iter": (0.15, lambda r: True),
    "reset_when_done": (0.08, lambda r: False),
    "split_trajs": (0.15, lambda r: True),
    "trajs_per_batch": (0.2, lambda r: r.randint(1, 4)),
    "set_truncated": (0.12, lambda r: True),
    "compact_obs": (0.15, lambda r: True),
    "memory_order": (0.2, lambda r: "batch"),
    "env_groups": (0.08, lambda r: r.randint(1, 2)),
    "seed": (0.6, lambda r: r.randint(0, 10_000)),
    "update_at_each_batch": (0.25, lambda r: True),
    "exploration_type": (0.2, lambda r: r.choice(["deterministic", "mode", "mean"])),
    "postproc": (0.1, lambda r: "marked"),
    "pre_collect_hook": (0.1, lambda r: "nothing"),
    "post_collect_hook": (0.1, lambda r: "nothing"),
    "replay_buffer": (0.1, lambda r: "kept"),
    "policy_factory": (0.1, lambda r: "made"),
    "create_env_kwargs": (0.1, lambda r: {"longest": r.randint(1, 7)}),
    "storing_device": (0.1, lambda r: "cpu"),
    "device": (0.1, lambda r: "cpu"),
}
_RARE_OF_WORKERS: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "cat_results": (0.4, lambda r: r.choice([0, -1])),
    "preemptive_threshold": (0.2, lambda r: r.choice([0.3, 0.5, 0.9, 1.0])),
    "collect_ahead": (0.25, lambda r: True),
    "max_lag": (0.4, lambda r: r.randint(0, 3)),
    "on_worker_failure": (0.3, lambda r: "restart"),
    "worker_timeout": (0.1, lambda r: 30.0),
    "num_threads": (0.1, lambda r: 2),
    "init_fn": (0.1, lambda r: "nothing"),
}
_NOT_OF = {
    "MultiSyncCollector": {"max_lag"},
    "MultiAsyncCollector": {"cat_results", "preemptive_threshold", "collect_ahead"},
    "AsyncCollector": {"cat_results", "preemptive_threshold", "collect_ahead"},
}


def _drawn_options(r: random.Random, owner: str, envs: dict[str, Any]) -> dict[str, Any]:
    rare = {**_RARE, **({} if owner == "Collector" else _RARE_OF_WORKERS)}
    without = _NOT_OF.get(owner, set())
    if envs["kind"] not in ("maker", "object"):
        without = {*without, "create_env_kwargs"}
    number = sum(envs["counts"])
    steps = r.choice([1, 2, 3, 5, 8, 13])
    sync = owner in ("Collector", "MultiSyncCollector", "AsyncCollector")
    frames: Any = steps * number if r.random() < 0.9 else r.randint(1, 40)
    if owner == "MultiAsyncCollector":
        frames = steps * max(envs["counts"])
    if owner == "MultiSyncCollector" and r.random() < 0.1:
        frames = [r.randint(1, 8) * count for count in envs["counts"]]
    assert sync or owner
    options: dict[str, Any] = {"frames_per_batch": frames}
    for name, (chance, value) in rare.items():
        drawn = value(r)
        if r.random() < chance * 0.8 and name not in without:
            options[name] = drawn
    if "trajs_per_batch" in options and r.random() < 0.5:
        options["traj_format"] = "cat"
    if options.get("on_worker_failure") == "restart":
        options["max_restarts"] = 50
    return options


def _drawn_op(r: random.Random, case: Case) -> tuple[Any, ...]:
    names = "next next next next iterate iterate reset set_seed rollout resume partial publish"
    names += " publish pause len drop scribble"
    if case.get("on_worker_failure") == "restart":
        names += " kill kill kill"
    name = r.choice(names.split())
    workers = None if r.random() < 0.7 else r.randrange(len(case.counts))
    arguments: dict[str, tuple[Any, ...]] = {
        "next": (r.randint(1, 4),),
        "iterate": (r.randint(1, 3),),
        "set_seed": (r.randint(20_000, 10**9),),
        "resume": (r.choice(["same", "fresh", "begun"]), r.randint(1, 4), r.random() < 0.3),
        "publish": (r.choice(["own", "module", "state_dict"]), workers, r.random() < 0.3),
        "kill": (r.randrange(8),),
    }
    return (name, *arguments.get(name, ()))


def drawn(owners: tuple[str, ...], number: int) -> Case:
    """Return the case of this number."""
    r = random.Random(f"{owners} {number}")
    owner = r.choice(owners)
    if owner == "Collector":
        envs = _drawn_envs(r, _INLINE, 1)
    elif owner == "AsyncCollector":
        envs = _drawn_envs(r, ("maker", "list"), 1)
    else:
        envs = _drawn_envs(r, ("maker", "listed", "serial"), r.randint(1, 3))
    case = Case(owner, envs, r.choice(_POLICIES), _drawn_options(r, owner, envs), [], number)
    if case.policy == "none":
        case.options.pop("policy_factory", None)
    ops = [_drawn_op(r, case) for _ in range(r.randint(1, 9))]
    resumable = case.get("on_worker_failure") != "restart"
    case.ops.extend(op for op in ops if op[0] != "resume" or resumable)
    case.ops.append(("next", 2))
    return case
