"""Random envs, policies, options and operations against a slow model of what is promised.

SWATH_FUZZ_SECONDS says for how long each test goes on, SWATH_FUZZ_SEED runs one case again.
"""

from __future__ import annotations

import functools

import cases_kit
import explore_kit
import pytest

pytestmark = pytest.mark.fuzz


def long_enough(seconds: float) -> pytest.MarkDecorator:
    """Return a limit of time that leaves room for a last case that hangs, and is made smaller."""
    return pytest.mark.timeout(1.5 * max(seconds, explore_kit.SECONDS) + 120.0)


def explored(owners: tuple[str, ...], seconds: float) -> None:
    found = explore_kit.explore(
        functools.partial(cases_kit.drawn, owners), explore_kit.SECONDS or seconds
    )
    print(found)  # noqa: T201 - with -s, how much was tried
    assert not found.faults, str(found)


@long_enough(5)
def test_random_collections_in_this_process_keep_every_promise():
    explored(("Collector",), 5)


@long_enough(8)
def test_random_collections_with_workers_keep_every_promise():
    explored(("MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector"), 8)


@pytest.mark.cluster
@long_enough(6)
def test_random_collections_over_gloo_keep_every_promise():
    explored(("DistributedCollector",), 6)


@pytest.mark.cluster
@long_enough(8)
def test_random_collections_over_ray_keep_every_promise(cluster):
    explored(("RayCollector",), 8)
