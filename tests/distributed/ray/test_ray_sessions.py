"""What becomes of collectors and buffers when this process leaves Ray; the cluster goes on."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from ray_kit import LEAN, end, leave, warm_workers

from swath.collectors.distributed import RayCollector
from swath.data import RayReplayBuffer
from swath.errors import ClosedError
from swath.testing import CountingEnv, SlowEnv

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def address():
    """Return where a cluster is that this process is not connected to."""
    from ray.cluster_utils import Cluster

    leave()
    with warm_workers():
        small = {"num_cpus": 2, "object_store_memory": 128 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=small)
    yield cluster.address
    end(cluster.shutdown)


class Ray:
    """This process's connections to a cluster, one after the other."""

    def __init__(self, address):
        self.address = address

    def connect(self):
        import ray

        ray.init(**{**LEAN, "address": self.address, "object_store_memory": None})

    def leave(self):
        import ray

        end(ray.shutdown)

    @property
    def connected(self):
        import ray

        return ray.is_initialized()

    def collector(self, maker=CountingEnv, frames_per_batch=20, **options):
        return RayCollector([maker], frames_per_batch=frames_per_batch, **options)


@pytest.fixture
def ray(address):
    ray = Ray(address)
    yield ray
    ray.leave()


def test_a_connection_that_was_there_before_stays(ray):
    ray.connect()
    with ray.collector(total_frames=40) as collector:
        assert [batch.numel() for batch in collector] == [20, 20]
    assert ray.connected


def test_a_collector_ends_no_connection_but_its_own(ray):
    collector = ray.collector(address=ray.address)
    collector.next()
    ray.leave()
    ray.connect()
    collector.shutdown()
    assert ray.connected
    ray.leave()
    first = ray.collector(address=ray.address)
    ray.leave()
    second = ray.collector(address=ray.address)
    first.shutdown()
    assert second.next().numel() == 20
    second.shutdown()
    assert not ray.connected


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("again", [False, True], ids=["", "and connected again"])
def test_a_collector_under_which_ray_was_shut_down_says_so(ray, again):
    ray.connect()
    collector = ray.collector()
    collector.next()
    ray.leave()
    if again:
        ray.connect()
    batches = iter(collector)
    with pytest.raises(ClosedError, match="Ray was shut down under this collector"):
        list(itertools.islice(batches, 100))
    collector.shutdown()
    assert ray.connected == again


@pytest.mark.usefixtures("anywhere")
def test_who_waits_while_ray_is_shut_down_is_told(ray):
    collector = ray.collector(lambda: SlowEnv(0.5), frames_per_batch=600, address=ray.address)

    def later():
        time.sleep(1)  # if it does not wait by then, it is told all the same
        ray.leave()

    other = threading.Thread(target=later)
    other.start()
    with pytest.raises(ClosedError, match="Ray was shut down under this collector"):
        collector.next()
    other.join()
    collector.shutdown()


def refusal(sample):
    try:
        sample()
    except ClosedError as error:
        return str(error)


def test_a_buffer_under_which_ray_was_shut_down_says_so(ray):
    buffer = RayReplayBuffer(1000, batch_size=8, ray_init_config={"address": ray.address})
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(refusal(buffer.sample)))
    waiting.start()
    time.sleep(1)
    ray.leave()
    waiting.join(30)
    told = "Ray was shut down under this replay buffer."
    assert heard == [told]
    assert refusal(buffer.stats) == refusal(lambda: buffer.note_version(1)) == told
    assert not ray.connected
    ray.connect()
    assert refusal(buffer.sample) == told
    buffer.close()
    assert ray.connected, "this connection is not the buffer's"
