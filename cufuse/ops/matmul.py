"""A matrix product, as a launch of its own."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference, tiles
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def matmul(x: Array, w: Array, *, out: Array | None = None, stream: Any = None) -> Array:
    """Multiply by a transposed weight, in one launch: x w^T.

    x: [..., k]
    w: [n, k]
    out: [..., n]

    Returns [..., n] in x's dtype; sums in float32, and float32 is multiplied in float32. Raises
    ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("matmul", x=(x, "... k"), w=(w, "n k"))
    m, n, k = bound.rows, bound.sizes["n"], bound.sizes["k"]
    y = bound.output("out", out, (*bound.lead, n))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.matmul(bound["x"], bound["w"])
        return y
    target = tiles.target_of(y)
    tile = tiles.choose("matmul", target, m, n, k, bound.dtype)
    shape = tile.launch_shape(target, m, n, bound.dtype.itemsize)
    few = isinstance(tile, tiles.RowsTile)
    kernel = jit.kernel(
        "unfused/matmul.cu",
        "matmul_rows" if few else "matmul_tiles",
        bound.dtype,
        *tile.template,
        width(k, bound["x"], bound["w"]),
    )
    kernel.launch(
        shape.grid,
        shape.threads,
        {"x": bound["x"], "w": bound["w"], "y": y, "rows": m, "n": n, "k": k},
        like=y,
        shared_bytes=shape.shared_bytes,
        stream=stream,
    )
    return y
