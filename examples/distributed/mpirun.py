"""Rank 0 fills a replay buffer, first come first served; the other ranks collect, over MPI.

pip install 'swath[mpi]'
mpirun -n 5 python examples/distributed/mpirun.py
"""

import sys

from torch import nn

from swath.collectors.distributed import DistributedCollector
from swath.data import ReplayBuffer

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
buffer = ReplayBuffer(10_000)


def act(observation):
    return net(observation).argmax(-1)


# All ranks come here; all but rank 0 stay, as workers, until rank 0 is done.
with DistributedCollector(
    "CartPole-v1", act, frames_per_batch=100, total_frames=frames, seed=0, backend="mpi"
) as collector:
    for data in collector:
        buffer.extend(data)
        sample = buffer.sample(64)  # here you would learn from it
        collector.update_policy_weights_()
    stats = collector.stats()
print(f"{stats['frames']} frames, return {stats['return']['mean']:.0f}, {len(buffer)} kept")
