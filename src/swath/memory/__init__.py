"""Memory of rollouts: layout, slabs and their pool."""

from swath.memory.fence import fence
from swath.memory.layout import (
    Field,
    Layout,
    MemoryOrder,
    Place,
    leaf_dtype,
    nested_shapes,
    numpy_dtype,
    torch_dtype,
)
from swath.memory.slab import (
    DeviceMemory,
    HeapMemory,
    Memory,
    PinnedMemory,
    SharedMemory,
    Slab,
    SlabPool,
    memory_on,
)

__all__ = [
    "DeviceMemory",
    "Field",
    "HeapMemory",
    "Layout",
    "Memory",
    "MemoryOrder",
    "PinnedMemory",
    "Place",
    "SharedMemory",
    "Slab",
    "SlabPool",
    "fence",
    "leaf_dtype",
    "memory_on",
    "nested_shapes",
    "numpy_dtype",
    "torch_dtype",
]
