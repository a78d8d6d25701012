"""Which medium blocks travel over, by its name."""

from __future__ import annotations

from typing import Any

from swath.errors import UsageError, nearest

__all__ = ["BACKENDS", "medium_for"]

BACKENDS = ("gloo", "nccl", "mpi", "rpc")


def medium_for(backend: str, host: str, name: str, patience: float, **rpc: Any) -> Any:
    """Return a medium.

    Args:
        backend: One of `BACKENDS`.
        host: The address that workers dial.
        name: Of this run; nobody can guess it.
        patience: Seconds after which a transfer that stands is given up.
        **rpc: Further options of RPC.
    """
    if backend in ("gloo", "nccl"):
        from swath.links.torch_distributed import TorchMedium

        return TorchMedium(backend, host, name, patience)
    known = ", ".join(BACKENDS)
    raise UsageError(
        f"backend must be one of {known}; got {backend!r}.{nearest(backend, BACKENDS)}"
    )
