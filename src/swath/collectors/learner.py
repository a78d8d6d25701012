"""Notices that a policy is trained and never published."""

from __future__ import annotations

import warnings

import torch

__all__ = ["Learner"]


class Learner:
    """The user's policy, of which those who act have copies.

    Args:
        module: Its weights; None if there is nothing to look at.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._weights = [] if module is None else list(module.parameters())
        self._changes: int | None = None

    def check_published(self, stacklevel: int) -> None:
        """Warn, once, of weights that have changed since the last call; nobody has got them."""
        if not self._weights:
            return
        try:
            # What torch counts of each tensor's changes in place: no number of it is looked at.
            changes = sum(weight._version for weight in self._weights)
        except RuntimeError:  # they were made in inference mode, and are not trained
            self._weights.clear()
            return
        if self._changes not in (None, changes):
            self._weights.clear()
            warnings.warn(
                "the policy has changed since the last batch, but its weights were never "
                "published, so the workers still collect with copies of its first weights. "
                "Call collector.update_policy_weights_() after each training step, or pass "
                "update_at_each_batch=True.",
                stacklevel=stacklevel + 1,
            )
        self._changes = changes
