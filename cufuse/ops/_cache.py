"""Arrays that an op writes or reads through strides: KV caches and views of them."""

from __future__ import annotations

from typing import Any

from cufuse import device
from cufuse.checks import Bound
from cufuse.device import Array
from cufuse.ops._vector import width


def writable(bound: Bound, k_cache: Any, v_cache: Any) -> tuple[Array, Array]:
    """Return the bound caches; raises ValueError when one cannot be written where it lies."""
    for name, given in (("k_cache", k_cache), ("v_cache", v_cache)):
        cache = bound[name]
        same = device.address(cache) == device.address(device.as_array(given))
        if not same or not getattr(cache.flags, "writeable", True):
            raise ValueError(
                f"{bound.op}: {name} is written in place: it has to be writable, with a contiguous "
                "last dimension and ascending strides"
            )
    keys, values = bound["k_cache"], bound["v_cache"]
    if keys.size and device.address(keys) == device.address(values):
        raise ValueError(f"{bound.op}: v_cache is k_cache; give it memory of its own")
    return keys, values


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
