"""Envs that can be predicted, and checks of what a collector makes of them.

```
 CountingEnv --> any collector --> batches --> check_transitions: each frame real, once, in order
 any env -----> any collector --> batches --> check_replay: the same as stepping it by hand
```
"""

from swath.testing.checks import check_replay, check_transitions
from swath.testing.envs import CountingEnv, CrashingEnv, SlowEnv

__all__ = ["CountingEnv", "CrashingEnv", "SlowEnv", "check_replay", "check_transitions"]
