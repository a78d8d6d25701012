"""Which medium blocks travel over, by its name."""

from __future__ import annotations

from typing import Any

from swath.errors import UsageError, nearest

__all__ = ["BACKENDS", "medium_for"]

BACKENDS = ("gloo", "nccl", "mpi", "rpc")


def medium_for(
    backend: str, host: str, name: str, patience: float, in_mpi: bool, **rpc: Any
) -> Any:
    """Return a medium.

    Args:
        backend: One of `BACKENDS`.
        host: The address that workers dial.
        name: Of this run; nobody can guess it.
        patience: Seconds after which a transfer that stands is given up.
        in_mpi: The workers are ranks of an MPI program, and this process is rank 0.
        **rpc: Further options of RPC.
    """
    if backend in ("gloo", "nccl"):
        from swath.links.torch_distributed import TorchMedium

        return TorchMedium(backend, host, name, patience)
    if backend == "rpc":
        from swath.links.rpc import RpcMedium

        return RpcMedium(host, patience, rpc["visible_devices"], rpc["tensorpipe_options"])
    if backend == "mpi":
        from swath.links.mpi import MpiMedium

        return MpiMedium(patience, in_mpi)
    known = ", ".join(BACKENDS)
    raise UsageError(
        f"backend must be one of {known}; got {backend!r}.{nearest(backend, BACKENDS)}"
    )
