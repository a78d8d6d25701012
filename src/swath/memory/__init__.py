"""Memory of rollouts: layout, slabs and their pool."""

from swath.memory.fence import fence
from swath.memory.layout import Field, Layout, MemoryOrder, Place, numpy_dtype, torch_dtype
from swath.memory.slab import HeapMemory, Memory, SharedMemory, Slab, SlabPool

__all__ = [
    "Field",
    "HeapMemory",
    "Layout",
    "Memory",
    "MemoryOrder",
    "Place",
    "SharedMemory",
    "Slab",
    "SlabPool",
    "fence",
    "numpy_dtype",
    "torch_dtype",
]
