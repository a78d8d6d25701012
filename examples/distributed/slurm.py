"""Collect CartPole with a Slurm job for each node.

Run it on a login node, or in a job of its own; the folder must be one that all nodes see:

    python examples/distributed/slurm.py --nodes 4 --workers 8 --folder ~/swath_jobs
"""

from __future__ import annotations

import argparse

from torch import nn

from swath.collectors.distributed import DistributedCollector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="on each node")
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--folder", default="swath_jobs")
    parser.add_argument("--partition", default=None)
    given = parser.parse_args()

    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    slurm = {"folder": given.folder, "cpus_per_task": given.workers, "timeout_min": 60}
    if given.partition:
        slurm["slurm_partition"] = given.partition
    with DistributedCollector(
        ["CartPole-v1"] * given.nodes,
        lambda observation: policy(observation).argmax(-1),
        frames_per_batch=2_000,
        total_frames=given.frames,
        sync=True,
        launcher="submitit",
        slurm_kwargs=slurm,
        launch_timeout=600,  # the longest that a job may be queued
        collector_class="sync",
        num_workers_per_collector=given.workers,
        on_worker_failure="restart",  # by another job
    ) as collector:
        for data in collector:
            print(f"{data.numel()} frames, reward {data['next', 'reward'].mean():.2f}")
        print(f"{collector.stats()['frames']} frames in all")


if __name__ == "__main__":
    main()
