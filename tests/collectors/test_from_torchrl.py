"""What people who come from TorchRL write: each row of the table does what it says."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from swath.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector, RPCCollector
from swath.collectors.distributed.ray import RayCollector
from swath.collectors.from_torchrl import ROWS
from swath.collectors.options import Options
from swath.collectors.translation import ANY, Option
from swath.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import torchrl_table

COLLECTORS = {
    "inline": [Collector],
    "workers": [MultiSyncCollector, MultiAsyncCollector],
    "cluster": [DistributedCollector, RPCCollector],
    "ray": [RayCollector],
}
OPTIONS = [row for row in ROWS if isinstance(row, Option)]
NOBODY = object()


def about(row: Option, values: Any) -> list[tuple[str, type, Any]]:
    """Return the values that a row is about, with a collector that it is about, and its scope."""
    beside = {"num_sub_threads": 1} if row.name == "num_threads" else {}
    return [
        (scope, kind, value)
        for scope, kinds in COLLECTORS.items()
        for kind in kinds
        for value in values
        if row.is_about(kind, scope, value, {**beside, row.name: value})
    ]


def parsed(scope: Any, kind: type, **given: Any) -> Options:
    return Options.parse(kind, {"frames_per_batch": 10, **given}, scope)


def without_effect(row: Option) -> list[Any]:
    if row.nothing is ANY:
        return [True, False, None, 3, NOBODY]
    return list(row.nothing) if isinstance(row.nothing, tuple) else [None]


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.name)
def test_values_without_effect_change_no_option(row: Option) -> None:
    beside = {"num_sub_threads": 1} if row.name == "num_threads" else {}
    for scope, kind, value in about(row, without_effect(row)):
        options = parsed(scope, kind, **beside, **{row.name: value})
        assert options == parsed(scope, kind)
        assert options.without_effect == {row.name: value}


@pytest.mark.parametrize("row", [row for row in OPTIONS if row.tried], ids=lambda row: row.name)
def test_other_values_are_translated_or_refused_with_the_sentence_of_the_row(row: Option) -> None:
    examples = about(row, row.tried)
    assert examples
    for scope, kind, value in examples:
        if row.alias_of:
            options = parsed(scope, kind, **{row.name: value})
            assert options == parsed(scope, kind, **{row.alias_of: value})
        elif row.into is not None:
            options = parsed(scope, kind, **{row.name: value})
            assert options == parsed(scope, kind, **row.into(value, {}))
            assert options.without_effect == {}
        else:
            with pytest.raises(UsageError) as caught:
                parsed(scope, kind, **{row.name: value})
            assert str(caught.value).endswith(row.says)
            assert f"{kind.__name__} does not take {row.name}=" in str(caught.value)


def test_every_row_says_what_becomes_of_it() -> None:
    for row in ROWS:
        assert row.says or row.outcome == "same" or getattr(row, "alias_of", ""), row.name
    known = {field.name for field in fields(Options)}
    same = {row.name for row in ROWS if row.kind == "option" and not isinstance(row, Option)}
    assert same <= known


def test_the_page_has_the_table() -> None:
    assert torchrl_table.in_step(torchrl_table.PAGE.read_text()) == torchrl_table.PAGE.read_text()


def test_nothing_of_it_is_in_a_signature() -> None:
    import inspect

    alone = {row.name for row in OPTIONS} - {field.name for field in fields(Options)}
    for kind in (Collector, MultiSyncCollector, DistributedCollector):
        assert not alone & set(inspect.signature(kind).parameters)
    assert "without_effect" not in inspect.signature(Collector).parameters
