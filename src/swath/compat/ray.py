"""Private names of Ray."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["actor_id"]


def actor_id(actor: Any) -> str:
    """Return the id of an actor, in hexadecimal digits, by its handle."""
    known: Any = getattr(actor, "_actor_id", None)
    if known is not None:
        return str(known.hex())
    found = re.search(r"[0-9a-f]{16,}", repr(actor))
    return found[0] if found else "?"
