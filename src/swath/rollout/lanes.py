"""Envs in groups that take turns: while one group steps on the host, the policy answers another.

```
 GPU:   A0  B0 | A1        | B1        | A2 ...
 host:         | A steps 0 | B steps 0 | A steps 1 ...
```

The loop is the one of every rollout, with a turn of one group where a step of all envs would be.
A batch is the same as without groups, as far as the policy answers an env alike in a smaller batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from swath.errors import UsageError
from swath.memory import Slab
from swath.policies import as_policy, probe
from swath.policies.base import TorchPolicy
from swath.policies.staging import StagedAct
from swath.rollout import keys, loop
from swath.rollout.env import BoundEnvs, CallFailed

if TYPE_CHECKING:
    from swath.rollout.runner import Runner, Settle

__all__ = ["Lanes"]


@dataclass(frozen=True)
class _Lane:
    """One group of envs with its own adapter of the policy."""

    group: Any
    start: int
    stop: int
    policy: TorchPolicy


class Lanes:
    """The groups of a runner whose envs were split."""

    def __init__(self, runner: Runner) -> None:
        if not isinstance(runner.policy, TorchPolicy) or runner.policy.device == runner.home:
            raise UsageError(
                "env_groups lets envs step while another device computes the actions, but the "
                f"policy is on the same device as the envs ({runner.home}). Give a "
                "policy_device, or leave env_groups out."
            )
        if keys.TRAJ_IDS in runner.policy.inputs:
            raise UsageError(
                "env_groups and a policy that reads ('collector', 'traj_ids') do not go "
                "together: the ids of one group depend on which episodes end in the others. "
                "Leave env_groups out."
            )
        self._runner = runner
        parts: Any = runner.group.parts  # type: ignore[attr-defined]
        self._lanes = [
            _Lane(g, start, stop, self._adapted(start, stop)) for g, start, stop in parts
        ]

    def _adapted(self, start: int, stop: int) -> TorchPolicy:
        """Return the policy for some of the envs."""
        runner = self._runner
        interface = replace(runner.interface, num_envs=stop - start)
        trusted = runner.plan.trust_policy
        adapter = as_policy(runner.user_policy, interface, runner.sampler, trusted)
        assert isinstance(adapter, TorchPolicy)
        adapter.device, adapter.graphed = runner.policy.device, runner.plan.cudagraph_policy
        adapter.asked_device = runner.policy.asked_device
        adapter.states = runner.policy.states
        rows = {key: row[start:stop].to(adapter.device) for key, row in runner.carry.items()}
        probe(adapter, runner.user_policy, rows, runner.plan.compile_policy)
        return adapter

    def roll(
        self,
        slab: Slab,
        steps: int,
        settle: Callable[[Slab, tuple[int, int]], Settle],
        refresh: Callable[[int], None],
    ) -> None:
        """Fill the rows of a slab.

        Args:
            slab: Of all envs.
            steps: How many.
            settle: Returns what closes row t of the envs of a span.
            refresh: Called with t before the first forward pass of each step.
        """
        with contextlib.ExitStack() as stack:
            turns = []
            stack.callback(self._join_carried)
            for lane in self._lanes:
                carried = self._runner.policy.carried.part(lane.start, lane.stop)
                lane.policy.carried.load_state_dict(carried, lane.policy.device)
                part = slab.part(lane.start, lane.stop)
                act = stack.enter_context(lane.policy.bound(part, steps))
                assert isinstance(act, StagedAct)
                closes = settle(slab, (lane.start, lane.stop))
                turns.append(_Turn(lane.group.bind(part), lane.start, act, closes))
            self._take_turns(turns, steps, refresh)

    def _join_carried(self) -> None:
        """Give what the policies of the groups carry to the one of all envs, which is kept."""
        parts = [lane.policy.carried.values for lane in self._lanes]
        self._runner.policy.carried.values = {
            key: torch.cat([part[key] for part in parts])
            for key, value in parts[0].items()
            if isinstance(value, torch.Tensor) and all(key in part for part in parts)
        }

    def _take_turns(
        self, turns: Sequence[_Turn], steps: int, refresh: Callable[[int], None]
    ) -> None:
        count = len(turns)

        def launch(turn: int) -> None:
            t, lane = divmod(turn, count)
            if t < steps:
                if not lane:
                    refresh(t)
                turns[lane].act.launch(t)

        def act(turn: int) -> None:
            # The group before has just stepped: it is answered while this one steps.
            for due in range(count) if not turn else [turn - 1 + count]:
                launch(due)
            turns[turn % count].act.finish(turn // count)

        def step(turn: int) -> Sequence[int]:
            return turns[turn % count].step(turn // count)

        def close(turn: int, ended: Sequence[int]) -> bool:
            last = (turn + 1) % count == 0
            stops = turns[turn % count].settle(turn // count, ended)
            if not last:
                self._runner.filled = turn // count  # the row is whole with its last group
            return stops and last

        loop.run(steps * count, act, step, close, self._runner.shares)


@dataclass(frozen=True)
class _Turn:
    """What a group does in its turn, for one slab."""

    envs: BoundEnvs
    start: int
    act: StagedAct
    settle: Settle

    def step(self, t: int) -> Sequence[int]:
        """Step the envs and return those that ended, by their number in the whole."""
        try:
            return [self.start + i for i in self.envs.step(t)]
        except CallFailed as failure:
            failure.completed = []  # the groups before are in the next episodes already
            if failure.index is not None:
                failure.index += self.start
            raise
