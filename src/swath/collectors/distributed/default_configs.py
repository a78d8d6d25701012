"""Parameters of Slurm jobs that scripts start from; what they leave out, Slurm itself chooses."""

from __future__ import annotations

from typing import Any

__all__ = ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN"]

DEFAULT_SLURM_CONF: dict[str, Any] = {}
"""Of a worker's job, for `slurm_kwargs` or `submitit_collection_conf`."""
DEFAULT_SLURM_CONF_MAIN: dict[str, Any] = {}
"""Of the trainer's job, for `submitit_main_conf`."""
