"""swath collects experience for reinforcement learning in PyTorch.

```
            a worker (thread, process, actor, rank)                    your process
   +-----------------------------------------------+        +--------------------------------+
   |  envs  ->  rollout loop  ->  slab (one flat   | ==slab=>|  delivery -> Collector -> batch |
   |               ^               buffer [T, N])  |  link   |                                 |
   |            policy  <-  weights (one flat      | <=weights=  publish(version)  <- learner  |
   |                        buffer, versioned)     |        |                                 |
   +-----------------------------------------------+        +--------------------------------+
```

`swath.collectors` has the collectors, `swath.envs` the environments, `swath.policies` the policies
that we bring, `swath.data` datasets on disk, `swath.testing` envs and checks for tests.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "filter_warnings_subprocess"]

try:
    __version__ = version("swath")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

filter_warnings_subprocess = True
"""Whether warnings raised in worker processes are hidden."""
