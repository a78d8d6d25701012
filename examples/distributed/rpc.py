"""Two workers whose rollouts and weights travel by `torch.distributed.rpc`.

python examples/distributed/rpc.py
"""

import sys

from torch import nn

from swath.collectors.distributed import RPCCollector

frames = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def act(observation):
    return net(observation).argmax(-1)


with RPCCollector(
    ["CartPole-v1"] * 2,
    act,
    frames_per_batch=200,
    total_frames=frames,
    seed=0,
    sync=True,
    tensorpipe_options={"num_worker_threads": 4},
) as collector:
    for data in collector:  # [workers, time]
        reward = data["next", "reward"].mean()  # here you would learn
        collector.update_policy_weights_()
    stats = collector.stats()
print(f"{stats['frames']} frames, return {stats['return']['mean']:.0f}")
