"""A residual addition and the RMSNorm behind it."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._outputs import pair
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width
from cufuse.ops.rmsnorm import ROUNDINGS


@on_stream
def add_rmsnorm(
    x: Array,
    residual: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-5,
    rounding: str = "cast_first",
    out: Array | None = None,
    residual_out: Array | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Add a residual and apply RMSNorm to the sum, in one launch.

    x, residual: [..., n]
    weight: [n], ones when left out
    eps: added to the mean of squares
    rounding: as in `rmsnorm`
    out, residual_out: [..., n], each may be x or residual

    Returns (y, x + residual), both [..., n] in x's dtype; the sum is rounded before it is
    normalised. Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "add_rmsnorm",
        optional=("weight",),
        x=(x, "... n"),
        residual=(residual, "... n"),
        weight=(weight, "n"),
    )
    checks.option("add_rmsnorm", "rounding", rounding, ROUNDINGS)
    checks.number("add_rmsnorm", "eps", eps, 0)
    n = bound.sizes["n"]
    y, total = pair(bound, out, residual_out)
    if y.size == 0:
        return y, total
    if bound.kind == "numpy":
        y[...], total[...] = reference.rmsnorm(
            bound["x"], bound["weight"], residual=bound["residual"], eps=eps, rounding=rounding
        )
        return y, total
    arrays = {**bound.arrays, "y": y, "sum": total}
    kernel = jit.kernel(
        "fused/add_rmsnorm.cu",
        "add_rmsnorm",
        bound.dtype,
        f"Rounding::{rounding}",
        width(n, *arrays.values()),
    )
    kernel.launch(
        bound.rows, 256, {**arrays, "rows": bound.rows, "n": n, "eps": eps}, like=y, stream=stream
    )
    return y, total
