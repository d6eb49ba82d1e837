"""LayerNorm."""

from __future__ import annotations

from typing import Any

from cufuse import checks, jit, reference
from cufuse.device import Array
from cufuse.ops._stream import on_stream
from cufuse.ops._vector import width


@on_stream
def layernorm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """Normalise rows to mean 0 and variance 1, multiply by a weight and add a bias, in one launch.

    x: [..., n]
    weight: [n], ones when left out
    bias: [n], none when left out
    eps: added to the variance
    out: [..., n], may be x

    Returns [..., n] in x's dtype; mean and variance are taken in float32, one after the other (Ba,
    Kiros and Hinton 2016). Raises ValueError for sizes and TypeError for dtypes or mixed libraries.
    """
    bound = checks.bind(
        "layernorm",
        optional=("weight", "bias"),
        x=(x, "... n"),
        weight=(weight, "n"),
        bias=(bias, "n"),
    )
    checks.number("layernorm", "eps", eps, 0)
    n = bound.sizes["n"]
    y = bound.output("out", out, (*bound.lead, n), may_alias=("x",))
    if y.size == 0:
        return y
    if bound.kind == "numpy":
        y[...] = reference.layernorm(bound["x"], bound["weight"], bound["bias"], eps=eps)[0]
        return y
    arrays = {"x": bound["x"], "weight": bound["weight"], "bias": bound["bias"], "y": y}
    kernel = jit.kernel(
        "unfused/layernorm.cu", "layernorm", bound.dtype, width(n, *arrays.values())
    )
    kernel.launch(
        bound.rows, 256, {**arrays, "rows": bound.rows, "n": n, "eps": eps}, like=y, stream=stream
    )
    return y
