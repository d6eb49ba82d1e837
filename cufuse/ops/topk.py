"""The k largest values of a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream

NORMALIZE = ("none", "sum", "softmax")


@on_stream
def topk(
    x: Array,
    k: int,
    *,
    normalize: str = "none",
    out: tuple[Array | None, Array | None] | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Return the k largest values of each row and their ids, in descending order, in one launch.

    x: [rows, n]
    k: 1 to n
    normalize: "sum" divides the values by their sum, "softmax" takes the softmax over the k
    out: (values, ids)

    Returns values [rows, k] in x's dtype and ids, int32 [rows, k]. Ties go to the lower id; a NaN
    counts as smaller than everything. Made for short rows (experts): a row is read k times. Raises
    ValueError for sizes and options and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind("topk", x=(x, "rows n"))
    checks.option("topk", "normalize", normalize, NORMALIZE)
    rows, n = bound.sizes["rows"], bound.sizes["n"]
    checks.number("topk", "k", k, 1, whole=True)
    if k > n:
        raise ValueError(f"topk: k = {k} and there are n = {n} to choose from")
    values_out, ids_out = checks.pair("topk", out)
    values = bound.output("out[0]", values_out, (rows, k))
    ids = bound.output("out[1]", ids_out, (rows, k), np.int32)
    if rows == 0:
        return values, ids
    if bound.kind == "numpy":
        values[...], ids[...] = reference.topk(bound["x"], k, normalize=normalize)
        return values, ids
    arrays = {"x": bound["x"], "values": values, "ids": ids}
    kernel = jit.kernel("unfused/topk.cu", "topk", bound.dtype, f"Normalize::{normalize}")
    kernel.launch(
        -(-rows // 4), 128, {**arrays, "rows": rows, "n": n, "k": k}, like=values, stream=stream
    )
    return values, ids
