"""How tests start Ray and end it."""

from __future__ import annotations

import gc
import warnings

LEAN = {
    "address": "local",
    "include_dashboard": False,
    "object_store_memory": 256 << 20,
    "logging_level": "error",
    "log_to_driver": False,
}


def end(shutdown) -> None:
    """End Ray, which lets go of its processes without having waited for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        shutdown()
        gc.collect()
