"""Pairs of options work or are refused with a sentence: docs/reference/option-pairs.md has them.

The page is written by `python scripts/option_pairs.py`.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import fields
from pathlib import Path

import explore_kit
import pytest

from swath.collectors.options import Options

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import option_pairs

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.timeout(1.5 * explore_kit.SECONDS + 300),
    # What torch.compile itself does, in the pairs with compile_policy.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def differing(owner: str, seconds: float, number: int) -> list[str]:
    """Return which pairs do something else than the page says; in random order, for some time."""
    said, wrong = option_pairs.refusals(owner), []
    pairs = option_pairs.pairs_of(owner)
    random.Random(number).shuffle(pairs)
    until = time.monotonic() + seconds
    for names in pairs:
        found = option_pairs.outcome(owner, names)
        known = {said[frozenset(some)] for some in _parts(names) if frozenset(some) in said}
        if found != "known" and found not in (known or {"works"}):
            wrong.append(f"{owner} {' and '.join(names)}: {found}; the page says {known}")
        if time.monotonic() > until:
            break
    return wrong


def _parts(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return a pair and each of the two: what is refused alone is refused beside any other."""
    return [names, *((name,) for name in names)]


def test_the_page_knows_every_option():
    known = {field.name for field in fields(Options) if "takes" in field.metadata}
    assert set(option_pairs.VALUES) == known, "add it to VALUES in scripts/option_pairs.py"


def test_every_pair_of_options_of_a_collector_works_or_is_refused_as_the_page_says():
    assert not differing("Collector", 240, 0)


@pytest.mark.parametrize("owner", option_pairs.LOCAL[1:])
def test_pairs_of_options_of_collectors_with_workers_do_what_the_page_says(owner):
    # A sample that is always the same, and with SWATH_FUZZ_SECONDS another one each time.
    seconds = explore_kit.SECONDS
    assert not differing(owner, seconds or 2, int(time.time()) if seconds else 0)


@pytest.mark.cluster
@pytest.mark.parametrize("owner", ["DistributedCollector", "RayCollector"])
def test_pairs_of_options_of_collectors_over_machines_do_what_the_page_says(owner, request):
    if owner == "RayCollector":
        request.getfixturevalue("cluster")
    seconds = explore_kit.SECONDS
    with option_pairs.cluster_of(owner):
        assert not differing(owner, seconds or 5, int(time.time()) if seconds else 0)
