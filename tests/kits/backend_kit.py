"""The collectors with workers over each backend: the same promises, the same tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from swath.collectors import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector, RayCollector

# What `@pytest.mark.over(...)` may name; actors of "ray-far" share no memory with the trainer.
BACKENDS = ("processes", "gloo", "rpc", "mpi", "ray", "ray-far")
# A rank of MPI is started by `mpirun` only, which runs these tests again: see ranks.py.
_BY_MPIRUN = "mpi"


def params(test: Any, only: str | None) -> list[Any]:
    """Return the backends of a test; all but that of processes are long suites."""
    named = test.get_closest_marker("over")
    names = named.args if named else BACKENDS
    assert set(names) <= set(BACKENDS), names
    chosen = [name for name in names if name == only or (not only and name != _BY_MPIRUN)]
    return [
        pytest.param(name, marks=() if name == "processes" or only else pytest.mark.cluster)
        for name in chosen
    ]


class Backend:
    """Makes collectors whose workers are reached in one way."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, kind: str, makers: Any, policy: Any = None, **options: Any) -> Any:
        """Return a collector: "sync", "async", or "beside" for one worker with all these envs."""
        return {"sync": self.sync, "async": self.first_come, "beside": self.beside}[kind](
            makers, policy, **options
        )

    def sync(self, makers: Any, policy: Any = None, **options: Any) -> Any:
        """Return a collector whose batches have a part of every worker."""
        if self.name == "processes":
            return MultiSyncCollector(makers, policy, **options)
        return self._remote(makers, policy, sync=True, **options)

    def first_come(self, makers: Any, policy: Any = None, **options: Any) -> Any:
        """Return a collector whose batches are of one worker each."""
        if self.name == "processes":
            return MultiAsyncCollector(makers, policy, **options)
        return self._remote(makers, policy, sync=False, **options)

    def beside(self, makers: Any, policy: Any = None, **options: Any) -> Any:
        """Return a collector with one worker over all these envs."""
        if self.name == "processes":
            return AsyncCollector(list(makers), policy, **options)
        return self._remote([list(makers)], policy, sync=False, **options)

    def _remote(self, makers: Any, policy: Any, **options: Any) -> Any:
        if self.name.startswith("ray"):
            return RayCollector(makers, policy, **options)
        launcher = {} if self.name == "mpi" else {"launcher": "mp"}
        return DistributedCollector(makers, policy, backend=self.name, **launcher, **options)

    @property
    def header(self) -> str:
        """Lines with which a script has `backend`, too, and the imports that it needs, quickly."""
        return (
            f"import sys; sys.path += {sys.path}\n"
            "from swath.preload import preload; preload()\n"
            f"from backend_kit import Backend; backend = Backend({self.name!r})\n"
        )
