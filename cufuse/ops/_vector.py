"""How wide the memory accesses of a row can be."""

from __future__ import annotations

from cufuse import device
from cufuse.device import Array


def width(n: int, *arrays: Array | None) -> int:
    """Return the elements of one access: 16 bytes when all rows of n allow it, else one element."""
    given = [array for array in arrays if array is not None]
    per_access = 16 // given[0].dtype.itemsize
    aligned = all(device.address(array) % 16 == 0 for array in given)
    return per_access if aligned and n % per_access == 0 else 1
