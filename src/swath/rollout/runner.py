"""A runner: one group of envs, one policy, and all that is carried from rollout to rollout.

```
 carry --> row 0 of a slab --> loop: act, step, settle --> columns filled in one pass --> carry
```

Per step only what must happen then is done: next observations, ended episodes, resets. Trajectory
ids, versions, returns and lengths are worked out once per rollout, over whole columns.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import set_interaction_type

from swath.devices import OwnStream
from swath.errors import EnvError, PolicyError, SwathError, UsageError
from swath.memory import Field, Layout, Slab, SlabPool
from swath.observe import Episodes, Shares
from swath.policies import ActionSampler, Policy, State, as_policy, probe
from swath.policies.base import Act, TorchPolicy
from swath.rollout import columns, keys, loop
from swath.rollout.env import CallFailed, EnvGroup, interface_of
from swath.rollout.lanes import Lanes
from swath.rollout.plan import Filled, Plan, lend, slab_for, view
from swath.rollout.transfer import Transfer
from swath.rollout.warmup import RandomFrames
from swath.seeding import RandomState, env_seed, env_seeds
from swath.shield import Shield
from swath.tree import Key

__all__ = ["Runner", "Settle"]

Settle = Callable[[int, Sequence[int]], bool]

_NEVER = np.iinfo(np.int64).max


class Runner:
    """Makes rollouts of one group of envs with one policy.

    Args:
        group: The envs.
        policy: What the user passed as policy.
        plan: What a rollout is to be like.
        sampler: Draws random actions; made from the plan's seed if not given.
    """

    shield = Shield()
    """Lets Ctrl-C through while code of the user runs; the collector sets its own."""
    _counts: Sequence[Field] = ()
    """Where the steps of trajectories are counted, if `max_frames_per_traj` limits them."""

    def __init__(
        self, group: EnvGroup, policy: Any, plan: Plan, sampler: ActionSampler | None = None
    ) -> None:
        _check(group, plan)
        self.group, self.user_policy, self.plan = group, policy, plan
        n = group.num_envs
        self.interface = interface_of(group)
        self.devices = plan.devices.settled(group, policy)
        """Where envs, policy and batches live."""
        self._gpu = next((one for one in self.devices[:2] if one.type == "cuda"), None)
        self.stream = OwnStream(self._gpu or torch.device("cpu"))
        self.indices = range(plan.first_env, plan.first_env + n)
        first = plan.first_env if plan.first_stream is None else plan.first_stream
        self.streams = range(first, first + n)
        self.sampler = sampler or ActionSampler(
            self.interface.actions, self.streams, group.action_masks
        )
        self.random_frames = RandomFrames(self.sampler, plan.init_random_frames or 0)
        self.episodes, self.shares = Episodes(n), Shares()
        self.version = self.steps_made = self.frames_made = self.filled = 0
        self.next_traj_id = plan.first_traj_id
        self.traj_ids = np.zeros(n, np.int64)
        self.frozen, self.renewing = np.zeros(n, bool), np.zeros(n, bool)
        """Envs that stay ended; and those whose next row is no transition, but their reset."""
        self.random_state: RandomState | None = None
        self._seed: int | None = None
        self._seed_is_new = self._seeds_again = self._one_seed = False
        self.partial: Filled | None = None
        self.finished: list[tuple[float, int]] = []
        """Return and length of the episodes that ended in the last rollout."""
        # Where episodes have ended; the envs whose next one begins while those of others go on.
        self._ends, self._resets = list[tuple[int, int]](), set[int]()
        self.policy = self._adapted(policy)
        _check_states(group, self.policy)
        if plan.seed is not None:
            self.set_seed(plan.seed)
        self._limits = _limits(group, plan.max_frames_per_traj)
        self.carry: dict[Any, torch.Tensor] = {}
        self._needs_reset = True
        self._first_reset()
        self.layout = Layout(self._fields(), plan.steps, n, plan.memory_order)
        self.pool = SlabPool(lambda: self._new_slab(self.layout))
        self.transfer: Transfer | None = None
        if self._first.device != self.devices[2]:
            self.transfer = Transfer(self.layout, self._first.device, self.devices[2])
        self._lanes = Lanes(self) if plan.env_groups > 1 else None

    # -- construction ---------------------------------------------------------------------------

    def _first_reset(self) -> None:
        """Reset the envs into a slab of one step, and show the policy what it will see."""
        with self._surroundings():
            layout = Layout(self._env_fields(), 1, self.group.num_envs)
            self._first = self._new_slab(layout)
            columns.clear(self._first)
            self._reset_all(self._first)
            carried = [key for key, place in layout.places.items() if place.field.carried]
            self.carry = {key: self._first.tensors[key][0].clone() for key in carried}
            self._show()

    def _new_slab(self, layout: Layout) -> Slab:
        return slab_for(self.group, layout, pinned=self._gpu is not None)

    def _show(self) -> None:
        """Show the policy what it will see."""
        lead = self.interface.batch_shape
        rows = {
            key: row.reshape((*lead, *row.shape[1:])).to(self.policy.device, copy=True)
            for key, row in self._seen().items()
        }
        probe(self.policy, self.user_policy, rows, self.plan.compile_policy)

    def _seen(self) -> dict[Any, torch.Tensor]:
        """Return the first rows of all that a policy may read."""
        flags = {key: self._first.tensors[key][0] for key in columns.ROOT_FLAGS}
        return {**flags, **self.carry, keys.TRAJ_IDS: torch.from_numpy(self.traj_ids.copy())}

    def use_policy(self, policy: Any) -> None:
        """Go on with another policy of the same form: a copy that nobody else changes."""
        carried = self.policy.carried.state_dict()
        self.user_policy = policy
        self.policy = self._adapted(policy)
        with self._surroundings():
            self._show()
            self.policy.carried.load_state_dict(carried, self.policy.device)
            self._lanes = Lanes(self) if self.plan.env_groups > 1 else None

    def _adapted(self, policy: Any) -> Policy:
        adapter = as_policy(policy, self.interface, self.sampler, self.plan.trust_policy)
        adapter.device = device = self.devices[1]
        adapter.asked_device = self.plan.devices.policy
        if self.plan.cudagraph_policy and device.type != "cuda":
            raise UsageError(
                f"cudagraph_policy needs a policy on a CUDA device; it is on {device}. Give a "
                "policy_device, or leave cudagraph_policy out."
            )
        if isinstance(adapter, TorchPolicy):
            adapter.graphed = self.plan.cudagraph_policy
        adapter.states = [State(one.key, one.initial.to(self.home)) for one in adapter.states]
        return adapter

    @property
    def home(self) -> torch.device:
        """Where slabs are written."""
        return torch.device("cpu")

    def _env_fields(self) -> list[Field]:
        """Return the fields that do not depend on what the policy writes."""
        return columns.env_fields(
            self.interface,
            self.group.info_fields,
            self.policy,
            self.group.outcome,
            masked=self.plan.masked or self.group.skips_rows or not self.plan.reset_when_done,
            compact=self.plan.compact_obs,
        )

    def _fields(self) -> list[Field]:
        random = self.plan.init_random_frames is not None
        fields = [*self._env_fields(), *self.policy.extras]
        if self.plan.max_frames_per_traj is not None:
            self._counts = columns.count_fields(self.group.outcome, fields)
        own = columns.own_fields(random=random, worker=self.plan.marks_worker)
        return [*fields, *own, *self._counts]

    # -- seeds and resets -----------------------------------------------------------------------

    def set_seed(self, seed: int, static: bool = False) -> None:
        """Restart every random stream; the next rollout starts with fresh episodes.

        Args:
            seed: From which those of the envs are made.
            static: All envs get the same one.
        """
        self._seed, self._seed_is_new, self._seeds_again = seed, True, False
        self._one_seed = static
        self.reset()
        self._seed_envs()
        self.sampler.seed(seed)
        self.random_state = RandomState(seed, self.streams[0], self._gpu)

    def _seed_envs(self) -> None:
        streams = [0] * len(self.streams) if self._one_seed else self.streams
        self.group.seed(env_seeds(self._seed or 0, streams))

    resets_some = True
    """It looks, at the beginning of a rollout, for envs that are to be reset alone."""

    def reset(self, which: Sequence[int] | None = None) -> None:
        """Start new episodes with the next rollout; open ones are cut where they stand.

        Args:
            which: The envs; all by default.
        """
        if which is None:
            self._needs_reset = True
            self.policy.carried.clear()
            return
        group = self.group
        alone = self.resets_some and group.resets_singly and not group.skips_rows
        if not (alone and self.plan.reset_when_done):
            raise UsageError(
                "these envs cannot be reset one by one: they are in a vector env that resets "
                "itself, or on a GPU, or reset_when_done=False is given. Call reset() for all "
                "of them."
            )
        self._resets.update(which)

    def _renew(self, slab: Slab, which: Sequence[int]) -> None:
        """Start new episodes of these envs in the first row."""
        self._reset_some(slab, 0, which, which)
        for key in columns.ROOT_FLAGS:
            slab.tensors[key][0, which] = False
        self.traj_ids[which] = np.arange(self.next_traj_id, self.next_traj_id + len(which))
        self.next_traj_id += len(which)
        self.episodes.forget(which)
        self._resets.clear()

    def _reset_all(self, slab: Slab) -> None:
        if self._seeds_again:  # the first reset was broken off: some envs have used their seeds
            self._seed_envs()
        self._seeds_again = self._seed_is_new
        try:
            self.group.bind(slab, bare=True).reset(0, None)
        except CallFailed as failure:
            raise self._located(failure) from failure.__cause__
        for key in columns.ROOT_FLAGS:
            slab.tensors[key][0] = False
        for state in self.policy.states:
            slab.tensors[state.key][0] = state.initial
        if self.policy.needs_is_init:
            slab.tensors[keys.IS_INIT][0] = True
        self._new_trajectories()
        self.frozen[:] = self.renewing[:] = False
        self._needs_reset = self._seed_is_new = self._seeds_again = False
        self._resets.clear()

    def _new_trajectories(self) -> None:
        n = self.group.num_envs
        self.traj_ids = np.arange(self.next_traj_id, self.next_traj_id + n)
        self.next_traj_id += n
        self.episodes.forget()

    @property
    def all_frozen(self) -> bool:
        """Whether every env has ended and none is to be reset."""
        return bool(self.frozen.all()) and not self._needs_reset

    @property
    def open_ids(self) -> list[int]:
        """The trajectories that go on in the next rollout."""
        return [] if self._needs_reset else self.traj_ids.tolist()

    # -- a rollout ------------------------------------------------------------------------------

    def collect(
        self,
        steps: int | None = None,
        slab: Slab | None = None,
        refresh: Callable[[], int] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Filled:
        """Make one rollout and return the slab that holds it.

        Args:
            steps: How many steps; as planned by default.
            slab: Where to; from the runner's own pool by default.
            refresh: Called before each forward pass; returns the version of the weights.
            stop: Called after each step; True ends the rollout there.
        """
        steps = self.plan.steps if steps is None else steps
        started = perf_counter()
        if self.transfer is not None:
            self.transfer.reclaim()
        slab = self.pool.take() if slab is None else slab
        self.filled, self._ends, self._versions = 0, [], [(0, self.version)]
        try:
            with self._surroundings(), self.shield.lifted():  # to swap states is bookkeeping
                self._roll(slab, steps, refresh, stop)
        except CallFailed as failure:
            located = self._located(failure)
            self._keep_partial(slab, failure.completed)
            raise located from failure.__cause__
        except BaseException as error:
            step = self.steps_made + self.filled
            self._keep_partial(slab)
            called = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            policys = isinstance(error, Exception) and not isinstance(error, EnvError)
            if not policys or "settle" in called:
                raise
            text, cause = str(error), error.__cause__
            if not isinstance(error, SwathError):
                text = f"the policy raised {type(error).__name__}: {error}; see the cause above"
                cause = error
            where = {"worker": self.plan.worker, "step": step, "seed": self._seed}
            raise PolicyError(text, **where) from cause
        finally:
            self.shares.wall += perf_counter() - started
        return self._finish(slab, self.filled)

    def _roll(
        self,
        slab: Slab,
        steps: int,
        refresh: Callable[[], int] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        """Fill the rows of a slab."""
        lanes = None if self.random_frames.left else self._lanes
        renews = self.plan.reset_when_done and not self.plan.stop_at_first_end
        alone = lanes is None
        renews = renews and not self.policy.primed  # whose next row is written after the step
        # First of all: envs in other processes may still be in a step that was broken off, and
        # write to this slab. To bind them waits for that.
        self._envs = self.group.bind(slab, bare=alone, eager=alone and renews)
        self._begin(slab)
        if lanes is not None:
            refreshed = self._refreshing(lambda t: None, refresh)
            lanes.roll(
                slab, steps, lambda s, span: _stopping(self._settler(s, span), stop), refreshed
            )
            return
        settle = _stopping(self._settler(slab), stop)
        with self.policy.bound(slab, steps) as act:
            act = self._numbering(act, slab)
            act = self.random_frames.wrap(act, self, slab, steps)
            act = self._refreshing(act, refresh)
            loop.run(steps, act, self._envs.step, settle, self.shares)

    def lend(self, filled: Filled) -> TensorDict:
        """Return a rollout as a batch; its slab comes back when nobody views it any more."""
        lead = self.interface.batch_shape
        return lend(self.pool, filled, self.interface.observations, lead, self.transfer)

    def view(self, filled: Filled) -> TensorDict:
        """Return a rollout as a batch that stays as it is until the next one."""
        return view(filled, self.interface.observations, self.interface.batch_shape)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stream.entered())
            if self.random_state is not None:
                stack.enter_context(self.random_state.installed())
            stack.enter_context(torch.no_grad())
            stack.enter_context(set_interaction_type(self.plan.exploration_type))
            yield

    def _begin(self, slab: Slab) -> None:
        columns.clear(slab)
        for key, row in self.carry.items():
            slab.tensors[key][0] = row
        if self._needs_reset:
            self._reset_all(slab)
        elif self._resets:
            self._renew(slab, sorted(self._resets))
        if self.group.skips_rows:  # said before the row is acted on: that takes no random frame
            slab.arrays[keys.MASK][0] = ~self.renewing
        self._next_limit = _NEVER
        if self._limits is not None:
            left = zip(self._limits, self.episodes.lengths.tolist(), strict=True)
            self._last_steps = [limit - 1 - length for limit, length in left]
            self._next_limit = min(self._last_steps)
        if self.frozen.any():
            columns.hold(slab, self.group.outcome, np.flatnonzero(self.frozen), 0)

    def _refreshing(self, act: Act, refresh: Callable[[], int] | None) -> Act:
        """Return `act` with a look at the newest weights before each forward pass."""
        if refresh is None:
            return act

        def act_fresh(t: int) -> None:
            version = refresh()
            if version != self.version:
                self.version = version
                self._versions.append((t, version))
            act(t)

        return act_fresh

    def _numbering(self, act: Act, slab: Slab) -> Act:
        """Return `act` with the ids of trajectories written first, if the policy reads them.

        Those of all others are written once per rollout; see `columns.fill_ids`.
        """
        if not (isinstance(self.policy, TorchPolicy) and keys.TRAJ_IDS in self.policy.inputs):
            return act
        column, ids, known = slab.arrays[keys.TRAJ_IDS], self.traj_ids.copy(), 0

        def act_numbered(t: int) -> None:
            nonlocal known
            for number in range(known, len(self._ends) if self.plan.reset_when_done else known):
                ids[self._ends[number][1]] = self.next_traj_id + number
            known = len(self._ends)
            column[t] = ids
            act(t)

        return act_numbered

    def _settler(self, slab: Slab, span: tuple[int, int] | None = None) -> Settle:
        """Return the function that closes row t of this slab, or of some of its envs."""
        pairs = self._pairs(slab if span is None else slab.part(*span))
        span = span or (0, self.group.num_envs)

        def settle(t: int, ended: Sequence[int]) -> bool:
            for to, source in pairs:
                to[t] = source[t]
            if len(ended) or t >= self._next_limit:
                return self._end(slab, t, ended, span)
            self.filled = t + 1
            return False

        return settle

    def _pairs(self, slab: Slab) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what is copied after each step, if the envs have not done so themselves."""
        observed: list[Key] = []
        if not self._envs.eager:
            observed += self.group.outcome.carried
            if not self.plan.compact_obs:
                observed += [leaf.key for leaf in self.interface.observations]
        return columns.next_pairs(slab, observed, self.policy)

    def _end(self, slab: Slab, t: int, ended: Sequence[int], span: tuple[int, int]) -> bool:
        """Close the episodes that ended at step t and start the next ones; True stops."""
        renewed = set(ended) if self._envs.eager else ()
        if t >= self._next_limit:
            ended = self._truncate(slab, t, ended, span)
        if not len(ended):  # the limit was one of an episode that has ended before
            self.filled = t + 1
            return False
        # Plain loops: mostly one env ends at a time, and a numpy index costs more than all of this.
        done = slab.arrays[keys.NEXT_DONE]
        for i in ended:
            done[t, i] = True
            self._ends.append((t, i))
        left = [i for i in ended if i not in renewed] if renewed else ended
        if self.plan.compact_obs and len(left):
            columns.keep_final(slab, self.interface, t, np.asarray(left))
        self.filled = t + 1  # row t is whole: a reset that fails, or Ctrl-C, does not lose it
        if not self.plan.reset_when_done:
            self._freeze(slab, t, ended)
        elif not self.plan.stop_at_first_end:
            self._reset_some(slab, t + 1, left, ended)
        if self._limits is not None:
            for i in ended:  # _next_limit may now be too early, never too late
                self._last_steps[i] = t + self._limits[i]
        return self.plan.stop_at_first_end or (not self.plan.reset_when_done and self.all_frozen)

    def _freeze(self, slab: Slab, t: int, which: Sequence[int]) -> None:
        self.group.freeze(which)
        self.frozen[which] = True
        columns.hold(slab, self.group.outcome, np.asarray(which), t + 1)

    def _reset_some(self, slab: Slab, t: int, left: Sequence[int], which: Sequence[int]) -> None:
        """Start new episodes of these envs in row t, of which only some are left to be reset."""
        if len(left):
            started = perf_counter()
            self._envs.reset(t, left)
            self.shares.resets += perf_counter() - started
        for state in self.policy.states:
            slab.tensors[state.key][t, which] = state.initial
        if self.policy.needs_is_init:
            slab.arrays[keys.IS_INIT][t, which] = True

    def _truncate(
        self, slab: Slab, t: int, ended: Sequence[int], span: tuple[int, int]
    ) -> Sequence[int]:
        """Add the envs of a span whose trajectory has reached its longest allowed length."""
        assert self._limits is not None
        live = np.flatnonzero(~self.frozen).tolist()
        over = [i for i in live if self._last_steps[i] <= t and span[0] <= i < span[1]]
        for i in over:
            slab.arrays[keys.NEXT_TRUNCATED][t, i] = True
            self._last_steps[i] = t + self._limits[i]
        self.group.outcome.truncate(slab, t, over)
        # None is live in a worker whose envs have all ended while another's go on.
        self._next_limit = min((self._last_steps[i] for i in live), default=_NEVER)
        return sorted({*ended, *over})

    def _finish(self, slab: Slab, steps: int, mask: np.ndarray | None = None) -> Filled:
        """Fill the columns that are known only now, and take over what the next rollout needs."""
        plan = self.plan
        if keys.MASK in slab.arrays:
            column = slab.arrays[keys.MASK][:steps]
            mask = column if mask is None else column & mask
        frames = steps * self.group.num_envs if mask is None else int(mask.sum())
        self.random_frames.mark(slab, steps, mask)
        renew = plan.reset_when_done and not plan.stop_at_first_end
        self.next_traj_id = columns.fill_ids(
            slab, steps, self.traj_ids, self._ends if renew else (), self.next_traj_id
        )
        for t, version in self._versions:
            slab.arrays[keys.POLICY_VERSION][t:steps] = version
        if plan.marks_worker:
            slab.arrays[keys.WORKER][:steps] = plan.worker
        if steps and plan.compact_obs:
            still_open = np.flatnonzero(~slab.arrays[keys.NEXT_DONE][steps - 1, :, 0])
            columns.keep_final(slab, self.interface, steps - 1, still_open)
        if self.group.skips_rows and steps:
            self.renewing[:] = False
            self.renewing[[i for t, i in self._ends if t == steps - 1]] = True
        if steps and (plan.reset_at_each_iter or plan.set_truncated):
            cut = columns.cut(slab, steps - 1, self.frozen)
            self.group.outcome.truncate(slab, steps - 1, cut)
            if plan.reset_at_each_iter:
                self._ends.extend((steps - 1, int(i)) for i in cut)
                self._needs_reset = True
        if self._counts:
            lengths = self.episodes.lengths
            columns.fill_counts(slab, self._counts, steps, lengths, self._ends, mask)
        gains = self.group.outcome.gains(slab, steps)
        self.finished = self.episodes.add(gains, self._ends, mask)
        for key, row in self.carry.items():
            row.copy_(slab.tensors[key][steps])
        self.steps_made += steps
        self.frames_made += frames
        return Filled(slab, steps, frames)

    # -- when something fails -------------------------------------------------------------------

    def _keep_partial(self, slab: Slab, completed: Sequence[int] = ()) -> None:
        """Keep what is whole: all rows before the failure, and of its row the envs that made it.

        The envs start new episodes afterwards.
        """
        rows, mask = self.filled, None
        which = np.asarray(completed, int)
        which = which[~self.frozen[which]]
        if len(which):
            self._close_broken(slab, rows, which)
            rows += 1
            mask = np.ones((rows, self.group.num_envs), bool)
            mask[-1] = False
            mask[-1, which] = True
            if keys.MASK in slab.arrays:  # what that leaves out is no frame here either
                slab.arrays[keys.MASK][:rows] &= mask
                mask = None
        self._ends = [end for end in self._ends if end[0] < rows]  # Ctrl-C comes anywhere
        with contextlib.suppress(SwathError):
            whole = self._finish(slab, rows, mask)
            self.partial = Filled(slab, rows, whole.frames, mask)
        self._needs_reset = True

    def _close_broken(self, slab: Slab, t: int, which: np.ndarray) -> None:
        """Close row t of the envs that had made its step when another failed, as `_end` would."""
        for to, source in self._pairs(slab):
            to[t, which] = source[t, which]
        columns.mark_done(slab, t, which)
        done = slab.arrays[keys.NEXT_DONE][..., 0]
        if self.plan.compact_obs:
            # Where envs reset themselves, these have put the last observations aside already.
            left = which[~done[t, which]] if self._envs.eager else which
            columns.keep_final(slab, self.interface, t, left)
            if t:  # the last row of those that have none here
                columns.keep_final(slab, self.interface, t - 1, np.flatnonzero(~done[t - 1]))
        if self._limits is not None:
            over = [i for i in which.tolist() if self._last_steps[i] <= t]
            slab.arrays[keys.NEXT_TRUNCATED][t, over] = done[t, over] = True
            self.group.outcome.truncate(slab, t, over)
        self._ends += [(t, i) for i in which.tolist() if done[t, i]]

    def _located(self, failure: CallFailed) -> EnvError:
        cause = failure.__cause__
        text = failure.message or (
            f"the env raised {type(cause).__name__}: {cause} in {failure.call}; see the cause above"
        )
        step = self.steps_made + self.filled
        if failure.index is None:
            return EnvError(text, worker=self.plan.worker, step=step, seed=self._seed)
        index = self.indices[failure.index]
        stream = 0 if self._one_seed else self.streams[failure.index]
        seed = None if self._seed is None else env_seed(self._seed, stream)
        return EnvError(text, worker=self.plan.worker, env=index, step=step, seed=seed)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next rollout depends on, the envs included where they pickle."""
        random_state = self.random_state or RandomState.from_global(self._gpu)
        return {
            "carry": {key: row.cpu().clone() for key, row in self.carry.items()},
            "needs_reset": self._needs_reset,
            "resets": sorted(self._resets),
            "traj_ids": self.traj_ids.copy(),
            "next_traj_id": self.next_traj_id,
            "frozen": self.frozen.copy(),
            "renewing": self.renewing.copy(),
            "version": self.version,
            "steps_made": self.steps_made,
            "frames_made": self.frames_made,
            "seed": self._seed,
            "seed_is_new": self._seed_is_new,
            "one_seed": self._one_seed,
            "random_left": self.random_frames.left,
            "sampler": self.sampler.state_dict(),
            "random_state": random_state.state_dict(),
            "episodes": self.episodes.state_dict(),
            "carried": self.policy.carried.state_dict(),
            "envs": self.group.snapshot(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        if set(state["carry"]) != set(self.carry):
            raise UsageError(
                "this state belongs to a collector with other keys: it carries "
                f"{sorted(state['carry'])}, this one {sorted(self.carry)}."
            )
        if state["envs"] is not None:  # first: their unpickling alone can fail
            self.group.restore(state["envs"])
        for key, row in state["carry"].items():
            self.carry[key].copy_(row)
        self._needs_reset, self._resets = state["needs_reset"], set(state.get("resets", ()))
        self.traj_ids[...] = state["traj_ids"]
        self.frozen[...], self.renewing[...] = state["frozen"], state["renewing"]
        self.next_traj_id, self.version = state["next_traj_id"], state["version"]
        self.steps_made, self.frames_made = state["steps_made"], state["frames_made"]
        self._seed, self.random_frames.left = state["seed"], state["random_left"]
        self._seed_is_new = self._seeds_again = state["seed_is_new"]
        self._one_seed = state.get("one_seed", False)
        self.sampler.load_state_dict(state["sampler"])
        self.random_state = self.random_state or RandomState(0, gpu=self._gpu)
        self.random_state.load_state_dict(state["random_state"])
        self.episodes.load_state_dict(state["episodes"])
        self.policy.carried.load_state_dict(state.get("carried", {}), self.policy.device)
        self.partial = None  # a rollout of the life before, which the state knows nothing of
        if state["envs"] is None:
            self._needs_reset = True


def _check(group: EnvGroup, plan: Plan) -> None:
    """Refuse what these envs cannot do."""
    if plan.max_frames_per_traj is not None and not group.resets_singly:
        raise UsageError(
            "max_frames_per_traj needs envs that can be reset one by one, which this vector env "
            "cannot. Limit the episodes inside the env (gymnasium.wrappers.TimeLimit)."
        )
    if not plan.reset_when_done and not group.freezes:
        raise UsageError(
            "reset_when_done=False needs envs that can be stepped one by one, which a vector env "
            "cannot. Pass a list of env makers or a SerialEnv."
        )


def _check_states(group: EnvGroup, policy: Policy) -> None:
    """Refuse a state that would move on in rows that are not transitions."""
    if group.skips_rows and (policy.states or policy.primed or policy.needs_is_init):
        raise UsageError(
            "a recurrent policy cannot be used with a vector env that resets in the next step: "
            "its state would advance in rows that are not transitions. Make the vector env "
            "with autoreset_mode=AutoresetMode.SAME_STEP."
        )


def _stopping(settle: Settle, stop: Callable[[], bool] | None) -> Settle:
    """Return `settle` with a look, after each step, at whether the rollout is to end."""
    if stop is None:
        return settle
    return lambda t, ended: settle(t, ended) or stop()


def _limits(group: EnvGroup, longest: int | None) -> list[int] | None:
    """Return the longest allowed trajectory of each env, by the option or by its own limit."""
    own = group.time_limits or [None] * group.num_envs
    limits = [min(limit or _NEVER, longest or _NEVER) for limit in own]
    return limits if min(limits) < _NEVER else None
