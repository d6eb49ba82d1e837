"""An elementwise sum, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse.device import Array
from cufuse.ops import _elementwise
from cufuse.ops._stream import on_stream


@on_stream
def add(x: Array, y: Array, *, out: Array | None = None, stream: Any = None) -> Array:
    """Add two arrays, or an array and one row, in one launch.

    x: [..., n]
    y: [..., n], or [n] for all rows of x
    out: [..., n], may be x, or y if it has x's shape

    Returns [..., n] in x's dtype. Raises ValueError for sizes and TypeError for dtypes or mixed
    libraries.
    """
    return _elementwise.pairwise("add", x, y, out, stream)
