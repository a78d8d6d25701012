"""What every collector does with rollouts, wherever they come from.

```
 rollouts --> whole trajectories or as they are --> split, postproc, hook --> yield or replay buffer
```
"""

from __future__ import annotations

import abc
import contextlib
import math
import uuid
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import IterableDataset

from swath.collectors.background import Background, Pause
from swath.collectors.learner import Learner
from swath.collectors.options import Options
from swath.collectors.setup import (
    FORMAT,
    Setup,
    check_state,
    check_weights,
    checksum,
    opened,
    packed,
)
from swath.collectors.torchrl_members import called_as_in_torchrl, look_up, refuse_to_set, register
from swath.collectors.turns import between_batches
from swath.collectors.values import Function
from swath.collectors.writing import Output, Parts
from swath.data.runs import Stream
from swath.errors import ClosedError, UsageError, WorkerError
from swath.observe import Episodes
from swath.observe.progress import Bar
from swath.owner import Owner
from swath.shield import Shield

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["STORED", "BaseCollector"]

STORED: Any = object()
"""Stands for a rollout that a worker has written to the replay buffer itself."""


class _Way:
    """Where a batch is on its way to the user.

    Its attributes are set without a call, so Ctrl-C comes before an assignment of several of them
    or behind it. That is not so of a collector's, whose `__setattr__` is a function of Python.
    """

    __slots__ = ("batches", "made", "raw")

    def __init__(self) -> None:
        self.raw: Any = None  # what was collected, counted, and not finished yet
        self.made: tuple[Any] | None = None  # what was finished and not delivered yet
        self.batches = 0  # how many were delivered


class BaseCollector(IterableDataset[Any], abc.ABC):
    """Base class of all collectors, to be used with `isinstance`.

    A collector is an iterator over batches. A loop that was left by `break` can be entered again,
    and nothing is lost.

    Examples:
        >>> from swath.collectors import Collector
        >>> issubclass(Collector, BaseCollector)
        True
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Refuse what was meant to be an option and has no name."""
        if len(arguments) > 2 and cls.__init__.__module__.startswith("swath."):
            raise UsageError(
                f"{cls.__name__} takes create_env_fn and policy by position and the rest by name, "
                f"as in frames_per_batch=100; the third argument is {arguments[2]!r}."
            )
        return super().__new__(cls)

    def __init__(self, options: Options) -> None:
        register(BaseCollector)
        self._frames = 0
        self._closed = False
        self._begun: tuple[float, int] | None = None  # when the first rollout did, at what frame
        self._pre_collect_hook = options.pre_collect_hook
        self._output = Output(options)
        self._assembler = self._output.finishing.assembler()
        self._bar = Bar(options.total_frames) if options.progress else None
        self._background: Background | None = None
        self._feeder = uuid.uuid4().hex  # its name among those who fill the replay buffer
        self._shield, self._owner = Shield(), Owner(type(self).__name__)
        self._learner: Learner | None = None
        self._way = _Way()
        self.options = options

    if not TYPE_CHECKING:  # a misspelt name is an error all the same

        def __getattr__(self, name: str) -> Any:
            return look_up(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] != "_":
            refuse_to_set(self, name)
        super().__setattr__(name, value)

    # -- what subclasses provide ----------------------------------------------------------------

    @abc.abstractmethod
    def _collect(self, frames_left: float) -> tuple[Any, int] | None:
        """Return the next rollout and its number of frames; None if no env can go on.

        It is `STORED` if a worker has written it to the replay buffer.
        """

    @abc.abstractmethod
    def _shutdown(self, timeout: float, close_env: bool) -> None:
        """Free what the subclass holds."""

    def _check_keeps_envs(self, close_env: bool) -> None:
        """Refuse to leave envs open that nobody else could close."""

    # -- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        try:
            while True:
                answer = self._advance()
                if answer is None:
                    return
                yield answer[0]
        finally:  # also where the loop is left
            self._close_bar()

    def next(self) -> Any:
        """Return the next batch, or None when there is none."""
        try:
            answer = self._advance()
        except BaseException:
            self._close_bar()
            raise
        return None if answer is None else answer[0]

    def rollout(self) -> TensorDict | None:
        """Return one rollout as it was collected, neither split nor processed; its frames count.

        With `trajs_per_batch`, trajectories with frames in this rollout are not delivered as whole
        ones; `partial()` returns the rest of them.
        """
        self._check_open()
        with self._shield, self.pause(), self._owner.turn("rollout()", outermost=True):
            if self._way.raw is None or self._assembler is not None:
                rollout: Any = self._rollout()
            else:  # a call before this one was interrupted
                rollout, self._way.raw = self._way.raw, None
            rollout = _joined(rollout)
            self._output.stream.cut()
            if self._assembler is None:
                self._way.raw = rollout
            elif rollout is not None:
                self._assembler.tear(rollout)
        if self._assembler is None:
            way = self._way
            rollout, way.raw = way.raw, None  # no call: Ctrl-C comes before this or after it
        return rollout

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _advance(self) -> tuple[Any] | None:
        """Return the next batch in a tuple, since a batch may be None with a replay buffer."""
        self._check_open()
        if self.is_running() and not self._in_background():
            raise UsageError(
                "this collector is collecting in the background, so draw batches from the "
                "replay buffer. async_shutdown() stops it."
            )
        way = self._way
        while True:
            if way.made is None:
                with self._shield, self._owner.turn("next()", outermost=True):
                    if way.made is None and not self._make():
                        return None
            answer, way.made = way.made, None  # no call: Ctrl-C comes before this or after it
            if answer is not None:  # another thread came in between and has it
                return answer

    def _make(self) -> bool:
        """Produce the next batch, if there is one.

        It is always in exactly one of `raw` and `made`, so an interrupt loses nothing.
        """
        if self._publishes_now():
            self.update_policy_weights_()
        if self.policy_version == 0:
            self._check_learner()
        way = self._way
        if way.raw is None:
            collect = self._rollout if self._assembler is None else self._whole_trajectories
            way.raw = collect()
        if way.raw is None:
            return False
        with self._shield.lifted():  # what is interrupted there is done again
            batch = None if way.raw is STORED else self._finished(way.raw)
            way.made, way.raw, way.batches = (batch,), None, way.batches + 1
        if self._bar is not None:
            self._bar.update(self.stats, done=self._frames_left() <= 0)
        return True

    def _finished(self, batch: Any) -> Any:
        """Return what is delivered for a batch; None if that is in the replay buffer."""
        if isinstance(batch, Parts):  # one leaves when it is written: Ctrl-C finds the others here
            while len(batch) > 1:
                self._output.write(self._output.processed(batch[0]), lambda: batch.pop(0))
                batch.pop(0)
            batch = batch[0]
        batch = self._output.processed(batch)
        if self.options.replay_buffer is None:
            return batch

        way = self._way

        def count() -> None:
            way.made, way.raw, way.batches = (None,), None, way.batches + 1

        self._output.write(batch, count)
        return None

    def _check_learner(self) -> None:
        """Warn if what is trained is never published to those who act."""
        if self._in_background() or self.options.publishes_every or self._publishes_every():
            return  # it will be, in its own time
        if self._learner is None:
            self._learner = Learner(self._copied_module())
        self._learner.check_published(stacklevel=5)

    def _copied_module(self) -> torch.nn.Module | None:
        """Return the weights of which others have copies; None if there are none."""
        return None

    def _publishes_now(self) -> bool:
        """Tell whether weights are to be published before the next batch."""
        interval = self.options.publishes_every or self._publishes_every()
        return 0 < interval and self._way.batches > 0 and self._way.batches % interval == 0

    def _publishes_every(self) -> int:
        """Return after how many batches weights are published if nothing is said of it."""
        return 0

    def _rollout(self) -> Any:
        left = self._frames_left()
        if left <= 0:
            return None
        if self._begun is None:
            self._begun = perf_counter(), self._frames
        if self._pre_collect_hook is not None:
            with self._shield.lifted():
                self._pre_collect_hook()
        try:
            answer = self._collect(left)
        except Exception as error:
            if self._closed and not isinstance(error, ClosedError):
                # By another thread, or a signal handler of this one: what failed was closed for it.
                raise ClosedError(
                    "this collector was shut down while a call was waiting for it."
                ) from error
            raise
        if answer is None:
            return None
        self._frames += answer[1]
        return answer[0]

    def _whole_trajectories(self) -> Any:
        assert self._assembler is not None
        if self._output.into_torchrl:
            return self._completed()
        while (batch := self._assembler.pop()) is None:
            rollout = self._rollout()
            if rollout is None:
                self._fetch_held()
                self._report_left_over()
                return None
            if rollout is STORED:
                return STORED
            self._assembler.push(rollout)
        return batch

    def _completed(self) -> Any:
        """Return the trajectories that are complete after one more rollout, as TorchRL does."""
        assert self._assembler is not None
        rollout = self._rollout()
        if rollout is not None:
            self._assembler.push(rollout)
        batch = self._assembler.pop_all()
        if batch is None and rollout is not None:
            return STORED  # nothing is left to write of this one
        if batch is None:
            self._report_left_over()
        return batch

    def _fetch_held(self) -> None:
        """Take over the trajectories that workers have not written yet."""

    def _report_left_over(self) -> None:
        assert self._assembler is not None
        held = self._assembler.pending()
        if held.frames or held.open_frames:
            warnings.warn(
                f"total_frames is reached with {held.trajectories} whole trajectories "
                f"({held.frames} frames), fewer than trajs_per_batch, and {held.open_frames} "
                "frames of unfinished ones left over; partial() returns them.",
                stacklevel=5,
            )

    def _frames_left(self) -> float:
        total = self.options.total_frames
        return math.inf if total == -1 else total - self._frames

    def __len__(self) -> int:
        if self.options.total_frames == -1:
            raise TypeError("this collector has no length: total_frames is -1, so it never ends.")
        if self._assembler is not None:
            raise TypeError(
                "this collector has no length: with trajs_per_batch the number of batches depends "
                "on the episodes."
            )
        return -(-self.options.total_frames // self.frames_per_batch)

    @property
    @abc.abstractmethod
    def frames_per_batch(self) -> int:
        """Frames of a full batch."""

    # -- hooks ----------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """The function called before each rollout, in your process; it can be set at any time."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        if hook is not None:
            Function().read("pre_collect_hook", hook)
        self._pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """The function called with each batch, in your process; it can be set at any time."""
        return self._output.hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        if hook is not None:
            Function().read("post_collect_hook", hook)
        if hook is not None and self._writer == "workers":
            raise UsageError(
                "since start() the workers write to the replay buffer directly, so this "
                "process has no batches for post_collect_hook. Set the hook before start(): "
                "then this process writes to the buffer. Or use postproc, which runs in the "
                "workers."
            )
        self._output.hook = hook

    # -- in the background ----------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until `total_frames` or the end.

        If that fails, the next call of the collector or of swath's buffer raises the error.
        """
        self._check_open()
        buffer = self.options.replay_buffer
        if buffer is None:
            raise UsageError(
                "start() needs a replay buffer to collect into; pass replay_buffer= to the "
                "collector."
            )
        if self.options.publishes_every > 0:
            raise UsageError(
                "update_at_each_batch cannot be used with start(): the weights would be "
                "published while your optimizer may be in the middle of a step. Call "
                "update_policy_weights_() yourself between steps."
            )
        if self.is_running():
            raise UsageError("this collector was started already.")
        with self._shield, self._owner.turn("start()"):
            self._get_ready()
            if hasattr(buffer, "note_feeder"):  # who waits there hears of our end
                buffer.note_feeder(self._feeder, True, self._watch)
            self._background = Background(
                lambda: self._advance() is not None,
                self._tell_buffer,
                self._rest,
                self._wake,
                self._shield,
            )
        self._background.begin()  # it takes the turn itself

    def _watch(self) -> None:
        self._owner.check_process()  # nobody writes in a fork, and locks may be held for ever
        if self._background is not None and self._background.is_own:
            if self._closed or self._background.stopping():
                raise ClosedError("this collector was shut down.")

    def _wake(self) -> None:
        """Let the background's thread hear of its end, whatever it waits for."""

    def _tell_buffer(self, failure: BaseException | None) -> None:
        buffer = self.options.replay_buffer
        with contextlib.suppress(WorkerError, ClosedError):  # it is gone, and says so to who waits
            if failure is not None and hasattr(buffer, "fail"):  # first: they are to hear of this,
                buffer.fail(failure)
            if hasattr(buffer, "note_feeder"):  # not only that nobody writes any more
                buffer.note_feeder(self._feeder, False)

    @abc.abstractmethod
    def _get_ready(self) -> None:
        """Prepare for collecting in the background."""

    def _rest(self) -> None:
        """Prepare for a pause, in the background's thread."""

    def is_running(self) -> bool:
        """Return True while the background thread runs, also while it is paused."""
        return self._background is not None and self._background.runs

    def _in_background(self) -> bool:
        return self._background is not None and self._background.is_own

    @called_as_in_torchrl
    def pause(self) -> Pause:
        """Pause after the batch that is being made, until the end of a `with` block or `resume()`.

        That batch is written even if `samples_per_insert` would hold it back.

        Does nothing unless frames are collected in the background.
        """
        if self._background is None or not self.is_running() or self._in_background():
            return Pause(None)
        unpaced = getattr(self.options.replay_buffer, "unpaced", contextlib.nullcontext)
        pause = Pause(None)
        try:
            with self._shield, unpaced():
                pause = self._background.pause()
        except BaseException:  # Ctrl-C, at the end of the block: nobody else would end the pause
            with pause:
                raise
        return pause

    def resume(self) -> None:
        """End all pauses."""
        self._check_open()
        if self._background is not None:
            self._background.resume()

    @called_as_in_torchrl
    def async_shutdown(self, timeout: float | None = 5.0, close_env: bool = True) -> None:
        """Stop collecting in the background and shut down; the same as `shutdown`."""
        self.shutdown(timeout, close_env)

    # -- weights --------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def policy_version(self) -> int:
        """The newest published version."""

    @abc.abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None) -> int:
        """Publish weights and return their version."""

    # -- life -----------------------------------------------------------------------------------

    def partial(self) -> TensorDictBase | None:
        """Return the frames that were collected but not delivered; None if there are none.

        After an exception these are the complete steps of the rollout that failed; with
        `trajs_per_batch` the trajectories that were waiting come first.
        """
        self._check_process()
        with self._shield, self.pause(), self._owner.turn("partial()", outermost=True):
            left = self._left_over()
            if left is not None:
                self._output.stream.cut()
            self._way.made = None if left is None else (left,)
        way = self._way
        answer, way.made = way.made, None  # no call: Ctrl-C comes before this or after it
        return None if answer is None else answer[0]

    def _left_over(self) -> TensorDictBase | None:
        way = self._way
        kept, way.raw, way.made = way.made or (way.raw,), None, None
        if kept[0] is not None:
            return _joined(kept[0])
        if self._assembler is None:
            return self._broken()
        self._fetch_held()  # first, since Ctrl-C may come while it waits
        broken = self._broken()
        if broken is not None:
            self._assembler.push(broken)
        return self._assembler.drain()

    @abc.abstractmethod
    def _broken(self) -> TensorDict | None:
        """Return the whole steps of a rollout that failed, once."""

    @called_as_in_torchrl
    def shutdown(self, timeout: float | None = 5.0, close_env: bool = True) -> None:
        """Stop collecting and close the envs; calling it again has no effect.

        Args:
            timeout: Seconds to wait; workers that have not ended by then are killed. None means 5.
            close_env: False leaves the envs of this process open.
        """
        self._check_keeps_envs(close_env)
        timeout = 5.0 if timeout is None else timeout
        with self._shield:  # calling it again would not end what Ctrl-C had left
            if self._closed:
                return
            usable = self._is_usable()
            if usable:
                with contextlib.suppress(Exception):  # a pipe that is gone must not keep workers
                    self._close_bar()  # while there are statistics
            self._closed = True
            if not usable:  # a fork ends nothing of its parent's
                return
            if self._background is not None:
                self._background.stop(0.0)
            self._shutdown(timeout, close_env)
            if self._background is not None:
                self._background.stop(timeout)

    def __repr__(self) -> str:
        options = vars(self).get("options")
        if options is None:  # it is being made, or could not be
            return f"<{type(self).__name__}, not made yet>"
        about = {
            "num_workers": getattr(self, "num_workers", None),
            "frames_per_batch": options.frames_per_batch,
            "total_frames": options.total_frames if options.total_frames > 0 else None,
            "frames": self._frames,
            "policy_version": getattr(self, "policy_version", None),
            "closed": self._closed or None,
        }
        parts = [f"{name}={value}" for name, value in about.items() if value is not None]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _is_usable(self) -> bool:
        """Tell whether this process may use what the collector works with."""
        return self._owner.is_here

    def _check_process(self) -> None:
        if not self._is_usable():
            self._owner.check_process()

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(
                f"this {type(self).__name__} was shut down; make a new one to collect more."
            )
        if self._background is not None and self._background.failure is not None:
            raise self._background.failure

    def __enter__(self) -> BaseCollector:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # -- state ----------------------------------------------------------------------------------

    @called_as_in_torchrl
    def stats(self) -> dict[str, Any]:
        """Return counts, speed, shares of the time, episode statistics and what was lost.

        All values are plain numbers, texts, lists and dicts. The page "Statistics" of the reference
        describes the keys.
        """
        options, total = self.options, self.options.total_frames
        stats = {
            "frames": self._frames,
            "batches": self._way.batches,
            "total_frames": None if total == -1 else total,
            "requested_frames_per_batch": options.frames_per_batch,
            "completed": self._frames_left() <= 0,
            "frames_per_second": self._speed(self._frames - (self._begun or (0.0, 0))[1]),
            **self._stats(),
        }
        told = options.replay_buffer.stats() if hasattr(options.replay_buffer, "stats") else {}
        return {**stats, "replay": {**told, "writer": self._writer}} if told else stats

    _writer = "this process"

    def _speed(self, frames: int) -> float:
        """Return so many frames per second since the first rollout of this object was begun."""
        seconds = 0.0 if self._begun is None else perf_counter() - self._begun[0]
        return frames / seconds if seconds else 0.0

    def take_episodes(self) -> dict[str, list[Any]]:
        """Return the episodes that ended since the last call: `"return"` and `"length"` of each.

        They are in the order in which they ended; with workers, in the order in which the workers
        reported them. The newest 10,000 are kept until this is called. A return is the sum of the
        rewards in the batch, which are scaled if an env scales them (`NormalizeReward`).

        Examples:
            >>> from swath.collectors import Collector
            >>> with Collector("CartPole-v1", frames_per_batch=500, seed=0) as collector:
            ...     batch = collector.next()
            ...     ended = collector.take_episodes()
            >>> len(ended["return"]) == batch["next", "done"].sum()
            tensor(True)
            >>> collector.take_episodes()
            {'return': [], 'length': []}
        """
        return self._ended_episodes().take()

    @abc.abstractmethod
    def _ended_episodes(self) -> Episodes:
        """Return what counts the episodes."""

    @abc.abstractmethod
    def _stats(self) -> dict[str, Any]:
        """Return where the time goes, and episode statistics."""

    def _note_version(self, version: int) -> int:
        """Let the replay buffer know of a version that was published, and return it."""
        buffer = self.options.replay_buffer
        if hasattr(buffer, "note_version"):
            buffer.note_version(version)
        return version

    @abc.abstractmethod
    def _source_state(self) -> Any:
        """Return all that the next rollout depends on."""

    @abc.abstractmethod
    def _load_source_state(self, state: Any) -> None:
        """Continue from what `_source_state` returned."""

    @abc.abstractmethod
    def _module(self) -> torch.nn.Module | None:
        """Return the policy if it has weights."""

    @between_batches
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: counters, ids, random streams, envs, weights.

        It holds plain numbers and tensors, so `torch.save` and `torch.load` take it as it is. Load
        only states that you trust: it contains pickled envs.
        """
        self._check_open()
        return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        module, way = self._module(), self._way
        inner = {
            "source": self._source_state(),
            "assembler": None if self._assembler is None else self._assembler_state(),
            "kept": (_own(way.raw), way.made and (_own(way.made[0]),)),
        }
        blob = packed(inner)
        state: dict[str, Any] = {
            "format": FORMAT,
            "setup": self._whole_setup(),
            "frames": self._frames,
            "batches": self._way.batches,
            "stream": self._output.stream.last,
            "collector": blob,
            "checksum": checksum(blob),
        }
        if module is not None:
            state["policy"] = {k: v.detach().clone() for k, v in module.state_dict().items()}
        return state

    def _assembler_state(self) -> dict[str, Any]:
        assert self._assembler is not None
        return self._assembler.state_dict()

    @called_as_in_torchrl
    @between_batches
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, bit for bit where the envs could be pickled.

        Frames that were collected but not delivered are replaced by those of the state. A state of
        another set-up (envs, keys, policy, workers, whole trajectories or not) is refused before
        anything is changed or unpickled. Load only states that you trust: their envs are pickled.
        """
        self._check_open()
        check_state(state, self._whole_setup())
        check_weights(state.get("policy"), self._module())
        inner = opened(state)
        self._load_source_state(inner["source"])
        if "policy" in state:
            self._load_policy(state["policy"])
        if self._assembler is not None:
            self._assembler.load_state_dict(inner["assembler"])
        self._way.raw, self._way.made = inner["kept"]
        self._frames, self._way.batches = state["frames"], state["batches"]
        self._output.stream, self._begun = Stream(state.get("stream")), None
        self._learner = None  # the weights have changed, and those who act have them

    @abc.abstractmethod
    def _setup(self) -> Setup:
        """Return what a state must have in common with its collector, in words."""

    def _whole_setup(self) -> Setup:
        whole = "" if self._assembler is None else " with trajs_per_batch"
        setup = self._setup()
        return {**setup, "batches": f"{setup['batches']}{whole}"}

    def _load_policy(self, weights: dict[str, Any]) -> None:
        module = self._module()
        if module is not None:
            module.load_state_dict(weights)


def _joined(batch: Any) -> Any:
    return batch.joined() if isinstance(batch, Parts) else batch


def _own(batch: Any) -> Any:
    """Return a batch that is no view of a slab: with one, all of that would be saved."""
    return batch.clone() if isinstance(batch, (TensorDictBase, Parts)) else batch
