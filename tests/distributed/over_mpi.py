"""The tests of the process collectors, over MPI; run in rank 0 by `ranks.py`, not collected."""

from __future__ import annotations

import cluster_kit
import pytest
import test_multi

WITHOUT = {
    "test_options_of_another_delivery_are_refused",
    "test_warnings_of_workers_are_hidden_unless_asked_for",  # other ranks write elsewhere
    "test_memory_is_flat",  # these two are long, and about what is above links
    "test_very_many_kept_batches_do_not_use_up_descriptors",
}
globals().update(cluster_kit.tests_of(test_multi, WITHOUT))


@pytest.fixture(autouse=True)
def over_mpi(monkeypatch):
    cluster_kit.put_in_place(monkeypatch, [test_multi], backend="mpi", launcher=None)
