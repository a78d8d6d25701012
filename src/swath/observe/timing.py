"""Where the time goes: shares of env, policy and the rest, from a sample of the steps."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["SAMPLE_EVERY", "Shares"]

SAMPLE_EVERY = 32
"""One step in so many is timed; three clock readings there cost well under 1 % of a step."""


@dataclass
class Shares:
    """Seconds seen in sampled steps and in resets, and the wall time of all rollouts."""

    env: float = 0.0
    policy: float = 0.0
    resets: float = 0.0
    sampled_steps: int = 0
    steps: int = 0
    wall: float = 0.0

    def add(self, other: Shares) -> None:
        """Add what another worker saw."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def as_dict(self) -> dict[str, float]:
        """Return the share of the wall time that went to env, policy and rest."""
        if not self.sampled_steps or not self.wall:
            return {"env": 0.0, "policy": 0.0, "rest": 0.0}
        scale = self.steps / self.sampled_steps / self.wall
        env = min(1.0, self.env * scale + self.resets / self.wall)
        policy = min(1.0 - env, self.policy * scale)
        return {"env": env, "policy": policy, "rest": max(0.0, 1.0 - env - policy)}
