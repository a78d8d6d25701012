"""What `address` and `ray_init_config` may be is checked before anything is started."""

from __future__ import annotations

import pytest

from swath.errors import UsageError
from swath.links.cluster import enter, leave, needed, session

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_cluster")]


@pytest.mark.parametrize(
    ("address", "config", "words"),
    [
        ("127.0.0.1:1", None, "no Ray cluster answers at '127.0.0.1:1'"),
        (None, {"address": "127.0.0.1:1"}, "no Ray cluster answers"),
        ("127.0.0.1:1", {"address": "127.0.0.1:2"}, "give one"),
        (5, None, "address must be a string"),
        (None, [1], "ray_init_config must be a dict"),
        (None, {"num_cpu": 1}, "ray.init has no argument 'num_cpu'.*num_cpus"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_started(address, config, words):
    with pytest.raises(UsageError, match=words):
        enter(address, config, 1, 5.0)
    assert not needed().is_initialized()


def test_who_entered_nothing_leaves_nothing():
    assert session() is None
    leave(None)
    leave(("127.0.0.1:1", "01000000"))
    assert session() is None
