"""Whether workers write to the replay buffer themselves, and how they get at it.

The worker's side, and a drawing of both, is in `workers/store.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDict

from swath.collectors.options import Options
from swath.data import RayReplayBuffer, ReplayBuffer
from swath.errors import UsageError
from swath.links import pack, unpack
from swath.links.ray import RayLink
from swath.workers.crew import Crew
from swath.workers.messages import Died, Rolled, Store, TakeHeld
from swath.workers.store import Finish
from swath.workers.supervisor import Supervisor

__all__ = ["Storing"]


class Storing:
    """The replay buffer of a collector, as its workers see it.

    Args:
        options: Of the collector.
        finish: What is done with rollouts before they are written.
        crew: The workers.
        supervisor: Raises what has failed.
    """

    def __init__(
        self, options: Options, finish: Finish, crew: Crew, supervisor: Supervisor
    ) -> None:
        self._options, self._finish, self._crew = options, finish, crew
        self._supervisor = supervisor
        self._attached: set[int] = set()
        self.on = False

    def why_not(self, begun: bool, hooked: bool) -> str | None:
        """Return why workers cannot write, or None if they can.

        Args:
            begun: Whether frames were collected before.
            hooked: Whether there is a `post_collect_hook`.
        """
        options, buffer = self._options, self._options.replay_buffer
        links = self._crew.links.values()
        if isinstance(buffer, RayReplayBuffer):
            if not all(isinstance(link, RayLink) for link in links):
                return "the workers are not Ray actors"
        elif not isinstance(buffer, ReplayBuffer) or buffer.storage not in ("shared", "memmap"):
            return "workers can only write to a ReplayBuffer with storage='shared' or 'memmap'"
        elif not all(link.shares_memory for link in links):
            return "the workers share no memory with it"
        if hooked:
            return "post_collect_hook needs the batches in this process"
        if options.worker_timeout is not None and buffer.samples_per_insert is not None:
            return "a worker that waits for samples_per_insert would exceed worker_timeout"
        if options.trajs_per_batch is not None and begun:
            return "this process has unfinished trajectories from before start()"
        try:
            self._parcel = pack(self._finish, "postproc")
        except UsageError as error:
            return str(error)
        return None

    def share(self, *workers: int) -> dict[int, Died]:
        """Let workers write all further rollouts to the buffer, or hold them until they can.

        Returns those who have died meanwhile: that is a death like any other, for the collector to
        mend or not.
        """
        buffer = self._options.replay_buffer
        handle, *memory = buffer.handle() if buffer.prepared else (None,)
        for worker in workers:
            self._crew.order(worker, Store(self._parcel, handle), memory)
        answers, dead = self._supervisor.answered(self._crew.answers(workers))
        self._attached.update(answers if memory else ())
        return dead

    def forget(self, worker: int) -> None:
        """Take note that a worker was started again."""
        self._attached.discard(worker)

    def prepare(self, worker: int, rolled: Rolled) -> bool:
        """Make memory for frames, if a worker has some and knows of none; tell whether it does."""
        if rolled.first is None or worker in self._attached:
            return False
        self._options.replay_buffer.prepare(unpack(rolled.first))
        return True

    def held(self, workers: Sequence[int], clear: bool) -> tuple[list[TensorDict], dict[int, Died]]:
        """Return the trajectories that workers have not written yet, and let them forget or not.

        Also returns those who have died instead, with their trajectories.
        """
        if not self.on:
            return [], {}
        told = self._crew.call(dict.fromkeys(workers, TakeHeld(clear)))
        answers, dead = self._supervisor.answered(told)
        found = [unpack(one.state) for one in answers.values()]
        return [frames for frames in found if frames is not None], dead
