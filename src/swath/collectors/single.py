"""`Collector`: rollouts made in this process, by one runner."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.collectors.base import BaseCollector
from swath.collectors.documented import document
from swath.collectors.front_door import opened
from swath.collectors.options import Options
from swath.collectors.setup import Setup, fields_in_words, weights_in_words
from swath.collectors.torchrl_members import called_as_in_torchrl
from swath.collectors.turns import between_batches
from swath.collectors.values import Count
from swath.envs import as_group, parted
from swath.errors import UsageError
from swath.links import pack, unpack
from swath.memory.weights import WeightSpec, copy_weights, named_weights
from swath.observe import Episodes
from swath.policies import made_by, policy_module
from swath.rollout import DeviceRunner, Plan, described, envs_in_words, runner_for

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Collector"]


class Collector(BaseCollector):
    """Collect in this process: environments and a policy in, TensorDict batches out.

    Args:
        create_env_fn: The envs: a gymnasium id, an env, a vector env, a swath or TorchRL env, a
            callable that makes one, or a list of such.
        policy: None (random), a callable or `nn.Module` from observation to action, or a
            `tensordict.nn` module.
        **options: See [options](options.md); `frames_per_batch` is required.

    Examples:
        >>> from swath.envs import SerialEnv
        >>> env = SerialEnv(4, "CartPole-v1")
        >>> with Collector(env, frames_per_batch=200, total_frames=400, seed=0) as collector:
        ...     for data in collector:
        ...         print(data.batch_size)
        torch.Size([4, 50])
        torch.Size([4, 50])
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Return a collector of this process, or the one that `backend` names; see front_door."""
        elsewhere: Any = opened(arguments, options) if cls is Collector else None
        return super().__new__(cls, *arguments, **options) if elsewhere is None else elsewhere

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        parsed = Options.parse(type(self), options)
        parsed.check_policy(policy)
        if not isinstance(parsed.frames_per_batch, int):
            raise UsageError("frames_per_batch as a list is for collectors with workers.")
        if parsed.policy_factory is not None:
            policy = made_by(parsed.policy_factory)
        self._policy, self._create_env_fn = policy, create_env_fn
        self._own_policy: torch.nn.Module | None = None
        self._published: tuple[int, Mapping[str, torch.Tensor]] | None = None
        super().__init__(parsed)
        group = as_group(create_env_fn, parsed.create_env_kwargs)
        self.group = group if parsed.env_groups == 1 else parted(group, parsed.env_groups)
        try:
            plan = plan_of(parsed, steps_for(parsed.frames_per_batch, self.group.num_envs))
            self._runner = runner_for(self.group, self._placed(policy, plan), plan)
            self._runner.shield = self._shield
        except BaseException:
            self.group.close()
            raise

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch."""
        return self._runner.plan.steps * self.group.num_envs

    def _placed(self, policy: Any, plan: Plan) -> Any:
        """Return the policy where it is to compute: itself, or a copy."""
        device = plan.devices.settled(self.group, policy)[1]
        module = policy_module(policy)
        if module is None or all(w.device == device for w in named_weights(module).values()):
            return policy
        policy = unpack(pack(policy, "policy"))
        self._own_policy = policy_module(policy)
        assert self._own_policy is not None
        self._own_policy.to(device)
        return policy

    def describe(self) -> str:
        """Return the device plan: what is where, what is copied when, how many bytes.

        Examples:
            >>> from swath.envs import SerialEnv
            >>> with Collector(SerialEnv(2, "CartPole-v1"), frames_per_batch=8) as collector:
            ...     print(collector.describe())
            envs         cpu      2, GymGroup
            policy       cpu      yours
            rollouts     cpu      4 steps, 960 bytes
            batches      cpu      views of the rollout, nothing is copied
            each step             nothing is copied between devices
        """
        return described(self._runner, self._own_policy is not None)

    def _collect(self, frames_left: float) -> tuple[TensorDict, int] | None:
        if self._runner.all_frozen:
            return None
        n = self.group.num_envs
        steps = min(self._runner.plan.steps, -(-frames_left // n))
        refresh = None if self._own_policy is None else self._newest
        stop = None if self._background is None else self._background.stopping
        filled = self._runner.collect(int(steps), refresh=refresh, stop=stop)
        return self._runner.lend(filled), filled.frames

    def _get_ready(self) -> None:
        # No forward pass may see half of an update, so the thread's policy is its own.
        if self._own_policy is None and self._module() is not None:
            policy = unpack(pack(self._policy, "policy"))
            self._own_policy = policy_module(policy)
            self._runner.use_policy(policy)

    def _newest(self) -> int:
        """Take the newest weights, between two forward passes, and return their version."""
        published = self._published
        if published is not None and published[0] > self._runner.version:
            assert self._own_policy is not None
            copy_weights(published[1], self._own_policy)
            return published[0]
        return self._runner.version

    def _broken(self) -> TensorDict | None:
        filled, self._runner.partial = self._runner.partial, None
        if filled is None or not filled.steps:
            return None
        self._frames += filled.frames
        return self._runner.lend(filled)

    def _shutdown(self, timeout: float, close_env: bool) -> None:
        until = monotonic() + timeout
        if self._background is not None:
            self._background.stop(timeout)  # the envs may be closed once it does not step them
        if close_env:
            with self._shield.lifted():
                self.group.close(max(0.0, until - monotonic()))

    def _is_usable(self) -> bool:
        # A fork has copies of envs in this process and of their memory, and may go on with those.
        alone = not self.group.needs_shared_memory and self._background is None
        return alone or super()._is_usable()

    @between_batches
    def reset(self, index: Any = None) -> None:
        """Start new episodes with the next batch; unfinished ones are cut where they are.

        Args:
            index: Which envs, as an index of numpy's: a number, a list, a slice, flags. All by
                default.
        """
        self._check_open()
        if index is not None:
            which = chosen("index", index, range(self.group.num_envs))
            self._runner.reset(which)
            if self._assembler is not None:
                self._assembler.discard_open(self._runner.traj_ids[which].tolist())
            return
        self._runner.reset()
        if self._assembler is not None:
            self._assembler.discard_open()

    @between_batches
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Restart every random stream from this seed, beginning with the next batch.

        Args:
            seed: At least 0.
            static_seed: All envs get the same seed.
        """
        self._check_open()
        self._runner.set_seed(checked_seed(seed), static_seed)
        if self._assembler is not None:
            self._assembler.discard_open()
        return seed

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return max(self._runner.version, self._published[0] if self._published else 0)

    @called_as_in_torchrl
    def update_policy_weights_(self, policy_or_weights: Any = None) -> int:
        """Publish weights to the policy and return their version.

        Args:
            policy_or_weights: A module, a state dict or a TensorDict of parameters to copy into the
                policy. None if you train the policy object itself: then only the version is
                increased.
        """
        self._check_open()
        if self._own_policy is not None:
            source = self._module() if policy_or_weights is None else policy_or_weights
            fitting = WeightSpec.of(self._own_policy).fit(source)
            weights = {name: value.detach().clone() for name, value in fitting.items()}
            for device in {value.device for value in weights.values() if value.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # another thread may take them
            self._published = self.policy_version + 1, weights
            return self._note_version(self.policy_version)
        if policy_or_weights is not None and policy_or_weights is not self._policy:
            module = self._module()
            if module is None:
                raise UsageError("this collector's policy has no weights to update.")
            with self._shield:
                copy_weights(policy_or_weights, module)
        self._runner.version += 1
        return self._note_version(self._runner.version)

    def _module(self) -> torch.nn.Module | None:
        return policy_module(self._policy)

    def _copied_module(self) -> torch.nn.Module | None:
        return None if self._own_policy is None else self._module()

    def _stats(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "time": runner.shares.as_dict(),
            **(runner.ledger if isinstance(runner, DeviceRunner) else runner.episodes).as_dict(),
            "policy_version": self.policy_version,
            "slabs": runner.pool.made,
        }

    def _ended_episodes(self) -> Episodes:
        if isinstance(self._runner, DeviceRunner):
            raise UsageError(
                "for torch-native envs on a GPU only sums over episodes are kept: stats() has "
                "the means. To get the return of each episode, pass trajs_per_batch or "
                "split_trajs and sum the rewards of each trajectory."
            )
        return self._runner.episodes

    def _source_state(self) -> Any:
        with self._shield.lifted():  # envs are pickled, by their own code
            return self._runner.state_dict()

    def _load_source_state(self, state: Any) -> None:
        if state["envs"] is None:
            warnings.warn(
                "this state has no envs, since they could not be pickled, so new episodes start.",
                stacklevel=3,
            )
        self._runner.load_state_dict(state)

    def _load_policy(self, weights: dict[str, Any]) -> None:
        super()._load_policy(weights)
        if self._own_policy is not None:
            self._published = None
            copy_weights(self._module(), self._own_policy)

    def _setup(self) -> Setup:
        fields = [place.field for place in self._runner.layout.places.values()]
        return {
            "batches": "batches of one process",
            "envs": [envs_in_words(self._runner)],
            "keys": fields_in_words(fields),
            "weights": weights_in_words(WeightSpec.of(self._module())),
        }


document(Collector, "inline")


def steps_for(frames: int, num_envs: int) -> int:
    """Return the steps that give so many frames; says so if they give more."""
    steps = -(-frames // num_envs)
    if steps * num_envs != frames:
        warnings.warn(
            f"frames_per_batch={frames} is not a multiple of the {num_envs} envs and is rounded up "
            f"to {steps * num_envs}.",
            stacklevel=4,
        )
    return steps


def chosen(name: str, index: Any, among: Sequence[int]) -> list[int]:
    """Return those that an index chooses: a number, a list, a slice, or a flag for each."""
    try:
        which = np.arange(len(among))[index if isinstance(index, slice) else np.asarray(index)]
        return [among[one] for one in np.unique(which)]
    except (IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{name} is {index!r}, which selects none of {list(among)}.") from error


def checked_seed(seed: Any) -> int:
    """Return a seed that is one."""
    count: int = Count(0).read("seed", seed)
    return count


def plan_of(options: Options, steps: int, worker: int | None = None) -> Plan:
    """Return the part of the options that the loop reads; a worker stores on the host."""
    devices = options.devices(worker)
    if worker is not None:
        devices = replace(devices, storing=torch.device("cpu"))
    return Plan(
        steps=steps,
        max_frames_per_traj=options.max_frames_per_traj,
        init_random_frames=options.init_random_frames or None,
        reset_at_each_iter=options.reset_at_each_iter,
        reset_when_done=options.reset_when_done,
        set_truncated=options.set_truncated,
        compact_obs=options.compact_obs,
        exploration_type=options.interaction_type,
        trust_policy=options.trust_policy,
        memory_order=options.memory_order,
        compile_policy=options.compile_arguments,
        cudagraph=options.cudagraph,
        cudagraph_policy=options.cudagraph_policy,
        env_groups=options.env_groups,
        devices=devices,
        seed=options.seed,
    )
