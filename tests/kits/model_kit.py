"""A slow model of what collectors promise, written from the documentation, not from the code.

It follows every env, every trajectory and every version from batch to batch, row by row. The envs
are those of `telling_kit`, whose observations tell their whole history.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from telling_kit import (
    ACTIONS,
    COUNTING,
    FLAGS,
    action_for,
    actions_of,
    columns_of,
    ending_of,
    first_hash,
    next_hash,
    read,
    reward_of,
    told_by,
)
from tensordict import TensorDictBase

from swath.seeding import env_seed

__all__ = ["Model", "Promises", "Wrong", "by_env", "checksum", "difference"]

MASK = ("collector", "mask")
FINAL = ("collector", "final")  # of a compact batch: where padding points nowhere, with -1


class Wrong(AssertionError):
    """A promise that was not kept."""


def demand(kept: bool, what: str) -> None:
    if not kept:
        raise Wrong(what)


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What was asked for, as far as rows depend on it."""

    form: str
    action: str
    longest: int
    policy: str
    num_envs: int
    limit: int | None = None
    """Longest trajectory, by the option or by the env's own limit."""
    inline: bool = True
    seed: int | None = None
    random: int = 0
    cuts: bool = False
    """Each batch begins new episodes."""
    marks: bool = False
    """The last step of each batch is marked as truncated."""
    renews: bool = True
    """An env that ended is reset."""
    whole: int | None = None
    all_whole: bool = False
    """All trajectories that are complete after a rollout come at once, instead of `whole`."""
    padded: bool = False
    split: bool = False
    mixes: bool = False
    """A lane of a batch may hold several envs, one after the other."""
    strict: bool = False
    """Batches are made by the newest version."""
    max_lag: int | None = None
    total: int = -1
    restarts: bool = False
    info: bool = False
    shared: bool = True
    """Policy and learner are one object."""
    counted: bool = False
    """Batches say which step of its trajectory a frame is."""
    skips: bool = False
    """A reset may take a row that is no frame, and the policy is asked there, too."""
    lead: tuple[int, ...] | None = None
    """The batch dimensions before time, where that is plain."""
    flags: str = "root"
    """Where the env has flags: at the root, for its agents only, or both."""


class Row(NamedTuple):
    """One frame of a batch."""

    lane: int
    t: int
    stamp: int
    episode: int
    step: int
    hash: int
    there: list[int]
    action: tuple[float, ...]
    reward: float
    flags: tuple[bool, bool, bool]
    earlier: bool
    id: int
    version: int
    random: bool
    extras: dict[str, Any]

    def __str__(self) -> str:
        """Return where it is."""
        return f"env {self.stamp} episode {self.episode} step {self.step} id {self.id}"


@dataclass
class Place:
    """Where an env is."""

    episode: int
    step: int
    hash: int
    id: int
    open: bool
    """The episode goes on."""
    jumps: bool = False
    """It may begin a new episode, though the last one has not ended."""
    must: bool = False
    """It has to."""
    gained: float | None = 0.0
    """The sum of the rewards of the episode so far; None if not all of them are known."""
    calls: int = 0
    """How often the policy had been asked for this env, as it counts that itself."""
    forgets: bool = False
    """The policy may have begun to count anew."""
    failures: int = 0
    """How many failures there had been; each may have cost a row that the policy was asked for."""


@dataclass
class Model:
    """What is known of a collection by what was delivered."""

    promises: Promises
    published: dict[int, int] = field(default_factory=lambda: {0: 1})
    newest: int = 0
    plain: bool = True
    """Weights were published to all, and once per batch at most."""
    frames: int = 0
    random_left: int = 0
    places: dict[int, Place] = field(default_factory=dict)
    owners: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    ids: dict[tuple[int, int], int] = field(default_factory=dict)
    life: int = 0
    stamps: set[int] | None = None
    trails: dict[int, dict[int, dict[int, Row]]] = field(default_factory=dict)
    """The steps of each episode of each env; whole trajectories come by their ends, others in
    parts: what `rollout()` gives may be later than what `partial()` gives then."""
    keys: dict[str, set[Any]] = field(default_factory=dict)
    resets: bool = False
    exact: bool = True
    """Nothing that was counted was thrown away."""
    lanes: dict[int, int] = field(default_factory=dict)
    """The stamp of the env in each lane, where that is plain."""
    failures: int = 0
    ended: Counter[tuple[float, int]] = field(default_factory=Counter)
    """Return and length of the episodes that have ended in what was delivered."""
    told: Counter[tuple[float, int]] = field(default_factory=Counter)
    """The same of those that the collector has told of."""

    def __post_init__(self) -> None:
        """Begin."""
        self.random_left = self.promises.random
        if self.promises.seed is not None:
            self._expect_stamps(self.promises.seed)

    def copy(self) -> Model:
        return copy.deepcopy(self)

    # -- what the user does ---------------------------------------------------------------------

    def note_version(self, version: int, value: int) -> None:
        """Take note of versions that were published since."""
        demand(version >= self.newest, f"the version fell from {self.newest} to {version}")
        for number in range(self.newest + 1, version + 1):
            self.published[number] = value
        self.newest = version

    def note_reset(self, lanes: Iterable[int] | None = None, forgets: bool = True) -> None:
        """Take note that the envs of these lanes begin new episodes; of all, by default."""
        self.resets = True
        every = lanes is None or not self.lanes
        cut = self.places if every else {self.lanes[lane] for lane in lanes or ()}
        for place in (self.places[stamp] for stamp in cut if stamp in self.places):
            place.jumps = True
            place.must = self.promises.inline and (lanes is None or not every)
            place.forgets = place.forgets or forgets
        if self.promises.whole is not None:
            self.exact = False  # open trajectories were thrown away

    def note_failure(self) -> None:
        """Take note that a rollout was broken off, of which the whole steps were delivered."""
        self.note_reset(forgets=False)
        self.failures += 1

    def note_told(self, episodes: dict[str, list[Any]]) -> None:
        """Check the episodes that the collector tells of against those that were delivered."""
        self.told.update(zip(episodes["return"], episodes["length"], strict=True))
        missing = self.ended - self.told
        demand(not missing or not self.exact, f"episodes that nobody tells of: {missing}")
        if self.promises.inline and self.promises.whole is None and self.exact:
            more = self.told - self.ended
            demand(not more, f"episodes that never were: {more}")

    def note_seed(self, seed: int) -> None:
        self.note_reset()
        self.places.clear(), self.ids.clear(), self.lanes.clear()
        self.life += 1
        self._expect_stamps(seed)
        self.exact = self.exact and self.promises.inline

    def _expect_stamps(self, seed: int) -> None:
        own = self.promises.form != "teams"  # TorchRL's envs make the others' seeds of the first
        fixed = (
            own and not self.promises.restarts and (self.promises.whole is None or not self.life)
        )
        many = range(self.promises.num_envs)
        self.stamps = {env_seed(seed, i) for i in many} if fixed else None

    # -- what is delivered ----------------------------------------------------------------------

    def take(self, batch: TensorDictBase, source: str = "next") -> int:
        """Check a batch, and return its frames."""
        rows = self._rows(batch)
        self._check_form(batch, rows, source)
        if self.promises.lead is not None and source != "partial":
            self.lanes.update((row.lane, row.stamp) for row in rows)
        if source != "partial" or self.promises.whole is None:
            self._check_lanes(rows)
        last = {row.stamp: (row.episode, row.step) for row in sorted(rows, key=_time)}
        for row in rows:
            self._check_row(row)
            self._check_end(row, last[row.stamp] == (row.episode, row.step), source)
            self._check_choice(row)
        for row in sorted(rows, key=_time):
            if self.promises.whole is None:
                self._follow(row, source)
            else:
                self._follow_trail(row, source)
        self._check_random(rows, source)
        if source == "next":
            self._check_lags(rows)
            self._check_whole(rows)
        self.frames += len(rows)
        return len(rows)

    def _rows(self, batch: TensorDictBase) -> list[Row]:
        p, steps = self.promises, batch.shape[-1]
        here, there = read(p.form, batch), read(p.form, batch, "next")
        actions = actions_of(p.action, batch)
        keys = set(batch.keys(True, True))
        given = [columns_of(batch, *key) for key in _rewards(p.form)]
        reward = sum(column.sum(tuple(range(1, column.ndim))) for column in given).tolist()
        flags = [columns_of(batch, "next", name)[:, 0].tolist() for name in FLAGS]
        earlier = np.any([columns_of(batch, name)[:, 0] for name in FLAGS], 0).tolist()
        ids = columns_of(batch, "collector", "traj_ids").tolist()
        versions = columns_of(batch, "collector", "policy_version").tolist()
        marked = ("collector", "random") in keys
        demand(marked == (p.random > 0), f'("collector", "random") is there: {marked}')
        random = columns_of(batch, "collector", "random").tolist() if marked else [False] * len(ids)
        named = {name: columns_of(batch, *name) for name in _extras(keys)}
        valid = columns_of(batch, *MASK) if MASK in keys else np.ones(len(ids), bool)
        return [
            Row(
                n // steps,
                n % steps,
                *here[n],
                there[n],
                actions[n],
                reward[n],
                (flags[0][n], flags[1][n], flags[2][n]),
                earlier[n],
                ids[n],
                versions[n],
                random[n],
                {_named(name): v[n] for name, v in named.items()},
            )
            for n in np.flatnonzero(valid).tolist()
        ]

    def _check_form(self, batch: TensorDictBase, rows: list[Row], source: str) -> None:
        keys = set(batch.keys(True, True))
        told = keys - {MASK} if source == "partial" else keys  # a step may be there for some envs
        before = self.keys.setdefault(source, told)
        demand(before == told, f"keys differ: {sorted(before ^ told, key=str)}")
        rewards = [batch[key].dtype for key in _rewards(self.promises.form)]
        demand(set(rewards) == {torch.float32}, "a reward is not float32")
        self._check_lead(batch, source)
        for name in FLAGS:
            both = batch[name], batch["next", name]
            demand(all(one.dtype == torch.bool for one in both), f"{name} is not bool")
            demand(all(one.shape == (*batch.shape, 1) for one in both), f"shape of {name}")
        demand(batch.names[-1] == "time", f"the dimensions are called {batch.names}")
        padded = source == "next" and (self.promises.split or self.promises.padded)
        if padded and MASK in keys:
            mask = batch[MASK]
            for key, value in batch.items(True, True):
                blank = value[~mask] + 1 if key == FINAL else value[~mask]
                demand(not blank.any(), f"padding of {key} is not zero")
            demand(bool(mask.any(-1).all()) or not rows, "a trajectory without frames")

    def _check_lead(self, batch: TensorDictBase, source: str) -> None:
        """Check the batch dimensions, and what is there for each agent."""
        p = self.promises
        if p.lead is not None and source != "partial":
            demand(batch.shape[:-1] == p.lead, f"the batch size is {batch.shape}, not {p.lead}")
        if p.form != "teams":
            return
        team = (*batch.shape, 2)
        demand(batch["next", "agents"].batch_size == team, "batch size of the agents")
        valid = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool))
        for name in FLAGS:
            there = ("agents", name) in batch.keys(True)
            demand(there == (p.flags != "root"), f"agents have {name}: {there}")
            for below in ((), ("next",)) if there else ():
                own, whole = batch[(*below, "agents", name)], batch[(*below, name)]
                alike = own == whole[..., None, :]
                demand(bool(alike[valid].all()), f"{below} {name}: the agents' differ")

    def _check_lanes(self, rows: list[Row]) -> None:
        for a, b in itertools.pairwise(rows):
            if a.lane == b.lane and (a.stamp == b.stamp or not self.promises.mixes):
                ordered = a.stamp == b.stamp and _time(a) < _time(b)
                demand(ordered, f"{b} is after {a} in one lane")

    def _check_row(self, row: Row) -> None:
        hashed = next_hash(row.hash, row.action)
        there = [row.stamp, row.episode, row.step + 1, hashed]
        demand(row.there == there, f"{row}: next is {row.there}, {there} was expected")
        demand(row.reward == reward_of(hashed), f"{row}: reward {row.reward}")
        demand(not row.earlier, f"{row}: a flag at the root")
        if row.step == 0:
            demand(row.hash == first_hash(row.stamp, row.episode), f"{row}: hash at the start")
        if self.promises.info:
            info = float(row.extras["next", "info", "hash"])
            demand(info == hashed, f"{row}: info is {info}, {hashed} was expected")
        counts = row.extras.get("step_count"), row.extras.get(("next", "step_count"))
        demand((counts[0] is not None) == self.promises.counted, f"{row}: step_count {counts}")
        if self.promises.counted:
            right = (counts[0] == row.step).all() and (counts[1] == row.step + 1).all()
            demand(bool(right), f"{row}: step_count is {counts}")
        if self.stamps is not None:
            demand(row.stamp in self.stamps, f"{row}: the env has another seed than it should")

    def _check_end(self, row: Row, last: bool, source: str) -> None:
        p = self.promises
        length, terminated, truncated = ending_of(row.stamp, row.episode, p.longest)
        ends, over = row.step + 1 == length, row.step + 1 == p.limit
        wanted = (ends and terminated, (ends and truncated) or over)
        cut = not ends and not over and (p.cuts or p.marks)
        if p.whole is None and cut and last and source != "partial":
            wanted = (False, True)
        elif cut and (p.whole is not None or source == "partial") and row.flags[1]:
            wanted = (False, True)  # where a rollout ended is not to be seen here
        wanted = (*wanted, any(wanted))
        demand(row.flags == wanted, f"{row}: terminated, truncated, done are {row.flags}, {wanted}")
        beyond = p.limit is not None and row.step >= p.limit
        demand(row.step < length and not beyond, f"{row}: beyond the end")

    def _check_choice(self, row: Row) -> None:
        """Check that the version that is told chose the action."""
        p = self.promises
        demand(row.version in self.published, f"{row}: version {row.version} was never published")
        value = self.published[row.version]
        if p.policy not in ("none", "function"):
            told = float(row.extras["told"])
            demand(told == value, f"{row}: told {told}, version {row.version} tells {value}")
        states = row.extras.get("policy_state"), row.extras.get(("next", "policy_state"))
        if states[0] is not None:
            counted = (row.step, row.step + 1)
            demand(states == counted, f"{row}: states are {states}, {counted} was expected")
        number = {"function": 3 * row.step + 1}.get(
            p.policy, value + row.step * (states[0] is not None)
        )
        if not row.random and p.policy != "none":
            action = _action(p.action, number)
            demand(row.action == action, f"{row}: action {row.action}, {action} was expected")
        if "log_prob" in row.extras and (not row.random or p.action == "discrete"):
            wanted = -np.log(10_007) if row.random else -value
            close = abs(float(row.extras["log_prob"]) - wanted) < 1e-4
            demand(close, f"{row}: log_prob {row.extras['log_prob']}, {wanted} was expected")

    # -- from row to row ------------------------------------------------------------------------

    def _follow(self, row: Row, source: str) -> None:
        place, p = self.places.get(row.stamp), self.promises
        ahead = not p.inline  # what was collected before comes first
        # An env that was not seen yet may have had frames on the way when reset() was called.
        jumps = ahead and (self.resets if place is None else place.jumps)
        if place is None:
            held = source == "partial" or self.life > 0
            demand(row.step == 0 or held, f"{row}: the first frame of this env")
        elif place.must and (row.step or row.episode <= place.episode):
            raise Wrong(f"{row}: it was to begin anew after episode {place.episode}")
        elif place.open and (row.episode, row.step) == (place.episode, place.step + 1):
            demand(row.hash == place.hash, f"{row}: the history is another one")
            demand(row.id == place.id, f"{row}: id {place.id} until now")
        elif place.open or row.step or row.episode != place.episode + 1 or not p.renews:
            self._check_jump(row, place)
            jumps = False
        self._check_id(row)
        done = row.flags[2] and (p.cuts or not p.marks or self._really_ends(row))
        calls, forgets = self._check_calls(row, place, source)
        gained = self._gained(row, place)
        if done and gained is not None:
            self.ended[gained, row.step + 1] += 1
        self.places[row.stamp] = Place(
            row.episode,
            row.step,
            row.there[3],
            row.id,
            not done,
            jumps,
            gained=gained,
            calls=calls,
            forgets=forgets,
            failures=self.failures,
        )

    def _gained(self, row: Row, place: Place | None) -> float | None:
        if row.step == 0:
            return row.reward
        known = place is not None and place.episode == row.episode and place.gained is not None
        return place.gained + row.reward if known else None

    def _check_calls(self, row: Row, place: Place | None, source: str) -> tuple[int, bool]:
        """Check that the policy has counted on since the last frame; return that, and whether it
        may still begin anew."""
        if self.promises.policy not in COUNTING:
            return 0, False
        calls = int(row.extras["count"])
        p, ahead = self.promises, not self.promises.inline
        lost = self.failures - (0 if place is None else place.failures)
        lost += p.skips and row.step == 0 and place is not None
        wanted = {1 + n for n in range(lost + 1)}
        forgets = place is not None and place.forgets
        if place is not None and (not forgets or ahead):
            later = {place.calls + 1 + n for n in range(lost + 1)}
            wanted = wanted | later if forgets else later
        known = place is not None or not (source == "partial" or self.life or self.resets)
        demand(calls in wanted or not known, f"{row}: call {calls} of the policy, not {wanted}")
        return calls, forgets and ahead and calls > 1

    def _follow_trail(self, row: Row, source: str) -> None:
        """Check that a frame comes once, fits those beside it, and that no episode is left out."""
        p, trails = self.promises, self.trails.setdefault(row.stamp, {})
        jumps = source == "rollout" or self.resets or p.cuts or p.restarts
        follows = row.episode in (0, *trails) or row.episode - 1 in trails
        demand(follows or jumps, f"{row}: an episode is missing")
        steps = trails.setdefault(row.episode, {})
        demand(row.step not in steps, f"{row}: it comes twice")
        before, after = steps.get(row.step - 1), steps.get(row.step + 1)
        demand(before is None or before.there[3] == row.hash, f"{row}: the history is another one")
        demand(after is None or after.hash == row.there[3], f"{row}: the history is another one")
        if p.policy in COUNTING and before is not None:
            calls = int(before.extras["count"]), int(row.extras["count"])
            demand(calls[1] == calls[0] + 1, f"{row}: calls {calls} of the policy")
        steps[row.step] = row
        self._check_id(row)

    def _check_jump(self, row: Row, place: Place) -> None:
        """Check that an env may have left its episode, or some, before the end."""
        after = f"{row}: after episode {place.episode} step {place.step}"
        demand(row.step == 0 and row.episode > place.episode, f"{after}: frames missing or twice")
        demand(not place.open or place.jumps, f"{after}: the episode was not over")
        demand(self.promises.renews or place.jumps, f"{after}: it was to stay ended")
        demand(place.jumps or self.promises.cuts, f"{after}: an episode is missing")

    def _really_ends(self, row: Row) -> bool:
        length = ending_of(row.stamp, row.episode, self.promises.longest)[0]
        return row.step + 1 in (length, self.promises.limit)

    def _check_id(self, row: Row) -> None:
        owner = (row.stamp, row.episode, self.life)
        if row.id in self.owners and self.promises.whole is not None:
            owner = (*owner[:2], self.owners[row.id][2])  # it may have been held from before
        demand(self.owners.setdefault(row.id, owner) == owner, f"{row}: id of another trajectory")
        known = self.ids.setdefault((row.stamp, row.episode), row.id)
        demand(known == row.id, f"{row}: the episode had id {known} before")

    def _check_random(self, rows: list[Row], source: str) -> None:
        p = self.promises
        if p.policy == "none":
            demand(all(row.random for row in rows) or not p.random, "a random frame not marked")
            return
        ordered = p.inline and p.whole is None and not (p.split and source == "next")
        for row in sorted(rows, key=lambda row: (row.t, row.lane)) if ordered else ():
            demand(row.random == (self.random_left > 0), f"{row}: random is {row.random}")
            self.random_left -= row.random
        if not ordered:
            self.random_left -= sum(row.random for row in rows)
        demand(self.random_left >= 0, "more random frames than asked for")

    def _check_lags(self, rows: list[Row]) -> None:
        p = self.promises
        oldest = min((row.version for row in rows), default=self.newest)
        if p.strict and self.plain:
            demand(oldest == self.newest, f"version {oldest} acted, the newest is {self.newest}")
        if p.max_lag is not None and self.plain:
            lag = self.newest - oldest
            demand(lag <= p.max_lag, f"a batch is {lag} versions old; {p.max_lag} is the most")

    def _check_whole(self, rows: list[Row]) -> None:
        if self.promises.whole is None:
            return
        by_id: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_id[row.id].append(row)
        many = len(by_id) if self.promises.all_whole else self.promises.whole
        demand(len(by_id) == many, f"{len(by_id)} whole trajectories; {many} were asked for")
        for traj_id, parts in by_id.items():
            steps = [row.step for row in parts]
            demand(steps == list(range(len(steps))), f"id {traj_id}: not whole: {steps}")
            ends = [row.flags[2] for row in parts]
            demand(ends == [False] * (len(ends) - 1) + [True], f"id {traj_id}: ends at {ends}")
            self.ended[sum(row.reward for row in parts), len(parts)] += 1

    # -- counts ---------------------------------------------------------------------------------

    def check_counts(self, stats: dict[str, Any], version: int) -> None:
        demand(stats["policy_version"] == version, f"version in stats: {stats['policy_version']}")
        if self.promises.whole is None and self.exact:
            counted = stats["frames"]
            demand(counted == self.frames, f"{counted} frames counted, {self.frames} delivered")
        demand(stats["frames"] >= self.frames, f"{self.frames} delivered of {stats['frames']}")

    def check_total(self, counted: int, all_ended: bool) -> None:
        """Check how many frames there are when the collector has come to its end."""
        total, most = self.promises.total, self.promises.num_envs
        demand(counted < total + most or total == -1, f"{counted} frames for {total}")
        enough = counted >= total and total != -1
        demand(enough or all_ended, f"the end after {counted} of {total} frames")


def _time(row: Row) -> tuple[int, int, int]:
    return row.stamp, row.episode, row.step


def _extras(keys: Iterable[Any]) -> list[tuple[str, ...]]:
    known = {("told",), ("log_prob",), ("noise",), ("policy_state",), ("next", "policy_state")}
    known |= {("count",), ("memory", "count"), ("next", "info", "hash")}
    known |= {(*below, "step_count") for below in ((), ("next",), ("agents",), ("next", "agents"))}
    named = {key if isinstance(key, tuple) else (key,) for key in keys}
    return sorted(named & known)


def _named(key: tuple[str, ...]) -> Any:
    """Return what the model calls an entry: by its last name, and below `next` with that."""
    if "info" in key:
        return key
    return ("next", key[-1]) if key[0] == "next" else key[-1]


def _rewards(form: str) -> list[tuple[str, ...]]:
    """Return the keys of all rewards."""
    if form == "teams":
        return [("next", "bonus"), ("next", "agents", "reward")]
    return [("next", "reward")]


_actions: dict[tuple[str, int], tuple[float, ...]] = {}


def _action(kind: str, number: int) -> tuple[float, ...]:
    if (kind, number) not in _actions:
        assert kind in ACTIONS
        action = action_for(kind, torch.tensor(number))
        _actions[kind, number] = told_by(action)
    return _actions[kind, number]


# -- comparing ------------------------------------------------------------------------------------


def checksum(batch: TensorDictBase) -> int:
    """Return a number that changes with any bit of a batch."""
    sums = [
        f"{key} {value.shape} {zlib.crc32(value.contiguous().numpy().tobytes())}"
        for key, value in sorted(batch.items(True, True), key=lambda pair: str(pair[0]))
    ]
    return zlib.crc32("\n".join(sums).encode())


def difference(one: TensorDictBase, other: TensorDictBase) -> str:
    """Return the first key in which two batches differ; nothing if they are the same."""
    if one.batch_size != other.batch_size:
        return f"batch sizes {one.batch_size} and {other.batch_size}"
    ours, theirs = (dict(batch.items(True, True)) for batch in (one, other))
    if set(ours) != set(theirs):
        return f"keys {sorted(set(ours) ^ set(theirs), key=str)}"
    for key, value in ours.items():
        if not torch.equal(value, theirs[key]):
            return f"{key}"
    return ""


def by_env(
    form: str, batches: Iterable[TensorDictBase], without: Iterable[Any] = ()
) -> dict[int, list[Any]]:
    """Return all rows of each env, in order, to compare collections that are arranged otherwise."""
    found: dict[int, list[Any]] = defaultdict(list)
    left_out = {MASK, ("collector", "worker"), *without}
    for batch in batches:
        here, keys = read(form, batch), sorted(set(batch.keys(True, True)) - left_out, key=str)
        columns = {str(k): columns_of(batch, *([k] if isinstance(k, str) else k)) for k in keys}
        mask = columns_of(batch, *MASK) if MASK in batch.keys(True) else np.ones(len(here), bool)
        rows = sorted(np.flatnonzero(mask).tolist(), key=lambda n: here[n])
        for n in rows:
            found[here[n][0]].append({key: value[n].tobytes() for key, value in columns.items()})
    return found
