"""All tests of the process collectors, over gloo."""

from __future__ import annotations

import cluster_kit
import pytest
import test_background
import test_multi
import test_multi_failures

globals().update(cluster_kit.tests_of(test_multi, {"test_options_of_another_delivery_are_refused"}))
globals().update(cluster_kit.tests_of(test_multi_failures, set()))
globals().update(cluster_kit.tests_of(test_background, set()))


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch):
    cluster_kit.put_in_place(monkeypatch, [test_background, test_multi, test_multi_failures])
