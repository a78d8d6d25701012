"""Rollouts that never leave the device: torch-native envs with a policy beside them.

```
 carry --> row 0 --> act, step, settle by masks, T times --> carry        on a stream of our own,
             '------------ eager, or one CUDA graph ---------'            the host waits for nothing
                                   |
                      static slab =copy=> slab that is lent; ids and versions over whole columns
```

A graph writes where it was recorded to write, so it has one static slab, and each rollout is copied
from there in one piece: a graph for each slab would have to be recorded again whenever a user keeps
a batch. docs/benchmarks.md has what the copy costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from swath.devices import Recorder, fingerprint, refusal, side_by_side
from swath.errors import PolicyError, UsageError
from swath.memory import DeviceMemory, Layout, Slab
from swath.policies import ActionSampler, Interface, Policy, UniformPolicy
from swath.policies.base import TorchPolicy
from swath.policies.outputs import DISCRETE, bounds
from swath.policies.probing import unchanged_buffers
from swath.rollout import columns, keys, loop
from swath.rollout.env import BoundEnvs, EnvGroup
from swath.rollout.ledger import Ledger
from swath.rollout.plan import Filled, Plan
from swath.rollout.runner import Runner, Settle
from swath.seeding import RandomState
from swath.tree import Key, key_name

__all__ = ["DeviceRunner", "runner_for"]


def runner_for(group: EnvGroup, policy: Any, plan: Plan) -> Runner:
    """Return the runner whose rollouts stay on the device of the envs, if they can."""
    why = _why_through_the_host(group, policy, plan)
    if why is None:
        return DeviceRunner(group, policy, plan)
    if plan.cudagraph is True:
        raise _no_graph(why)
    return Runner(group, policy, plan)


def _why_through_the_host(group: EnvGroup, policy: Any, plan: Plan) -> str | None:
    """Return why rollouts cannot stay on the device of the envs, or None if they can."""
    env, computes, _ = plan.devices.settled(group, policy)
    if not group.native:
        return "these envs are not torch-native"
    if env.type == "cpu":
        return "the envs are on cpu"
    if env != computes:
        return f"the envs are on {env}, and the policy is on {computes}"
    if plan.compact_obs or not plan.reset_when_done or plan.stop_at_first_end:
        return "compact_obs and reset_when_done=False have to look at every step"
    return None


def _no_graph(why: str) -> UsageError:
    return UsageError(
        f"cudagraph is True, but a rollout cannot be one CUDA graph: {why}. Change that, or pass "
        '"auto".'
    )


class DeviceRunner(Runner):
    """A `Runner` whose envs, policy and slabs are on one device; see there."""

    def __init__(
        self, group: EnvGroup, policy: Any, plan: Plan, sampler: ActionSampler | None = None
    ) -> None:
        self.device = device = group.place(None)
        self.ledger = Ledger(group.num_envs, device, plan.first_traj_id)
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._told = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._static: Slab | None = None
        self._limit = plan.max_frames_per_traj
        self._played = self.ledger.lengths.long()
        super().__init__(group, policy, plan, sampler)
        _check_reads(self.policy)
        self._ranges = _ranges(self.interface, device)
        for key in columns.ROOT_FLAGS:  # always False: who ends is reset at once
            del self.carry[key]
        self.graph = Recorder(self._record, self._parts, device, self._why_no_graph())
        if plan.cudagraph is True and self.graph.why is not None:
            raise _no_graph(self.graph.why)

    resets_some = False

    @property
    def home(self) -> torch.device:
        return self.device

    def _new_slab(self, layout: Layout) -> Slab:
        return Slab(layout, DeviceMemory(layout.nbytes, self.device))

    def _new_trajectories(self) -> None:
        self.ledger.restart()
        self.episodes.forget()

    @property
    def open_ids(self) -> list[int]:
        """The trajectories that go on in the next rollout."""
        return [] if self._needs_reset else self.ledger.open_ids()

    # -- a rollout ------------------------------------------------------------------------------

    def collect(
        self,
        steps: int | None = None,
        slab: Slab | None = None,
        refresh: Callable[[], int] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Filled:
        """Make one rollout; see `Runner.collect`.

        Weights are taken once, before it, and it is not stopped on the way. A slab that is given is
        on the host: the rollout is copied there, and complete when this returns.
        """
        if bool(self._told):  # by an earlier rollout, for which nobody has waited
            raise PolicyError(
                "the policy has chosen actions that are not finite or not in the action space "
                f"{self.interface.action_space}, in an earlier rollout. Check what it computes."
            )
        try:
            filled = super().collect(steps, None, refresh, None)
        except Exception:
            if slab is not None and self.partial is not None:
                self.partial = self._put(self.partial, slab)
            raise
        return filled if slab is None else self._put(filled, slab)

    def _put(self, filled: Filled, slab: Slab) -> Filled:
        """Copy a rollout into a slab of the host."""
        steps = filled.steps
        self.stream.synchronize()
        for key, rows in slab.tensors.items():
            rows[:steps].copy_(filled.slab.tensors[key][:steps])
        if steps:
            reward, ends = slab.arrays[keys.REWARD][:steps, :, 0], self._noted.nonzero().tolist()
            self.finished = self.episodes.add(reward, ends, None)
        self.pool.give_back(filled.slab)
        return Filled(slab, steps, filled.frames)

    def _roll(self, slab: Slab, steps: int, refresh: Any, stop: Any) -> None:
        self._closed = False
        if refresh is not None:
            self.version = refresh()
        if self._needs_reset:
            self._reset_all(self._first)
            for key, row in self.carry.items():
                row.copy_(self._first.tensors[key][0])
        if self._limit is not None:
            self._played.copy_(self.ledger.lengths)
        whole = steps == self.plan.steps and not self.random_frames.left
        whole = whole and self.policy.can_be_recorded
        if whole and self.graph.ready():
            assert self._static is not None
            self.graph.replay()
            slab.memory.block.copy_(self._static.memory.block)
        else:
            self._body(slab, steps)
            self._close(slab, steps)
        self.filled, self._closed = steps, True

    def _record(self) -> None:
        """Do what the graph is to do."""
        self._static = self._static or self._new_slab(self.layout)
        self._body(self._static, self.plan.steps)
        self._close(self._static, self.plan.steps)

    def _body(self, slab: Slab, steps: int, group: EnvGroup | None = None) -> None:
        """Make the steps; from here on nothing asks the device."""
        for key, row in self.carry.items():
            slab.tensors[key][0].copy_(row)
        envs = (group or self.group).bind(slab)
        with self.policy.bound(slab, steps) as act:
            if group is None:  # else it is a trial
                act = self.random_frames.laid_over(act, self, slab, steps)
            loop.run(steps, act, envs.step, self._settled_by(slab, envs), self.shares)
        for key, row in self.carry.items():
            row.copy_(slab.tensors[key][steps])

    def _settled_by(self, slab: Slab, envs: BoundEnvs) -> Settle:
        """Return the function that closes row t: the ends of episodes are a mask."""
        flags = (keys.NEXT_TERMINATED, keys.NEXT_TRUNCATED, keys.NEXT_DONE)
        terminated, truncated, done = (slab.tensors[key][..., 0].unbind(0) for key in flags)
        starts = slab.tensors.get(keys.IS_INIT)
        states = [
            (slab.tensors[s.key], slab.tensors[keys.following(s.key)], s.initial)
            for s in self.policy.states
        ]

        def settle(t: int, ended: Sequence[int]) -> bool:
            if self._limit is not None:
                self._played.add_(1)
                truncated[t].logical_or_(self._played >= self._limit)
            torch.logical_or(terminated[t], truncated[t], out=done[t])
            if self._limit is not None:
                self._played.masked_fill_(done[t], 0)
            envs.reset(t + 1, done[t])
            for state, following, initial in states:
                following[t].copy_(state[t + 1])
                rows = done[t].view(-1, *[1] * initial.ndim)
                torch.where(rows, initial, state[t + 1], out=state[t + 1])
            if starts is not None:
                starts[t + 1, :, 0].copy_(done[t])
            self.filled = t + 1
            return False

        return settle

    def _finish(self, slab: Slab, steps: int, mask: np.ndarray | None = None) -> Filled:
        """Fill what only the host knows, and take over what the next rollout needs."""
        frames = steps * self.group.num_envs
        with self.stream.entered(), torch.no_grad():
            if steps and not self._closed:  # it broke
                self._close(slab, steps)
            slab.tensors[keys.POLICY_VERSION][:steps].fill_(self.version)
        self._needs_reset |= self.plan.reset_at_each_iter and steps > 0
        self.random_frames.left = max(0, self.random_frames.left - frames)
        self.steps_made += steps
        self.frames_made += frames
        return Filled(slab, steps, frames)

    def _close(self, slab: Slab, steps: int) -> None:
        """Fill whole columns; number trajectories, count episodes, note actions out of range."""
        plan, rows = self.plan, {key: column[:steps] for key, column in slab.tensors.items()}
        ends = done = rows[keys.NEXT_DONE][..., 0]
        if plan.reset_at_each_iter or plan.set_truncated:
            ends = done.clone()  # without the ends that are none
            if plan.reset_at_each_iter:
                ends[-1].fill_(True)
        self._noted = ends
        self._count_steps(rows, done)
        side_by_side(
            lambda: self.ledger.count(rows[keys.REWARD][..., 0], ends),
            lambda: self.ledger.number(done, rows[keys.TRAJ_IDS]),
            lambda: self._check_actions(rows),
        )
        if ends is not done:
            rows[keys.NEXT_TRUNCATED][-1].logical_or_(~rows[keys.NEXT_DONE][-1])
            rows[keys.NEXT_DONE][-1].fill_(True)
        if plan.worker is not None and plan.marks_worker:
            rows[keys.WORKER].fill_(plan.worker)
        if keys.MASK in rows:
            rows[keys.MASK].fill_(True)

    def _count_steps(self, rows: dict[Key, torch.Tensor], done: torch.Tensor) -> None:
        """Fill in which step of its trajectory each frame is; see `columns.fill_counts`."""
        if self._counts:
            before, after = (rows[field.key][..., 0] for field in self._counts)
            numbers = torch.arange(len(done), device=self.device)[:, None]
            before[0] = -self.ledger.lengths.long()
            before[1:] = torch.where(done[:-1], numbers[1:], torch.iinfo(torch.int64).min)
            torch.sub(numbers, before.cummax(0).values, out=after)
            before.copy_(after)
            after.add_(1)

    def _check_actions(self, rows: dict[Key, torch.Tensor]) -> None:
        """Note whether any is out of range."""
        for key, (low, high) in self._ranges.items():
            least, greatest = rows[key].flatten(0, 1).aminmax(dim=0)
            self._bad.logical_or_((~((least >= low) & (greatest <= high))).any())
        self._told.copy_(self._bad, non_blocking=True)

    # -- the graph ------------------------------------------------------------------------------

    def _parts(self, group: Any = None) -> list[Any]:
        """Return the objects on which a rollout depends."""
        group = group or self.group
        return [*self.policy.modules, group.env]

    def _why_no_graph(self) -> str | None:
        """Try two steps with a copy of the envs; return what speaks against recording them."""
        wanted = self.plan.cudagraph
        if wanted is False or self.device.type != "cuda":
            return "it was switched off" if wanted is False else "there is no CUDA device"
        if isinstance(self.policy, UniformPolicy):
            return "random actions are drawn on the host"
        if wanted != True and not isinstance(self.user_policy, torch.nn.Module):  # noqa: E712
            return (
                "the variables of a function may change unseen; cudagraph=True assumes that they "
                "do not"
            )
        twin: Any = copy.copy(self.group)
        try:
            twin.env = copy.deepcopy(twin.env)
        except Exception as error:  # whatever a user's env does when it is copied
            return f"the env cannot be copied to try it ({type(error).__name__}: {error})"
        carry = {key: row.clone() for key, row in self.carry.items()}
        carried = self.policy.carried.state_dict()
        try:
            with self._surroundings(), RandomState.from_global(self.device).installed():
                with unchanged_buffers(self.policy.modules):
                    slab = self._new_slab(Layout(self._fields(), 2, self.group.num_envs))
                    self._body(slab, 1, twin)  # what is made at the first call only
                    marks = fingerprint(self._parts(twin))
                    why = refusal(lambda: self._body(slab, 1, twin))
                    others = {*marks} ^ {*fingerprint(self._parts(twin))}
        except Exception as error:
            return f"a step raised {type(error).__name__}: {error}"
        finally:
            for key, row in carry.items():
                self.carry[key].copy_(row)
            self.policy.carried.load_state_dict(carried, self.device)
        changed = sorted({name for name, _ in others})
        return why or (f"each step exchanges {', '.join(changed)}" if changed else None)

    # -- the rest -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next rollout depends on."""
        return {**super().state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        super().load_state_dict(state)
        self.ledger.load_state_dict(state["ledger"])
        self.stream.synchronize()  # or a rollout that is under way would tell of its actions yet
        self._bad.fill_(False)
        self._told.fill_(False)


def _check_reads(policy: Policy) -> None:
    """Refuse a policy that reads what is known on the host only, or not in time."""
    reads = policy.inputs if isinstance(policy, TorchPolicy) else ()
    if keys.TRAJ_IDS in reads or policy.primed:
        what = [*policy.primed, *[keys.TRAJ_IDS] * (keys.TRAJ_IDS in reads)]
        raise UsageError(
            f"the policy reads {', '.join(map(key_name, what))}, which is not available "
            "during a rollout on a GPU. Let the policy read something else, or run the envs on "
            'the CPU with env_device="cpu".'
        )


def _ranges(interface: Interface, device: torch.device) -> dict[Key, list[torch.Tensor]]:
    """Return the least and greatest action of each leaf: of a Box, any that are finite."""
    found = {}
    for leaf in interface.actions:
        if leaf.dtype.kind == "f":
            ends = np.finfo(leaf.dtype).min, np.finfo(leaf.dtype).max
        elif isinstance(leaf.space, DISCRETE):
            ends = bounds(leaf.space)
        else:
            continue
        found[leaf.key] = [torch.as_tensor(end, device=device) for end in ends]
    return found
