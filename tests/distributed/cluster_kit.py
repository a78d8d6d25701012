"""Runs the tests of the process collectors over other media: the same promises, the same tests."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

import multi_kit as kit

from swath.collectors.distributed import DistributedCollector

PATHS = [str(Path(__file__).parent), str(Path(kit.__file__).parent)]
HEADER = "import cluster_kit; globals().update(cluster_kit.collectors(**{}))"


def collectors(**options):
    """Return what stands for the three classes of process collectors."""
    make = functools.partial(DistributedCollector, **{"launcher": "mp", **options})

    def alone(create_env_fn, policy=None, **more):
        return make([create_env_fn], policy, sync=False, **more)

    return {
        "MultiSyncCollector": functools.partial(make, sync=True),
        "MultiAsyncCollector": functools.partial(make, sync=False),
        "AsyncCollector": alone,
    }


def put_in_place(monkeypatch, modules: list[ModuleType], **options) -> None:
    """Let tests that were written for process collectors make distributed ones."""
    kinds = collectors(**options)
    monkeypatch.setenv("SWATH_TEST_HEADER", f"sys.path += {PATHS}\n{HEADER.format(options)}")
    for module in (kit, *modules):
        for name, kind in kinds.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, kind)


def tests_of(module: ModuleType, without: set[str]) -> dict[str, object]:
    """Return the tests of a module by name, without these."""
    tests = {name: one for name, one in vars(module).items() if name.startswith("test_")}
    assert without <= set(tests)
    return {name: one for name, one in tests.items() if name not in without}
