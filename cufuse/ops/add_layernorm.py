"""A residual addition and the LayerNorm behind it."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._outputs import pair
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def add_layernorm(
    x: Array,
    residual: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    residual_out: Array | None = None,
    stream: Any = None,
) -> tuple[Array, Array]:
    """Add a residual and apply LayerNorm to the sum, in one launch.

    x, residual: [..., n]
    weight: [n], ones when left out
    bias: [n], none when left out
    eps: added to the variance
    out, residual_out: [..., n], each may be x or residual

    Returns (y, x + residual), both [..., n] in x's dtype; the sum is rounded before it is
    normalised. Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "add_layernorm",
        optional=("weight", "bias"),
        x=(x, "... n"),
        residual=(residual, "... n"),
        weight=(weight, "n"),
        bias=(bias, "n"),
    )
    checks.number("add_layernorm", "eps", eps, 0)
    n = bound.sizes["n"]
    y, total = pair(bound, out, residual_out)
    if y.size == 0:
        return y, total
    if bound.kind == "numpy":
        y[...], total[...] = reference.layernorm(
            bound["x"], bound["weight"], bound["bias"], residual=bound["residual"], eps=eps
        )
        return y, total
    arrays = {**bound.arrays, "y": y, "sum": total}
    kernel = jit.kernel(
        "fused/add_layernorm.cu", "add_layernorm", bound.dtype, width(n, *arrays.values())
    )
    kernel.launch(
        bound.rows, 256, {**arrays, "rows": bound.rows, "n": n, "eps": eps}, like=y, stream=stream
    )
    return y, total
