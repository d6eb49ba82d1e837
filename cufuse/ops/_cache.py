"""Arrays that an op writes or reads through strides: KV caches and views of them."""

from __future__ import annotations

from typing import Any

from cufuse import device
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops._vector import width


def writable(bound: Bound, op: str, name: str, given: Any) -> Array:
    """Return a bound cache; raises ValueError when bind had to copy it or it cannot be written."""
    cache = bound[name]
    same = device.address(cache) == device.address(device.as_array(given))
    if not same or not getattr(cache.flags, "writeable", True):
        raise ValueError(
            f"{op}: {name} is written in place: it has to be writable, with a contiguous last "
            "dimension and ascending strides"
        )
    return cache


def strides(array: Array, *names: str) -> dict[str, int]:
    """Return the strides of the leading dimensions in elements, under the given names."""
    return {
        name: stride // array.dtype.itemsize
        for name, stride in zip(names, array.strides, strict=False)
    }


def strided_width(head_dim: int, *arrays: Array) -> int:
    """Return the elements of one access: 16 bytes when every row of every array is so aligned."""
    vec = width(head_dim, *arrays)
    rows = (stride for array in arrays for stride in array.strides[:-1])
    return vec if all(stride % 16 == 0 for stride in rows) else 1
